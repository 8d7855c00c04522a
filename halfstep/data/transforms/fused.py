"""Resize and what follows it as one kernel on CUDA: torch makes four passes over the floats of the larger image."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from halfstep.data.transforms.axes import axes, to_chw
from halfstep.data.transforms.images import Resize, ToCHW
from halfstep.data.transforms.values import Cast, Normalize
from halfstep.data.transforms.values__affine import linear, terms
from halfstep.kernels.launch import attempt, may_read

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
READ = (torch.uint8, *FLOATS)
FEWEST_PIXELS = (
    4096  # of an image that comes out: for less, a compilation of a second is not worth it
)
INSTEAD = "Resize uses torch's slower kernels", "The pixels are the same to within a level."
AS_IS, TIMES_PLUS, MINUS_OVER = 0, 1, 2

_WORKS: dict[
    tuple[Any, ...], bool
] = {}  # whether a kernel could be compiled, by what it is compiled for


@dataclass(frozen=True)
class Plan:
    """What the kernel does with batches of one shape."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    sizes: tuple[int, ...]  # height and width of the source, then of the output
    reads: tuple[int, int, int, int]  # the source's strides: sample, row, column, channel
    channels: tuple[int, int]  # as planes, and side by side: one of the two is 1
    mode: int  # x as it is, x · first + second, or (x − first) / second
    first: tuple[float, ...]
    second: tuple[float, ...]


def resize(rest: Sequence[Any], batch: Tensor) -> tuple[Tensor, int] | None:
    """The batch after the first few of `rest`, and how many; None: torch's kernels must do it.

    Weights are rounded once, then each product and sum: off by at most 8 · 2^-24 of the largest pixel. All that follows
    the interpolation has the bits of one transform after the other.
    """
    if (
        torch.compiler.is_compiling()
        or type(rest[0]) is not Resize
        or not (batch.is_cuda and may_read(batch))
    ):
        return None
    parts = tuple(rest[: _reach(rest)])
    plan = (
        _plan(parts, tuple(batch.shape), batch.stride(), batch.dtype)
        if batch.dtype in READ
        else None
    )
    if plan is None:
        return None
    out = torch.empty_strided(plan.shape, plan.strides, dtype=plan.dtype, device=batch.device)

    def start() -> None:
        from halfstep.data.transforms.triton_kernels import launch

        launch(
            batch, out, plan.sizes, plan.reads, plan.channels, plan.mode, plan.first, plan.second
        )

    key = (batch.device, batch.dtype, plan.dtype, plan.sizes, plan.reads, plan.channels, plan.mode)
    return (out, len(parts)) if attempt(_WORKS, key, start, *INSTEAD) else None


def _reach(rest: Sequence[Any]) -> int:
    """How many belong to Resize, one run of Rescale and Normalize, then one Cast to a float, with ToCHW in between."""
    place, stage = 1, 0
    while place < len(rest):
        part, run = rest[place], linear(rest[place:])
        if run and stage == 0:
            place, stage = place + run, 1
        elif type(part) is Cast and part.dtype in FLOATS and stage < 2:
            place, stage = place + 1, 2
        elif type(part) is ToCHW:
            place += 1
        else:
            break
    return place


@lru_cache(4096)
def _plan(
    parts: tuple[Any, ...], shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
) -> Plan | None:
    """By the parts themselves on tensors without memory: their checks, their shapes and strides."""
    batch = out = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    start = channel = axes("Resize", batch, parts[0].layout).channel
    for part in parts:
        told = type(part) is ToCHW or (type(part) is Normalize and part.channels > 1)
        if told and axes(type(part).__name__, out, part.layout).channel != channel:
            return None  # another dimension is to be taken for the channels
        out = part(out, torch.empty((0, len(out)), dtype=torch.int64, device="meta"))
        channel = 1 if type(part) is ToCHW else channel
    source, made = to_chw(batch, start), to_chw(out, channel)
    count, *sizes = *source.shape[1:], *made.shape[2:]
    sample, side, row, column = source.stride()
    planes, beside = made.is_contiguous(), made.is_contiguous(memory_format=torch.channels_last)
    steps = (n * stride for n, stride in zip((1, *source.shape[1:]), source.stride(), strict=True))
    far = max(*steps, count * sizes[2] * sizes[3]) >= 2**29  # offsets within an image are int32
    if far or parts[0].antialias or sizes[2] * sizes[3] < FEWEST_PIXELS or not (planes or beside):
        return None
    channels, reads = (count, 1) if planes else (1, count), (sample, row, column, side)
    return Plan(
        tuple(out.shape),
        out.stride(),
        out.dtype,
        tuple(sizes),
        reads,
        channels,
        *_epilogue(parts, count),
    )


def _epilogue(parts: Sequence[Any], count: int) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    """Mode and constants, as many as channels: a Normalize by itself divides, more than one part is one product."""
    found: list[Any] = [part for part in parts if linear([part])]
    if not found:
        return AS_IS, (0.0,), (0.0,)
    if [type(part) for part in found] == [Normalize]:
        mode, first, second = MINUS_OVER, found[0].mean, found[0].std
    else:
        mode, (first, second) = TIMES_PLUS, terms(found, max(part.channels for part in found))
    return mode, first * (count // len(first)), second * (count // len(second))
