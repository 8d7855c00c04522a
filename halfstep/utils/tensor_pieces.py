"""Tensors in shorter pieces, for torch's kernels over lists of tensors ("foreach" kernels).

These kernels give 65,536 elements to one block of threads, so a small network keeps only a few of
a GPU's processors busy. Shorter pieces of the same memory make more blocks. Where each element is
computed by itself, the result is the same bit for bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

MIN_PIECE = 4096  # lengths are multiples of it: a block of 512 threads takes 2,048 at a time
TORCH_BLOCK = 1 << 16  # what torch gives to one block
MAX_ELEMENTS = 8 << 20  # in all tensors together: beyond that, torch's own blocks fill the GPU
TENSORS_PER_LAUNCH = {2: 64, 3: 48, 4: 36, 5: 30}  # torch's limit, by the number of lists


def piece_length(sizes: Sequence[int], list_count: int) -> int:
    """The shortest length of a piece for which torch needs no more launches than without pieces."""
    tensors_per_launch = TENSORS_PER_LAUNCH[list_count]
    launches = _ceil_div(len(sizes), tensors_per_launch)
    capacity = launches * tensors_per_launch
    for length in range(MIN_PIECE, TORCH_BLOCK, MIN_PIECE):
        if sum(_ceil_div(size, length) for size in sizes) <= capacity:
            return length
    return max(*sizes, TORCH_BLOCK)


def split(tensor: Tensor, length: int) -> tuple[Tensor, ...]:
    """The pieces of a tensor without gaps, in the order of memory, without autograd history."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return torch.split(flat, length)


def split_alike(targets: list[Tensor], sources: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Both lists in pieces, for an elementwise kernel.

    As they are where that is not possible (another layout, or gaps in memory) or not worth it
    (large tensors, or several dtypes, which torch copies one by one).
    """
    pairs = list(zip(targets, sources, strict=True))
    is_plain = all(type(t) in (Tensor, nn.Parameter) for t in (*targets, *sources))
    layouts = {t.layout for t in (*targets, *sources)}
    devices = {t.device for t in (*targets, *sources)}
    dtypes = {(target.dtype, source.dtype) for target, source in pairs}
    if not is_plain or layouts != {torch.strided} or len(devices) != 1 or len(dtypes) != 1:
        return targets, sources

    if not all(_have_same_memory_layout(target, source) for target, source in pairs):
        return targets, sources
    sizes = [target.numel() for target in targets]
    if sum(sizes) > MAX_ELEMENTS:
        return targets, sources

    length = piece_length(sizes, list_count=2)
    target_pieces = [piece for target in targets for piece in split(target, length)]
    source_pieces = [piece for source in sources for piece in split(source, length)]
    return target_pieces, source_pieces


def _have_same_memory_layout(a: Tensor, b: Tensor) -> bool:
    """Whether both have the same shape and strides, without gaps."""
    if a.shape != b.shape or a.stride() != b.stride():
        return False
    return a.is_contiguous() or a.is_contiguous(memory_format=torch.channels_last)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)
