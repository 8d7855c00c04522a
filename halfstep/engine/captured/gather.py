"""Batches of a resident data set gathered by one Triton kernel, for captured steps.

torch takes one kernel for the sample numbers of a batch and one for each of its columns. What this
buys is said in kernels/gather_triton.py; `polish=False` switches it off. Rows are copied as they
lie in memory, so every bit is the same.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.launch import WORDS, attempt, usable

MAX_COLUMNS = 4  # the kernel is compiled for each number of columns and their widths
MAX_BATCH_BYTES = 2**30  # of one column: the kernel counts places in int32

# Whether the kernel could be compiled, by everything that it is compiled for.
_kernel_works: dict[tuple[Any, ...], bool] = {}


def gather_samples(
    columns: Mapping[str, Tensor],
    sample_table: Tensor,
    table_row: Tensor,
    sample_count: int,
    copied_tables: Sequence[Tensor] = (),
) -> tuple[dict[str, Tensor], list[Tensor]] | None:
    """column[sample_table[table_row, :sample_count]] for each column, by one kernel.

    Also returns table[table_row, :sample_count] for each of `copied_tables`. All tables are int64
    [rows, batch size]. A larger `sample_count` goes on with the next rows: k · batch size samples
    are the batches of k rows. That these rows and the sample numbers exist is not checked.

    None: torch's kernels must do it. In a capture that includes a kernel that no call before has
    compiled.
    """
    device = sample_table.device
    tables = (sample_table, *copied_tables)
    if not usable(device) or not 0 < len(columns) <= MAX_COLUMNS:
        return None
    if not all(_can_copy_rows(column, device, sample_count) for column in columns.values()):
        return None
    if not all(t.dtype == torch.int64 and t.is_contiguous() for t in tables):
        return None
    if any(t.shape != sample_table.shape for t in copied_tables):
        return None

    batch: dict[str, Tensor] = {}
    sources: list[Tensor] = []
    outs: list[Tensor] = []
    words_per_row: list[int] = []
    for name, column in columns.items():
        shape = (sample_count, *column.shape[1:])
        batch[name] = torch.empty(shape, dtype=column.dtype, device=column.device)
        word = WORDS[word_bytes(column)]
        source = column.view(-1).view(word)
        sources.append(source)
        outs.append(batch[name].view(-1).view(word))
        words_per_row.append(len(source) // len(column))

    # The kernel takes 0 words in a row as: copy from this table itself.
    copies = [torch.empty(sample_count, dtype=t.dtype, device=t.device) for t in copied_tables]
    sources += copied_tables
    outs += copies
    words_per_row += [0] * len(copies)

    if not _run_kernel(sources, outs, words_per_row, sample_table, table_row, sample_count):
        return None
    return batch, copies


def split_storage(tensor: Tensor, count: int) -> list[Tensor]:
    """`count` equal parts of a contiguous tensor, not copied, each with a storage of its own.

    So each part has its own version counter, and as_strided(…, 0) of a part reads that part. With
    slices it would read the first one.
    """
    if count == 1:
        return [tensor]
    storage = tensor.untyped_storage()
    part_bytes = tensor.nbytes // count
    shape = (len(tensor) // count, *tensor.shape[1:])
    parts = []
    for i in range(count):
        part_storage = storage[i * part_bytes : (i + 1) * part_bytes]
        part = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        parts.append(part.set_(part_storage, 0, shape, tensor.stride()))
    return parts


def row_bytes(column: Tensor) -> int:
    """Bytes of one sample."""
    return math.prod(column.shape[1:]) * column.element_size()


def word_bytes(column: Tensor) -> int:
    """Bytes of the widest word (8 at most) that divides the rows and where the column begins."""
    offset_bytes = column.storage_offset() * column.element_size()
    return math.gcd(8, row_bytes(column), column.data_ptr(), offset_bytes)


def _can_copy_rows(column: Tensor, device: torch.device, sample_count: int) -> bool:
    """Whether a kernel may copy rows: plain memory without gaps that no gradient goes back to."""
    if type(column) is not Tensor or column.layout != torch.strided or column.is_quantized:
        return False
    if column.device != device or not column.is_contiguous():
        return False
    if column.is_conj() or column.is_neg() or column.requires_grad:
        return False
    return 0 < sample_count * row_bytes(column) <= MAX_BATCH_BYTES


def _run_kernel(
    sources: list[Tensor],
    outs: list[Tensor],
    words_per_row: list[int],
    sample_table: Tensor,
    table_row: Tensor,
    sample_count: int,
) -> bool:
    """Whether the kernel ran."""
    from halfstep.kernels.gather_triton import launch

    # Triton compiles anew for another dtype, and for an address that 16 does not divide.
    pointers = tuple((t.dtype, t.data_ptr() % 16 == 0) for t in (*sources, *outs))
    compiled_for = (sample_table.device, tuple(words_per_row), pointers)

    def run_kernel() -> None:
        launch(
            sources=sources,
            outs=outs,
            words_per_row=tuple(words_per_row),
            table=sample_table,
            table_row=table_row,
            sample_count=sample_count,
        )

    return attempt(
        _kernel_works,
        compiled_for,
        run_kernel,
        "Batches take a kernel per column",
        "Batches are the same.",
    )
