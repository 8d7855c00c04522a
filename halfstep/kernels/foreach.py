"""Shorter pieces of the same tensors, for torch's kernels over lists: a block of theirs takes 65,536 elements, so that
a small network fills few of a chip's processors. Where every element is computed by itself, every bit is the same."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

PIECE = 4096  # elements: a block of 512 threads takes 2,048 at a time
CHUNK = 1 << 16  # elements that torch gives a block
MOST = 8 << 20  # elements in all: above, torch's blocks fill the chip
ROOM = {2: 64, 3: 48, 4: 36, 5: 30}  # tensors that torch takes per launch, by how many lists


def length(sizes: Sequence[int], lists: int) -> int:
    """Of a piece: the shortest for which torch's kernel takes no more launches than for whole tensors."""
    room = ROOM[lists] * -(-len(sizes) // ROOM[lists])
    fitting = (
        n for n in range(PIECE, CHUNK, PIECE) if sum(-(-size // n) for size in sizes) <= room
    )
    return next(fitting, max(*sizes, CHUNK))


def cut(t: Tensor, size: int) -> tuple[Tensor, ...]:
    """A tensor without gaps, in the order of memory; without its history."""
    return torch.split(t.detach().as_strided((t.numel(),), (1,)), size)


def cut_alike(to: list[Tensor], given: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Two lists for an elementwise kernel, in pieces if they lie alike in memory and are small; else as they are."""
    kinds = {(type(t) in (Tensor, nn.Parameter), t.layout, t.device) for t in (*to, *given)}
    dtypes = {
        (t.dtype, g.dtype) for t, g in zip(to, given, strict=True)
    }  # of several, torch copies one by one
    if len(kinds) > 1 or len(dtypes) != 1 or next(iter(kinds))[:2] != (True, torch.strided):
        return to, given
    alike = all(
        t.shape == g.shape and t.stride() == g.stride() and _whole(t)
        for t, g in zip(to, given, strict=True)
    )
    if not alike or sum(t.numel() for t in to) > MOST:
        return to, given
    size = length([t.numel() for t in to], 2)
    return [piece for t in to for piece in cut(t, size)], [
        piece for g in given for piece in cut(g, size)
    ]


def _whole(t: Tensor) -> bool:
    return t.is_contiguous() or t.is_contiguous(memory_format=torch.channels_last)
