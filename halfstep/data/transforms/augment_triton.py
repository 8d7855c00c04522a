"""The kernel of fused_augment.py: crop, flip and cutout in one pass. Imported when it is launched.

Only torch's builds for CUDA bring Triton.
"""
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
    from halfstep.data.transforms.fused_augment import AugmentPlan

PIXELS_PER_PROGRAM = 512
WARPS = 4

# Constants of halfstep.data.hashing, in a form that a kernel can read.
FIRST = tl.constexpr(hashing.FIRST_MULTIPLIER)
SECOND = tl.constexpr(hashing.SECOND_MULTIPLIER)
SAMPLE = tl.constexpr(hashing.SAMPLE_INCREMENT)
EPOCH = tl.constexpr(hashing.EPOCH_INCREMENT)


def launch(
    source: Tensor,
    out: Tensor,
    *,
    epochs: Tensor,
    samples: Tensor,
    keys: Sequence[int],
    pad_fill: int,
    hole_fill: int,
    plan: "AugmentPlan",
) -> None:
    """Fills `out`. Pixels and fills are given as integers of the same bits.

    `keys` are those of the seed, then of each draw: crop down and across, flip, hole down and
    across.
    """
    seed_key, crop_down_key, crop_across_key, flip_key, hole_down_key, hole_across_key = keys
    source_sample, source_channel, source_row, source_column = plan.read_strides
    out_sample, out_channel, out_row, out_column = plan.write_strides
    source_height, source_width = plan.source_size
    _, rows, columns, channels_side_by_side = plan.output_size
    pad_top, pad_left, positions_down, positions_across = plan.crop
    hole_height, hole_width = plan.hole_size

    # A program works on pixels of one image only, whose random numbers it draws once.
    image_pixels = math.prod(plan.output_size)
    programs_per_image = triton.cdiv(image_pixels, PIXELS_PER_PROGRAM)
    with torch.cuda.device(source.device) if source.is_cuda else nullcontext():
        _crop_flip_cutout[(len(source) * programs_per_image,)](
            source,
            out,
            epochs,
            samples,
            seed_key=seed_key,
            crop_down_key=crop_down_key,
            crop_across_key=crop_across_key,
            flip_key=flip_key,
            hole_down_key=hole_down_key,
            hole_across_key=hole_across_key,
            flip_threshold=plan.flip_threshold,
            pad_fill=pad_fill,
            hole_fill=hole_fill,
            source_sample=source_sample,
            source_channel=source_channel,
            source_row=source_row,
            source_column=source_column,
            out_sample=out_sample,
            out_channel=out_channel,
            out_row=out_row,
            out_column=out_column,
            source_height=source_height,
            source_width=source_width,
            rows=rows,
            columns=columns,
            channels_side_by_side=channels_side_by_side,
            pad_top=pad_top,
            pad_left=pad_left,
            positions_down=positions_down,
            positions_across=positions_across,
            hole_height=hole_height,
            hole_width=hole_width,
            image_pixels=image_pixels,
            programs_per_image=programs_per_image,
            BLOCK=PIXELS_PER_PROGRAM,
            num_warps=WARPS,
        )


# No number is specialised: one compilation serves images of any size, and any seed.
@triton.jit(
    do_not_specialize=[
        "seed_key",
        "crop_down_key",
        "crop_across_key",
        "flip_key",
        "hole_down_key",
        "hole_across_key",
        "flip_threshold",
        "pad_fill",
        "hole_fill",
        "source_sample",
        "source_channel",
        "source_row",
        "source_column",
        "out_sample",
        "out_channel",
        "out_row",
        "out_column",
        "source_height",
        "source_width",
        "rows",
        "columns",
        "channels_side_by_side",
        "pad_top",
        "pad_left",
        "positions_down",
        "positions_across",
        "hole_height",
        "hole_width",
        "image_pixels",
        "programs_per_image",
    ],
    do_not_specialize_on_alignment=["epochs", "samples"],
)
def _crop_flip_cutout(
    source,
    out,
    epochs,
    samples,
    seed_key: tl.int64,
    crop_down_key: tl.int64,
    crop_across_key: tl.int64,
    flip_key: tl.int64,
    hole_down_key: tl.int64,
    hole_across_key: tl.int64,
    flip_threshold: tl.int64,
    pad_fill: tl.int64,
    hole_fill: tl.int64,
    source_sample: tl.int64,
    source_channel: tl.int32,
    source_row: tl.int32,
    source_column: tl.int32,
    out_sample: tl.int64,
    out_channel: tl.int32,
    out_row: tl.int32,
    out_column: tl.int32,
    source_height: tl.int32,
    source_width: tl.int32,
    rows: tl.int32,
    columns: tl.int32,
    channels_side_by_side: tl.int32,
    pad_top: tl.int32,
    pad_left: tl.int32,
    positions_down: tl.int32,
    positions_across: tl.int32,
    hole_height: tl.int32,
    hole_width: tl.int32,
    image_pixels: tl.int32,
    programs_per_image: tl.int32,
    BLOCK: tl.constexpr,
):
    """A block of pixels of one image. `source_…` and `out_…` of an axis are strides."""
    image = tl.program_id(0) // programs_per_image

    # What the random words of this image have in common: seed, epoch and sample.
    epoch_part = tl.load(epochs + image).to(tl.uint64) * EPOCH
    sample_part = tl.load(samples + image).to(tl.uint64) * SAMPLE
    image_key = epoch_part + sample_part
    image_key += seed_key.to(tl.uint64)

    # Row, column and channel of each output pixel. Channels are planes or side by side: one of the
    # two terms of `channel` is 0.
    pixel = tl.program_id(0) % programs_per_image * BLOCK + tl.arange(0, BLOCK)
    row_length = columns * channels_side_by_side
    y = pixel // row_length % rows
    x = pixel % row_length // channels_side_by_side
    channel = pixel // (row_length * rows) + pixel % channels_side_by_side

    # Cutout.
    hole_top = _uniform_below(hole_down_key, image_key, rows) - hole_height // 2
    hole_left = _uniform_below(hole_across_key, image_key, columns) - hole_width // 2
    in_hole_rows = (y >= hole_top) & (y < hole_top + hole_height)
    in_hole = in_hole_rows & (x >= hole_left) & (x < hole_left + hole_width)

    # Flip, then crop: where each pixel comes from.
    is_flipped = _random_word(flip_key, image_key) < flip_threshold.to(tl.uint64)
    window_top = _uniform_below(crop_down_key, image_key, positions_down)
    source_y = y + window_top - pad_top
    flipped_x = tl.where(is_flipped, columns - 1 - x, x)
    window_left = _uniform_below(crop_across_key, image_key, positions_across)
    source_x = flipped_x + window_left - pad_left
    in_source_rows = (source_y >= 0) & (source_y < source_height)
    in_source = in_source_rows & (source_x >= 0) & (source_x < source_width)

    source += image.to(tl.int64) * source_sample
    out += image.to(tl.int64) * out_sample
    source_offset = channel * source_channel + source_y * source_row + source_x * source_column
    is_read = (pixel < image_pixels) & in_source & (in_hole == 0)
    value = tl.load(source + source_offset, is_read, 0)
    pixel_dtype = out.dtype.element_ty
    value = tl.where(in_source, value, pad_fill.to(pixel_dtype))
    value = tl.where(in_hole, hole_fill.to(pixel_dtype), value)
    out_offset = channel * out_channel + y * out_row + x * out_column
    tl.store(out + out_offset, value, pixel < image_pixels)


@triton.jit
def _random_word(draw_key, image_key):
    """`hashing.words` of one draw: SplitMix64's finaliser."""
    value = draw_key.to(tl.uint64) + image_key
    value = (value ^ (value >> 30)) * FIRST
    value = (value ^ (value >> 27)) * SECOND
    return (value ^ (value >> 31)) >> 32


@triton.jit
def _uniform_below(draw_key, image_key, n):
    """`hashing.below` of one draw: an integer in 0..n−1."""
    return ((_random_word(draw_key, image_key) * n.to(tl.uint64)) >> 32).to(tl.int32)
