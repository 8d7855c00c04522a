"""The kernel of `gather`, in a module of its own: only torch's builds for CUDA bring Triton."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from collections.abc import Sequence
from contextlib import nullcontext

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

BLOCK, WARPS = 256, 4  # words of a program: two to a thread, 16 bytes where rows and words allow it


def launch(
    sources: Sequence[Tensor],
    outs: Sequence[Tensor],
    words: tuple[int, ...],
    table: Tensor,
    at: Tensor,
    n: int,
) -> None:
    """Fills the outs, flat views in words; a source has `words` of them in a row, or is itself a table: 0."""
    programs = sum(triton.cdiv(n * max(1, count), BLOCK) for count in words)
    with torch.cuda.device(table.device) if table.is_cuda else nullcontext():
        _gather[(programs,)](
            tuple(sources),
            tuple(outs),
            table,
            at,
            n,
            table.stride(0),
            len(words),
            words,
            BLOCK,
            num_warps=WARPS,
        )


@triton.jit(do_not_specialize=["n", "width"], do_not_specialize_on_alignment=["table", "at"])
def _gather(
    sources, outs, table, at, n, width, COUNT: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Programs of the first source, then those of the next; all threads of a program have the same one."""
    program, row = tl.program_id(0), tl.load(at) * width
    for k in tl.static_range(COUNT):
        if WORDS[k] > 0:
            program = _rows(sources[k], outs[k], table + row, program, n, WORDS[k], BLOCK)
        else:
            program = _row(sources[k] + row, outs[k], program, n, BLOCK)


@triton.jit
def _rows(source, out, numbers, program, n, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """A block of the rows with these numbers, if it is this program's; which of the programs after them it is."""
    size = n * WORDS
    if (program >= 0) & (program * BLOCK < size):
        place = program * BLOCK + tl.arange(0, BLOCK)
        number = tl.load(numbers + place // WORDS, place < size, 0)
        value = tl.load(source + (number * WORDS + place % WORDS), place < size, 0)
        tl.store(out + place, value, place < size)
    return program - tl.cdiv(size, BLOCK)


@triton.jit
def _row(source, out, program, n, BLOCK: tl.constexpr):
    """As `_rows`, of the first n numbers themselves."""
    if (program >= 0) & (program * BLOCK < n):
        place = program * BLOCK + tl.arange(0, BLOCK)
        tl.store(out + place, tl.load(source + place, place < n, 0), place < n)
    return program - tl.cdiv(n, BLOCK)
