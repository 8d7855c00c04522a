"""PadCrop, Flip and Cutout with their random numbers as one Triton kernel on CUDA, bit for bit.

What it buys: one kernel and one pass over the pixels, where torch launches some thirty small
kernels (benchmarks/data.py, row "pad-crop, flip, resize to 224, normalise, captured"). To switch it
off: where Triton is not installed, the transforms run one after the other, with the same results.

The kernel is in augment_triton.py; here is the decision whether it may run, and its plan.
"""

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.data import hashing
from halfstep.data.transforms.axes import image_axes, parse_padding, parse_size, to_chw
from halfstep.data.transforms.images import Cutout, Flip, PadCrop
from halfstep.data.transforms.random_words import RandomWords
from halfstep.kernels.launch import WORD_DTYPES, may_read_memory, run_or_fall_back

FUSABLE_TRANSFORMS = (PadCrop, Flip, Cutout)  # each at most once, in this order

# int64 is missing: torch rounds its fill to a float64.
DTYPES = (
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
)

# The two sentences of the warning if the kernel cannot be compiled.
FALLBACK_EFFECT = "PadCrop, Flip and Cutout take more kernels"
FALLBACK_RESULT = "Images are the same."

# Whether the kernel could be compiled, by what it is compiled for.
_COMPILED: dict[tuple[Any, ...], bool] = {}


class AugmentPlan(NamedTuple):
    """What the kernel does with batches of one shape.

    For a transform that is not in the chain, numbers that change nothing.
    """

    output_shape: tuple[int, ...]
    output_strides: tuple[int, ...]
    read_strides: tuple[int, ...]  # of the source: sample, channel, row, column
    write_strides: tuple[int, ...]  # of the output, likewise
    source_size: tuple[int, ...]  # height, width
    output_size: tuple[int, ...]  # channels as planes, rows, columns, channels side by side
    crop: tuple[int, int, int, int]  # padding above, left; window positions down, across
    flip_threshold: int  # words below it flip an image
    hole_size: tuple[int, int]  # rows, columns of the cutout


def crop_flip_cutout(
    transforms: Sequence[Any], batch: Tensor, words: RandomWords, first: int
) -> tuple[Tensor, int] | None:
    """The batch after the first few transforms, and how many they are.

    None if torch's kernels must do it; the bits are the same. `transforms` is the chain from index
    `first` on.
    """
    if torch.compiler.is_compiling():
        return None
    fused = tuple(transforms[: _count_fusable(transforms)])
    if not fused or batch.dtype not in DTYPES:
        return None
    if not (words.epochs.is_contiguous() and words.samples.is_contiguous()):
        return None
    if not may_read_memory(batch):
        return None
    plan = _plan(fused, tuple(batch.shape), batch.stride(), batch.dtype)
    if plan is None:
        return None

    # Pixels are moved as integers of their size, so the kernel is compiled once per size.
    pixel_dtype = WORD_DTYPES[batch.element_size()]
    fills = [_fill_bits(repr(t.fill), batch.dtype) for t in fused if type(t) is not Flip]
    if not fills:
        fills = [0]
    keys = _draw_keys(fused, words, first)
    out = torch.empty_strided(
        plan.output_shape, plan.output_strides, dtype=batch.dtype, device=batch.device
    )

    def start_kernel() -> None:
        from halfstep.data.transforms import augment_triton

        augment_triton.launch(
            batch.view(pixel_dtype),
            out.view(pixel_dtype),
            epochs=words.epochs,
            samples=words.samples,
            keys=keys,
            pad_fill=fills[0],
            hole_fill=fills[-1],
            plan=plan,
        )

    # Triton compiles anew for each of these.
    compile_key = (batch.device, pixel_dtype, batch.data_ptr() % 16 == 0)
    if not run_or_fall_back(_COMPILED, compile_key, start_kernel, FALLBACK_EFFECT, FALLBACK_RESULT):
        return None
    return out, len(fused)


def _count_fusable(transforms: Sequence[Any]) -> int:
    """How many at the start are PadCrop, Flip, Cutout: each at most once, and in that order."""
    count = 0
    # `in` consumes the iterator up to the match: the next transform must be of a later kind.
    later_kinds = iter(FUSABLE_TRANSFORMS)
    while count < len(transforms) and type(transforms[count]) in later_kinds:
        count += 1
    return count


def _draw_keys(transforms: Sequence[Any], words: RandomWords, first: int) -> list[int]:
    """The key of the seed, then of each draw of each kind; 0 for a kind that is not there."""
    keys_by_kind = {type(t): words.keys[first + i] for i, t in enumerate(transforms)}
    keys = [hashing.signed(hashing.key(words.seed))]
    for kind in FUSABLE_TRANSFORMS:
        keys.extend(keys_by_kind.get(kind, [0] * kind.draws))
    return keys


@lru_cache(256)
def _fill_bits(fill: str, dtype: torch.dtype) -> int:
    """A fill value's bits in memory, as an integer; by its text, which tells −0.0 from 0.0."""
    value = torch.full((), ast.literal_eval(fill), dtype=dtype, device="cpu")
    return int(value.view(WORD_DTYPES[dtype.itemsize]))


@lru_cache(4096)
def _plan(
    transforms: tuple[Any, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> AugmentPlan | None:
    """The plan for batches of this shape; None if the kernel cannot handle them."""
    # The transforms themselves run on tensors without memory: that makes their checks, and gives
    # their shapes and strides.
    batch = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    axes = image_axes(type(transforms[0]).__name__, batch, transforms[0].layout)
    out = batch
    for transform in transforms:
        if image_axes(type(transform).__name__, out, transform.layout) != axes:
            return None  # this one takes another dimension for the channels
        words = torch.empty((transform.draws, len(out)), dtype=torch.int64, device="meta")
        out = transform(out, words)

    source_chw = to_chw(batch, axes.channel)
    out_chw = to_chw(out, axes.channel)
    channels, rows, columns = out_chw.shape[1:]
    if axes.channel == 3:
        output_size = (1, rows, columns, channels)
    else:
        output_size = (channels, rows, columns, 1)

    height, width = source_chw.shape[2:]
    crop = (0, 0, 1, 1)
    flip_threshold = 0
    hole_size = (0, 0)
    for transform in transforms:
        if type(transform) is PadCrop:
            left, top, right, bottom = parse_padding("PadCrop", transform.padding)
            positions_down = height + top + bottom - rows + 1
            positions_across = width + left + right - columns + 1
            crop = (top, left, positions_down, positions_across)
        elif type(transform) is Flip:
            flip_threshold = transform.threshold
        else:
            hole_size = parse_size("Cutout", transform.size)

    plan = AugmentPlan(
        output_shape=tuple(out.shape),
        output_strides=out.stride(),
        read_strides=source_chw.stride(),
        write_strides=out_chw.stride(),
        source_size=(height, width),
        output_size=output_size,
        crop=crop,
        flip_threshold=flip_threshold,
        hole_size=hole_size,
    )
    return plan if _fits_int32(plan) else None


def _fits_int32(plan: AugmentPlan) -> bool:
    """Whether all offsets and positions within an image fit 32 bits, padding included."""
    height, width = plan.source_size
    planes, rows, columns, channels_side_by_side = plan.output_size
    channels = planes * channels_side_by_side
    _, read_channel, read_row, read_column = plan.read_strides
    _, write_channel, write_row, write_column = plan.write_strides
    top, left, positions_down, positions_across = plan.crop
    hole_height, hole_width = plan.hole_size
    largest = max(
        channels * read_channel + height * read_row + width * read_column,
        channels * write_channel + rows * write_row + columns * write_column,
        channels * rows * columns,
        rows + positions_down + top + hole_height,
        columns + positions_across + left + hole_width,
    )
    return largest < 2**31
