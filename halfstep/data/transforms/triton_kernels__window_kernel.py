"""The kernel of `window`, in a module of its own: only torch's builds for CUDA bring Triton."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from halfstep.data import hashing

if TYPE_CHECKING:
    from halfstep.data.transforms.fused__window import Plan

BLOCK, WARPS = 512, 4  # pixels of a program
FIRST, SECOND, SAMPLE, EPOCH = (
    tl.constexpr(n) for n in (hashing.FIRST, hashing.SECOND, hashing.SAMPLE, hashing.EPOCH)
)


def launch(
    source: Tensor,
    out: Tensor,
    told: tuple[Tensor, Tensor],
    keys: Sequence[int],
    fills: Sequence[int],
    plan: "Plan",
) -> None:
    """Fills `out`, with pixels as whole numbers; `told` are epochs and samples, `keys` of the seed, then each draw."""
    blocks = triton.cdiv(
        math.prod(plan.made), BLOCK
    )  # of an image: its random numbers are the same in a program
    numbers = *plan.reads, *plan.writes, *plan.given, *plan.made[1:], *plan.crop, *plan.hole
    with torch.cuda.device(source.device) if source.is_cuda else nullcontext():
        _window[(len(source) * blocks,)](
            source, out, *told, *keys, plan.flip, *fills, *numbers, math.prod(plan.made), blocks, BLOCK,
            num_warps=WARPS,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=[
        "seed", "down", "across", "turn", "below", "beside", "flip", "fill", "patch", "sample", "side", "row", "column",
        "to_sample", "to_side", "to_row", "to_column", "height", "width", "rows", "columns", "channels", "top", "left",
        "tops", "lefts", "high", "wide", "size", "blocks",
    ],
    do_not_specialize_on_alignment=["epochs", "samples"],
)  # fmt: skip
def _window(
    source, out, epochs, samples, seed: tl.int64, down: tl.int64, across: tl.int64, turn: tl.int64, below: tl.int64,
    beside: tl.int64, flip: tl.int64, fill: tl.int64, patch: tl.int64, sample: tl.int64, side: tl.int32, row: tl.int32,
    column: tl.int32, to_sample: tl.int64, to_side: tl.int32, to_row: tl.int32, to_column: tl.int32, height: tl.int32,
    width: tl.int32, rows: tl.int32, columns: tl.int32, channels: tl.int32, top: tl.int32, left: tl.int32,
    tops: tl.int32, lefts: tl.int32, high: tl.int32, wide: tl.int32, size: tl.int32, blocks: tl.int32,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A block of one image: from `seed` to `beside` the keys, then the plan's numbers."""
    image = tl.program_id(0) // blocks
    each = (
        tl.load(epochs + image).to(tl.uint64) * EPOCH
        + tl.load(samples + image).to(tl.uint64) * SAMPLE
    )
    each += seed.to(tl.uint64)
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    line = columns * channels
    y, x = place // line % rows, place % line // channels
    channel = (
        place // (line * rows) + place % channels
    )  # of planes or side by side: one of the two is 0
    first, start = _below(below, each, rows) - high // 2, _below(beside, each, columns) - wide // 2
    patched = (y >= first) & (y < first + high) & (x >= start) & (x < start + wide)
    turned = _word(turn, each) < flip.to(tl.uint64)
    from_y = y + _below(down, each, tops) - top
    from_x = tl.where(turned, columns - 1 - x, x) + _below(across, each, lefts) - left
    inside = (from_y >= 0) & (from_y < height) & (from_x >= 0) & (from_x < width)
    source += image.to(tl.int64) * sample
    out += image.to(tl.int64) * to_sample
    needed = (place < size) & inside & (patched == 0)
    value = tl.load(source + (channel * side + from_y * row + from_x * column), needed, 0)
    kind = out.dtype.element_ty
    value = tl.where(inside, value, fill.to(kind))
    value = tl.where(patched, patch.to(kind), value)
    tl.store(out + (channel * to_side + y * to_row + x * to_column), value, place < size)


@triton.jit
def _word(key, each):
    """`hashing.words` of one draw: SplitMix64's finaliser."""
    value = key.to(tl.uint64) + each
    value = (value ^ (value >> 30)) * FIRST
    value = (value ^ (value >> 27)) * SECOND
    return (value ^ (value >> 31)) >> 32


@triton.jit
def _below(key, each, n):
    """`hashing.below`."""
    return ((_word(key, each) * n.to(tl.uint64)) >> 32).to(tl.int32)
