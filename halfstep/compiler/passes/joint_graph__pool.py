"""Max pooling's backward pass by one kernel that looks at as few windows as cover a pixel.

torch's compiler looks at the most that can, with its bounds worked out anew for each: 1.5 ms in ResNet-50, batch 256,
on an H200, where moving the bytes takes 0.14. Imported when a program is compiled, not before.
"""

from math import ceil
from typing import Any

import torch
import torch._inductor.inductor_prims  # brings _low_memory_max_pool_*
from torch import Tensor
from torch.fx import Graph, Node
from torch.library import Library

from halfstep.compiler.fx import call
from halfstep.kernels.launch import INSTEAD, attempt, launch

BLOCK = 1024  # numbers of a row of pixels that one program computes

_aten, _indices = torch.ops.aten, torch.ops.prims._low_memory_max_pool_offsets_to_indices.default
_last = torch.channels_last
_WORKS: dict[Any, bool] = {}  # whether the kernel could be compiled, by what it is compiled for
_library = Library("halfstep", "FRAGMENT")
_library.define(
    "unpool(Tensor grad, Tensor offsets, int[] kernel, int[] stride, int[] padding, int[] size) -> Tensor"
)
Ints = list[int]


def rewrite(graph: Graph, device: str) -> None:
    """Of images whose channels come last; others stay, and those with gaps in their windows."""
    for node in graph.find_nodes(
        op="call_function", target=_aten.max_pool2d_with_indices_backward.default
    ):
        found: Any = node.args[-1]
        if found.target is _indices and _fits(node, found, device):
            offsets, kernel, size, stride, padding, _ = found.args
            with graph.inserting_before(node):
                ours = torch.ops.halfstep.unpool.default
                made = call(graph, ours, node.args[0], offsets, kernel, stride, padding, size)
            node.replace_all_uses_with(made)
            graph.erase_node(node)


def _fits(node: Node, found: Node, device: str) -> bool:
    values = [arg.meta["val"] for arg in (*node.args[:2], found.args[0])]  # type: ignore[union-attr]
    last = all(value.dim() == 4 and value.is_contiguous(memory_format=_last) for value in values)
    plain = (
        values[0].dtype in (torch.float32, torch.float16, torch.bfloat16)
        and values[0].device.type == device
    )
    known = all(isinstance(n, int) for value in values for n in value.shape)
    return known and last and plain and list(found.args[5]) == [1, 1]  # type: ignore[arg-type]


def _empty(grad: Tensor, size: Ints) -> Tensor:
    return torch.empty(
        [*grad.shape[:2], *size], dtype=grad.dtype, device=grad.device, memory_format=_last
    )


def _meta(
    grad: Tensor, offsets: Tensor, kernel: Ints, stride: Ints, padding: Ints, size: Ints
) -> Tensor:
    return _empty(grad, size)


def _composed(
    grad: Tensor, offsets: Tensor, kernel: Ints, stride: Ints, padding: Ints, size: Ints
) -> Tensor:
    """By torch's own operations."""
    indices = _indices(offsets, kernel, size, stride, padding, [1, 1]).flatten(2)
    sums = torch.zeros(*grad.shape[:2], size[0] * size[1], device=grad.device)
    sums.scatter_add_(2, indices, grad.flatten(2).float())
    return sums.view(*grad.shape[:2], *size).to(grad.dtype, memory_format=_last)


def unpool(
    grad: Tensor, offsets: Tensor, kernel: Ints, stride: Ints, padding: Ints, size: Ints
) -> Tensor:
    """The gradient of a max pool's input; `offsets` say which pixel of its window each output is."""
    grad, offsets = (t.contiguous(memory_format=_last) for t in (grad, offsets))
    made, (images, channels, *pooled), (height, width) = _empty(grad, size), grad.shape, size
    blocks = ceil(width * channels / BLOCK)
    windows = [ceil(k / s) for k, s in zip(kernel, stride, strict=True)]
    shapes = *size, *pooled, blocks, channels, *kernel, *stride, *padding, *windows, BLOCK

    def start() -> None:
        from halfstep.kernels.backward_triton__pool_kernel import spread

        launch(grad.device, [(spread, images * height * blocks, (grad, offsets, made, *shapes), 4)])

    pointers = tuple(
        (t.dtype, t.data_ptr() % 16 == 0) for t in (grad, offsets)
    )  # Triton tells these apart
    key = grad.device, pointers, shapes
    return (
        made
        if attempt(_WORKS, key, start, *INSTEAD)
        else _composed(grad, offsets, kernel, stride, padding, size)
    )


_library.impl("unpool", _meta, "Meta")
_library.impl("unpool", _composed, "CPU")
_library.impl("unpool", unpool, "CUDA")
