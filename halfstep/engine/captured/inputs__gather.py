"""Batches of a resident data set in one kernel, for captured steps: torch takes one for a batch's numbers and one for
each of its columns.

Rows are copied as they lie in memory, so every bit is the same.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.kernels.launch import WORDS, attempt, usable

MOST = 4  # columns: the kernel is compiled for each number and width of them

_WORKS: dict[
    tuple[Any, ...], bool
] = {}  # whether the kernel could be compiled, by what it is compiled for


def gather(
    columns: Mapping[str, Tensor], table: Tensor, at: Tensor, n: int, told: Sequence[Tensor] = ()
) -> tuple[dict[str, Tensor], list[Tensor]] | None:
    """column[table[at, :n]] for each column, and t[at, :n] for each of `told`, tables like the first (int64 [rows, m]).

    Beyond m it goes on with the next row: k·m are the batches of k whole rows. None: torch's kernels must do it, in a
    capture also where no call before has compiled this one. Numbers are trusted, and so are the rows that n asks for.
    """
    if not usable(table.device) or not all(_readable(c, table.device, n) for c in columns.values()):
        return None
    if (
        not 0 < len(columns) <= MOST
        or not all(map(_table, (table, *told)))
        or {t.shape for t in told} - {table.shape}
    ):
        return None
    made = {
        name: torch.empty((n, *c.shape[1:]), dtype=c.dtype, device=c.device)
        for name, c in columns.items()
    }
    rows = [torch.empty(n, dtype=t.dtype, device=t.device) for t in told]
    words = [width(c) for c in columns.values()]
    sources = [*map(_flat, columns.values(), words), *told]
    outs = [*map(_flat, made.values(), words), *rows]
    counts = (
        *(len(s) // len(c) for s, c in zip(sources, columns.values(), strict=False)),
        *(0 for _ in told),
    )
    return (made, rows) if _launched(sources, outs, counts, table, at, n) else None


def parted(t: Tensor, count: int) -> list[Tensor]:
    """`count` equal parts of a tensor that `gather` made, where they lie: each has a storage and a version of its own.

    Of a slice, as_strided(…, 0) would read the first part.
    """
    if count == 1:
        return [t]
    memory, size, shape = t.untyped_storage(), t.nbytes // count, (len(t) // count, *t.shape[1:])
    parts = [memory[i * size : (i + 1) * size] for i in range(count)]
    return [
        torch.empty(0, dtype=t.dtype, device=t.device).set_(part, 0, shape, t.stride())
        for part in parts
    ]


def _readable(column: Tensor, device: torch.device, n: int) -> bool:
    """What a kernel may copy by rows: plain memory without gaps that no gradient goes back to, places in int32."""
    plain = type(column) is Tensor and column.layout == torch.strided and not column.is_quantized
    whole = (
        plain
        and column.device == device
        and column.is_contiguous()
        and not (column.is_conj() or column.is_neg())
    )
    return whole and not column.requires_grad and 0 < n * row_bytes(column) <= 2**30


def _table(t: Tensor) -> bool:
    return t.dtype == torch.int64 and t.is_contiguous()


def row_bytes(column: Tensor) -> int:
    return math.prod(column.shape[1:]) * column.element_size()


def width(column: Tensor) -> int:
    """Bytes of the widest word that rows are made of and begin at."""
    return math.gcd(
        8, row_bytes(column), column.data_ptr(), column.storage_offset() * column.element_size()
    )


def _flat(t: Tensor, word: int) -> Tensor:
    return t.view(-1).view(WORDS[word])


def _launched(
    sources: list[Tensor],
    outs: list[Tensor],
    counts: tuple[int, ...],
    table: Tensor,
    at: Tensor,
    n: int,
) -> bool:
    """Whether the kernel ran."""
    from halfstep.kernels.gather_triton import launch

    pointers = tuple(
        (t.dtype, t.data_ptr() % 16 == 0) for t in (*sources, *outs)
    )  # Triton tells these apart
    key = (table.device, counts, pointers)
    return attempt(
        _WORKS, key, lambda: launch(sources, outs, counts, table, at, n),
        "Batches take a kernel per column", "Batches are the same.",
    )  # fmt: skip
