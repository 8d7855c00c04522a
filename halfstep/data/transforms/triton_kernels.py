"""The kernel of `fused`, in a module of its own: only torch's builds for CUDA bring Triton."""

from functools import cache

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]
from torch import Tensor

from halfstep.data.transforms.values import constant

ROWS, BLOCK, WARPS = (
    16,
    256,
    2,
)  # an H200 makes 256 float32 images of 224² in 58 µs; filling them takes 44


def launch(
    batch: Tensor,
    out: Tensor,
    sizes: tuple[int, ...],
    reads: tuple[int, int, int, int],
    channels: tuple[int, int],
    mode: int,
    first: tuple[float, ...],
    second: tuple[float, ...],
) -> None:
    """Fills `out`, whose samples lie one after the other; the arguments are a `fused.Plan`'s."""
    (height, width, rows, columns), (planes, beside) = sizes, channels
    grid = (len(batch) * planes, -(-rows // ROWS), -(-columns * beside // BLOCK))
    tables = *table(height, rows, batch.device), *table(width, columns, batch.device)
    constants = (constant(values, torch.float32, batch.device) for values in (first, second))
    with torch.cuda.device(batch.device):
        _bilinear[grid](
            batch, out, *tables, *constants, *sizes, *reads, planes, beside, mode, ROWS, BLOCK,
            num_warps=WARPS, enable_fp_fusion=False,  # x · a + b rounds twice, as in torch
        )  # fmt: skip


@cache
def table(given: int, wanted: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each pixel wanted, the given one before it and how far it lies towards the next; kept: graphs read them."""
    place = ((2 * torch.arange(wanted, device="cpu") + 1) * given - wanted).clamp(
        min=0
    )  # in 1 / (2 · wanted)
    before, part = place // (2 * wanted), (place % (2 * wanted)).float() / (2 * wanted)
    return before.int().to(device), part.to(device)  # waits: any stream may read


@triton.jit(  # type: ignore[untyped-decorator, unused-ignore]
    do_not_specialize=[
        "height",
        "width",
        "sample",
        "row",
    ],  # one compilation for images of any size
    do_not_specialize_on_alignment=["source"],
)
def _bilinear(  # type: ignore[no-untyped-def]
    source, out, tops, downs, lefts, rights, first, second, height, width, rows, columns, sample, row, column, side,
    PLANES: tl.constexpr, BESIDE: tl.constexpr, MODE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A few rows of an image, or of one plane of it; `place` counts along a row as it lies in memory."""
    image, start = tl.program_id(0), tl.program_id(1) * ROWS
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    x, channel = place // BESIDE, image % PLANES + place % BESIDE
    inside = place < columns * BESIDE
    left, right = tl.load(lefts + x, inside, 0), tl.load(rights + x, inside, 0.0)
    here, there = (
        left * column + channel * side,
        tl.minimum(left + 1, width - 1) * column + channel * side,
    )
    if MODE:
        a, b = tl.load(first + channel), tl.load(second + channel)
    source += (image // PLANES).to(tl.int64) * sample
    out += image.to(tl.int64) * rows * columns * BESIDE + place
    held, above, below = -1, tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for y in range(start, tl.minimum(start + ROWS, rows)):
        top, down = tl.load(tops + y), tl.load(downs + y)
        if top != held:  # an image that grows sevenfold needs other pixels in every seventh row
            upper, lower = source + top * row, source + tl.minimum(top + 1, height - 1) * row
            above = (
                tl.load(upper + here).to(tl.float32) * (1 - right)
                + tl.load(upper + there).to(tl.float32) * right
            )
            below = (
                tl.load(lower + here).to(tl.float32) * (1 - right)
                + tl.load(lower + there).to(tl.float32) * right
            )
            held = top
        value = above * (1 - down) + below * down
        if source.dtype.element_ty == tl.uint8:
            value += 0.5  # the cast cuts
        value = value.to(source.dtype.element_ty).to(tl.float32)
        if MODE == 1:  # fused.TIMES_PLUS
            value = value * a + b
        if MODE == 2:  # fused.MINUS_OVER
            value = tl.div_rn(value - a, b)
        tl.store(out + y * columns * BESIDE, value.to(out.dtype.element_ty), inside)
