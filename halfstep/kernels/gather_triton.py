"""A batch of a resident data set gathered by one Triton kernel, for captured steps.

torch takes a kernel for the batch's sample numbers and one for each column: three for images and
labels. It is part of the row "compile=True, polish=True" of docs/internals/speed.md (the benchmark
MLP, 5 epochs: 0.289 s in fp32); what it adds alone is not in the tables. Rows are copied as they
lie in memory, so every bit is the same. To switch it off: `polish=False`.

Imported when it is launched: only torch's builds for CUDA bring Triton.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

# Words that a program copies: two for each thread, 16 bytes where rows and words allow it.
BLOCK = 256
WARPS = 4


def launch_gather(
    sources: Sequence[Tensor],
    outs: Sequence[Tensor],
    words_per_row: tuple[int, ...],
    table: Tensor,
    table_row: Tensor,
    sample_count: int,
) -> None:
    """Fills `outs` with the rows of `sources` that a row of the table of sample numbers names.

    Sources and outs are flat views in words. Where `words_per_row` is 0, the source is itself such
    a table, and its first `sample_count` numbers in that row are copied.
    """
    programs = sum(triton.cdiv(sample_count * max(1, words), BLOCK) for words in words_per_row)
    current_device: AbstractContextManager[Any] = nullcontext()
    if table.is_cuda:
        current_device = torch.cuda.device(table.device)
    with current_device:
        _gather[(programs,)](
            sources=tuple(sources),
            outs=tuple(outs),
            table=table,
            table_row=table_row,
            sample_count=sample_count,
            table_stride=table.stride(0),
            SOURCE_COUNT=len(words_per_row),
            WORDS_PER_ROW=words_per_row,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )


@triton.jit(
    do_not_specialize=["sample_count", "table_stride"],
    do_not_specialize_on_alignment=["table", "table_row"],
)
def _gather(
    sources,
    outs,
    table,
    table_row,
    sample_count,
    table_stride,
    SOURCE_COUNT: tl.constexpr,
    WORDS_PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first programs copy from the first source, the next ones from the second, and so on."""
    program = tl.program_id(0)
    row_start = tl.load(table_row) * table_stride
    for k in tl.static_range(SOURCE_COUNT):
        if WORDS_PER_ROW[k] > 0:
            program = _copy_rows(
                sources[k],
                outs[k],
                table + row_start,
                program,
                sample_count,
                WORDS_PER_ROW[k],
                BLOCK,
            )
        else:
            program = _copy_numbers(sources[k] + row_start, outs[k], program, sample_count, BLOCK)


@triton.jit
def _copy_rows(
    source,
    out,
    sample_numbers,
    program,
    sample_count,
    WORDS_PER_ROW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies a block of the sampled rows, if it is this program's. Returns its number in the next.

    A number below 0 says that the program has copied from a source before.
    """
    size = sample_count * WORDS_PER_ROW
    if (program >= 0) & (program * BLOCK < size):
        position = program * BLOCK + tl.arange(0, BLOCK)
        sample = tl.load(sample_numbers + position // WORDS_PER_ROW, position < size, 0)
        source_at = source + (sample * WORDS_PER_ROW + position % WORDS_PER_ROW)
        words = tl.load(source_at, position < size, 0)
        tl.store(out + position, words, position < size)
    return program - tl.cdiv(size, BLOCK)


@triton.jit
def _copy_numbers(source, out, program, sample_count, BLOCK: tl.constexpr):
    """As _copy_rows, for the first numbers of the source themselves."""
    if (program >= 0) & (program * BLOCK < sample_count):
        position = program * BLOCK + tl.arange(0, BLOCK)
        numbers = tl.load(source + position, position < sample_count, 0)
        tl.store(out + position, numbers, position < sample_count)
    return program - tl.cdiv(sample_count, BLOCK)
