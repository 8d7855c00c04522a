"""A max pool's backward pass by one kernel that looks at as few windows as can cover a pixel.

torch's compiler looks at the most that can, and computes their bounds again for each: 1.5 ms in
ResNet-50 at batch 256 on an H200, where moving the bytes takes 0.13. With the kernel a step takes
34.5 ms in place of 35.3 (docs/internals/speed.md). To switch it off: a pass of your own in torch's
`joint_custom_post_pass`. Sums are float32, rounded once.

Importing this module registers torch.ops.halfstep.unpool; nothing else does.
"""

from math import ceil
from typing import Any

import torch
import torch._inductor.inductor_prims  # registers _low_memory_max_pool_*
from torch import Tensor
from torch.fx import Graph, Node
from torch.library import Library

from halfstep.compiler.fx import call
from halfstep.kernels.launch import MORE_COMPILED_KERNELS, SUMS_MAY_DIFFER, launch, run_or_fall_back

# Elements of a row of pixels that one program computes.
BLOCK = 1024
WARPS = 4

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_pool_backward = torch.ops.aten.max_pool2d_with_indices_backward.default
_offsets_to_indices = torch.ops.prims._low_memory_max_pool_offsets_to_indices.default

# Whether the kernel could be compiled, by all that it is compiled for.
_WORKS: dict[Any, bool] = {}

_library = Library("halfstep", "FRAGMENT")
_library.define(
    "unpool(Tensor grad, Tensor offsets, int[] kernel, int[] stride, int[] padding, int[] size)"
    " -> Tensor"
)


def rewrite(graph: Graph, device: str) -> None:
    """Replaces the backward pass of max pools of channels-last images on this type of device."""
    for node in graph.find_nodes(op="call_function", target=_pool_backward):
        indices: Any = node.args[-1]
        if indices.target is not _offsets_to_indices or not _fits(node, indices, device):
            continue
        offsets, kernel, size, stride, padding, _ = indices.args
        grad = node.args[0]
        with graph.inserting_before(node):
            unpool_op = torch.ops.halfstep.unpool.default
            replacement = call(graph, unpool_op, grad, offsets, kernel, stride, padding, size)
        node.replace_all_uses_with(replacement)
        graph.erase_node(node)


def _fits(node: Node, indices: Node, device: str) -> bool:
    """Whether the kernel takes it: known shapes, channels last, windows without gaps."""
    grad, pool_input = node.args[:2]
    offsets, dilation = indices.args[0], indices.args[5]
    values = [arg.meta["val"] for arg in (grad, pool_input, offsets)]  # type: ignore[union-attr]
    has_known_shapes = all(isinstance(n, int) for value in values for n in value.shape)
    if not has_known_shapes or not all(_is_channels_last(value) for value in values):
        return False
    if values[0].dtype not in DTYPES or values[0].device.type != device:
        return False
    return list(dilation) == [1, 1]  # type: ignore[arg-type]


def _is_channels_last(t: Tensor) -> bool:
    return t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)


def unpool(
    grad: Tensor,
    offsets: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    size: list[int],
) -> Tensor:
    """The gradient of a max pool's input, of height and width `size`; on CUDA, by the kernel.

    `offsets` has the place of the maximum within each window. torch's own operations do it where
    Triton fails.
    """
    grad = grad.contiguous(memory_format=torch.channels_last)
    offsets = offsets.contiguous(memory_format=torch.channels_last)
    out = _empty_input_grad(grad, size)
    images, channels, pooled_height, pooled_width = grad.shape
    height, width = size
    blocks_per_row = ceil(width * channels / BLOCK)
    sizes = {
        "height": height,
        "width": width,
        "pooled_height": pooled_height,
        "pooled_width": pooled_width,
        "blocks_per_row": blocks_per_row,
        "CHANNELS": channels,
        "KERNEL_H": kernel[0],
        "KERNEL_W": kernel[1],
        "STRIDE_H": stride[0],
        "STRIDE_W": stride[1],
        "PADDING_H": padding[0],
        "PADDING_W": padding[1],
        # The most windows that can cover a pixel.
        "WINDOWS_H": ceil(kernel[0] / stride[0]),
        "WINDOWS_W": ceil(kernel[1] / stride[1]),
        "BLOCK": BLOCK,
    }

    def run_kernel() -> None:
        from halfstep.kernels.backward_triton import max_pool_backward

        arguments = {"grad": grad, "offsets": offsets, "out": out, **sizes}
        programs = images * height * blocks_per_row
        launch(grad.device, [(max_pool_backward, programs, arguments, WARPS)])

    # Triton compiles anew for other dtypes, sizes, and pointers that are not aligned to 16 bytes.
    pointers = tuple((t.dtype, t.data_ptr() % 16 == 0) for t in (grad, offsets))
    key = (grad.device, pointers, tuple(sizes.values()))
    if run_or_fall_back(_WORKS, key, run_kernel, MORE_COMPILED_KERNELS, SUMS_MAY_DIFFER):
        return out
    return _unpool_by_torch(grad, offsets, kernel, stride, padding, size)


def _unpool_by_torch(
    grad: Tensor,
    offsets: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    size: list[int],
) -> Tensor:
    """As `unpool`, by torch's own operations."""
    indices = _offsets_to_indices(offsets, kernel, size, stride, padding, [1, 1]).flatten(2)
    height, width = size
    sums = torch.zeros(*grad.shape[:2], height * width, dtype=torch.float32, device=grad.device)
    sums.scatter_add_(2, indices, grad.flatten(2).float())
    images = sums.view(*grad.shape[:2], height, width)
    return images.to(grad.dtype, memory_format=torch.channels_last)


def _unpool_shape(
    grad: Tensor,
    offsets: Tensor,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    size: list[int],
) -> Tensor:
    """The shape, strides and dtype of the result, for torch's compiler."""
    return _empty_input_grad(grad, size)


def _empty_input_grad(grad: Tensor, size: list[int]) -> Tensor:
    return torch.empty(
        [*grad.shape[:2], *size],
        dtype=grad.dtype,
        device=grad.device,
        memory_format=torch.channels_last,
    )


_library.impl("unpool", _unpool_shape, "Meta")
_library.impl("unpool", _unpool_by_torch, "CPU")
_library.impl("unpool", unpool, "CUDA")
