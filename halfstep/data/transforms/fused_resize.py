"""Resize and what follows it (Rescale, Normalize, Cast, ToCHW) as one Triton kernel on CUDA.

What it buys: one pass over the floats of the larger image, where torch makes four
(benchmarks/data.py, row "pad-crop, flip, resize to 224, normalise, captured"). To switch it off:
where Triton is not installed, the transforms run one after the other; pixels are the same to within
a level.

The kernel is in resize_triton.py; here is the decision whether it may run, and its plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from halfstep.data.transforms.axes import image_axes, to_chw
from halfstep.data.transforms.images import Resize, ToCHW
from halfstep.data.transforms.values import Cast, Normalize, affine_coefficients, count_affine
from halfstep.kernels.launch import may_read_memory, run_or_fall_back

OUTPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INPUT_DTYPES = (torch.uint8, *OUTPUT_DTYPES)

# Pixels of a resized image; for smaller ones, a second of compilation is not worth it.
MIN_OUTPUT_PIXELS = 4096

# What the kernel computes from a resized value x, with two constants per channel.
KEEP = 0  # x
MULTIPLY_ADD = 1  # x · first + second
SUBTRACT_DIVIDE = 2  # (x − first) / second

# The two sentences of the warning if the kernel cannot be compiled.
FALLBACK_EFFECT = "Resize uses torch's slower kernels"
FALLBACK_RESULT = "The pixels are the same to within a level."

# Whether a kernel could be compiled, by what it is compiled for.
_COMPILED: dict[tuple[Any, ...], bool] = {}


@dataclass(frozen=True)
class ResizePlan:
    """What the kernel does with batches of one shape."""

    output_shape: tuple[int, ...]
    output_strides: tuple[int, ...]
    output_dtype: torch.dtype
    sizes: tuple[int, int, int, int]  # height, width of the source; rows, columns of the output
    read_strides: tuple[int, int, int, int]  # of the source: sample, row, column, channel
    channels: tuple[int, int]  # as planes, and side by side: one of the two is 1
    mode: int  # KEEP, MULTIPLY_ADD or SUBTRACT_DIVIDE
    first: tuple[float, ...]  # the mode's constants, one for each channel
    second: tuple[float, ...]


def resize_and_convert(transforms: Sequence[Any], batch: Tensor) -> tuple[Tensor, int] | None:
    """The batch after a Resize and the transforms that follow it, and how many they are.

    None if torch's kernels must do it. The interpolation rounds the weights once, then each product
    and sum: off by at most 8 · 2^-24 of the largest pixel. What follows it has the bits of one
    transform after the other.
    """
    if torch.compiler.is_compiling() or type(transforms[0]) is not Resize:
        return None
    if not (batch.is_cuda and may_read_memory(batch)):
        return None
    if batch.dtype not in INPUT_DTYPES:
        return None
    fused = tuple(transforms[: _count_fusable(transforms)])
    plan = _plan(fused, tuple(batch.shape), batch.stride(), batch.dtype)
    if plan is None:
        return None

    out = torch.empty_strided(
        plan.output_shape, plan.output_strides, dtype=plan.output_dtype, device=batch.device
    )

    def start_kernel() -> None:
        from halfstep.data.transforms import resize_triton

        resize_triton.launch(batch, out, plan)

    compile_key = (
        batch.device,
        batch.dtype,
        plan.output_dtype,
        plan.sizes,
        plan.read_strides,
        plan.channels,
        plan.mode,
    )
    if not run_or_fall_back(_COMPILED, compile_key, start_kernel, FALLBACK_EFFECT, FALLBACK_RESULT):
        return None
    return out, len(fused)


def _count_fusable(transforms: Sequence[Any]) -> int:
    """How many of the first transforms go into the kernel.

    Resize, then at most one run of Rescale and Normalize, then at most one Cast to a float; ToCHW
    may stand anywhere between them.
    """
    count = 1
    affine_allowed = True
    cast_allowed = True
    while count < len(transforms):
        transform = transforms[count]
        affine_count = count_affine(transforms[count:])
        if affine_count > 0 and affine_allowed:
            count += affine_count
            affine_allowed = False
        elif type(transform) is Cast and transform.dtype in OUTPUT_DTYPES and cast_allowed:
            count += 1
            affine_allowed = False
            cast_allowed = False
        elif type(transform) is ToCHW:
            count += 1
        else:
            break
    return count


@lru_cache(4096)
def _plan(
    transforms: tuple[Any, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> ResizePlan | None:
    """The plan for batches of this shape; None if the kernel cannot handle them."""
    # The transforms themselves run on tensors without memory: that makes their checks, and gives
    # their shapes and strides.
    batch = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    source_channel_axis = image_axes("Resize", batch, transforms[0].layout).channel
    channel_axis = source_channel_axis
    out = batch
    for transform in transforms:
        is_to_chw = type(transform) is ToCHW
        if is_to_chw or (type(transform) is Normalize and transform.channel_count > 1):
            axes = image_axes(type(transform).__name__, out, transform.layout)
            if axes.channel != channel_axis:
                return None  # this one takes another dimension for the channels
        no_words = torch.empty((0, len(out)), dtype=torch.int64, device="meta")
        out = transform(out, no_words)
        if is_to_chw:
            channel_axis = 1

    source_chw = to_chw(batch, source_channel_axis)
    out_chw = to_chw(out, channel_axis)
    channel_count, height, width = source_chw.shape[1:]
    rows, columns = out_chw.shape[2:]

    # Offsets within an image are int32.
    sample_stride, channel_stride, row_stride, column_stride = source_chw.stride()
    largest_offset = max(
        sample_stride,
        channel_count * channel_stride,
        height * row_stride,
        width * column_stride,
        channel_count * rows * columns,
    )
    if largest_offset >= 2**29:
        return None
    if transforms[0].antialias or rows * columns < MIN_OUTPUT_PIXELS:
        return None

    # The kernel writes images one after the other, with channels as planes or side by side.
    if out_chw.is_contiguous():
        channels = (channel_count, 1)
    elif out_chw.is_contiguous(memory_format=torch.channels_last):
        channels = (1, channel_count)
    else:
        return None

    mode, first, second = _affine_mode(transforms, channel_count)
    return ResizePlan(
        output_shape=tuple(out.shape),
        output_strides=out.stride(),
        output_dtype=out.dtype,
        sizes=(height, width, rows, columns),
        read_strides=(sample_stride, row_stride, column_stride, channel_stride),
        channels=channels,
        mode=mode,
        first=first,
        second=second,
    )


def _affine_mode(
    transforms: Sequence[Any], channel_count: int
) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    """The mode and its constants, one per channel.

    A single Normalize divides, as it does alone; a run of several transforms is one product.
    """
    affine: list[Any] = [t for t in transforms if count_affine([t]) == 1]
    if not affine:
        return KEEP, (0.0,), (0.0,)
    first: tuple[float, ...]
    second: tuple[float, ...]
    if [type(t) for t in affine] == [Normalize]:
        mode = SUBTRACT_DIVIDE
        first = affine[0].mean
        second = affine[0].std
    else:
        mode = MULTIPLY_ADD
        own_channels = max(t.channel_count for t in affine)
        first, second = affine_coefficients(affine, own_channels)
    first = first * (channel_count // len(first))
    second = second * (channel_count // len(second))
    return mode, first, second
