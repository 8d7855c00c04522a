"""Transforms of pixels and their places. The dtype and the layout of the batch stay as they are."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.data.hashing import below
from halfstep.data.transforms.axes import (
    Axes,
    Layout,
    check_fill,
    check_layout,
    image_axes,
    parse_padding,
    parse_size,
    to_chw,
    to_python,
)
from halfstep.utils.checks import expect


@dataclass(frozen=True)
class PadCrop:
    """Pads with `fill`, then crops a window; each place where the window fits is equally likely."""

    size: int | tuple[int, int]
    padding: int | tuple[int, int, int, int] = 0
    """One number for every side, or left, top, right, bottom: MindSpore's order."""
    fill: float = 0
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", parse_size("PadCrop", self.size))
        object.__setattr__(self, "padding", parse_padding("PadCrop", self.padding))
        object.__setattr__(self, "fill", to_python(self.fill))
        check_layout("PadCrop", self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        axes = image_axes("PadCrop", batch, self.layout)
        height, width = parse_size("PadCrop", self.size)
        padded = self._pad(batch, axes)
        self._check_window_fits(batch, padded, axes)

        # Every window as a view: [B, window rows, window columns, then the batch's own order].
        windows = padded.unfold(axes.row, height, 1).unfold(axes.column, width, 1)
        if axes.channel is not None:
            windows = windows.movedim(axes.channel, axes.channel + 2)

        row_word, column_word = words.unbind()
        rows = below(row_word, windows.shape[1])
        columns = below(column_word, windows.shape[2])
        return windows[torch.arange(len(batch), device=batch.device), rows, columns]

    def _pad(self, batch: Tensor, axes: Axes) -> Tensor:
        check_fill("PadCrop", self.fill, batch.dtype)
        left, top, right, bottom = parse_padding("PadCrop", self.padding)
        # F.pad counts dimensions from the last one, which is the channel in HWC.
        channel_padding = [0, 0] if axes.channel == 3 else []
        return F.pad(batch, [*channel_padding, left, right, top, bottom], value=self.fill)

    def _check_window_fits(self, batch: Tensor, padded: Tensor, axes: Axes) -> None:
        height, width = parse_size("PadCrop", self.size)
        padded_height = padded.shape[axes.row]
        padded_width = padded.shape[axes.column]
        if height > padded_height or width > padded_width:
            raise ValueError(
                f"PadCrop: expected an image that a window of {height}×{width} fits into, "
                f"got {batch.shape[axes.row]}×{batch.shape[axes.column]}, "
                f"padded to {padded_height}×{padded_width}. Pad more or crop less."
            )


@dataclass(frozen=True)
class Flip:
    """Flips left to right with probability p, each sample by itself.

    p is met to within 2^-32; 0 and 1 are met exactly.
    """

    p: float = 0.5
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        expect(0 <= self.p <= 1, "Flip", "a probability p in 0..1", self.p)
        check_layout("Flip", self.layout)

    @property
    def threshold(self) -> int:
        """An image is flipped if its random word is below this number."""
        return round(self.p * 2**32)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        axes = image_axes("Flip", batch, self.layout)
        is_flipped = words[0] < self.threshold
        is_flipped = is_flipped.view(-1, *[1] * (batch.dim() - 1))
        return torch.where(is_flipped, batch.flip(axes.column), batch)


@dataclass(frozen=True)
class Cutout:
    """Fills a rectangle; its centre is uniform over the pixels, and the border cuts it off.

    Of n rows around the centre row c, the first is c − n // 2; columns likewise.
    """

    size: int | tuple[int, int]
    fill: float = 0
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", parse_size("Cutout", self.size))
        object.__setattr__(self, "fill", to_python(self.fill))
        check_layout("Cutout", self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        axes = image_axes("Cutout", batch, self.layout)
        check_fill("Cutout", self.fill, batch.dtype)
        height, width = parse_size("Cutout", self.size)
        in_rows = _mask_around_centre(words[0], batch.shape[axes.row], height)
        in_columns = _mask_around_centre(words[1], batch.shape[axes.column], width)
        hole = in_rows.unsqueeze(2) & in_columns.unsqueeze(1)
        if axes.channel is not None:
            hole = hole.unsqueeze(axes.channel)
        return batch.masked_fill(hole, self.fill)


def _mask_around_centre(word: Tensor, extent: int, length: int) -> Tensor:
    """[B, extent] booleans: `length` places around a centre that is uniform over 0..extent−1."""
    first = below(word, extent) - length // 2
    offset = torch.arange(extent, device=word.device) - first.unsqueeze(1)
    return (offset >= 0) & (offset < length)


@dataclass(frozen=True)
class Resize:
    """Resizes bilinearly, corners not aligned, in float32 (float64 stays float64).

    `antialias` widens the filter where the image shrinks. uint8 is rounded to nearest, ties up.
    OpenCV (MindSpore's default) and Pillow (with antialias) use fixed-point weights: on noise, up
    to a quarter of their pixels are one level off. CPU, CUDA and compiled code differ in the last
    bits of a float, and so by one level next to a tie.
    """

    size: int | tuple[int, int]
    """(height, width), or the shorter edge; the longer edge then keeps the aspect ratio, rounded to
    nearest, as in MindSpore."""
    antialias: bool = False
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 0

    def __post_init__(self) -> None:
        height_width = parse_size("Resize", self.size)
        if not isinstance(self.size, int):
            object.__setattr__(self, "size", height_width)
        check_layout("Resize", self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        axes = image_axes("Resize", batch, self.layout)
        if not (batch.is_floating_point() or batch.dtype == torch.uint8):
            raise TypeError(
                f"Resize: expected a uint8 or floating batch, got {batch.dtype}. "
                "Put a Cast before it."
            )
        compute_dtype = torch.promote_types(batch.dtype, torch.float32)
        images = to_chw(batch, axes.channel).to(compute_dtype)
        if batch.dtype == torch.uint8:
            # The cast back to uint8 cuts off. The weights of a pixel add up to 1, so 0.5 added
            # before the interpolation makes it round, without another pass over the result.
            images = images + 0.5
        resized = F.interpolate(
            images,
            self._target_size(batch.shape[axes.row], batch.shape[axes.column]),
            mode="bilinear",
            align_corners=False,
            antialias=self.antialias,
        ).to(batch.dtype)
        if axes.channel is None:
            return resized.squeeze(1)
        return resized.movedim(1, axes.channel)

    def _target_size(self, height: int, width: int) -> tuple[int, int]:
        if not isinstance(self.size, int):
            return self.size
        short, long = sorted((height, width))
        longer = (2 * self.size * long + short) // (2 * short)  # size · long / short, to nearest
        if height <= width:
            return self.size, longer
        return longer, self.size


@dataclass(frozen=True)
class ToCHW:
    """[B, H, W, C] as [B, C, H, W], a gray batch as [B, 1, H, W]; CHW stays.

    `channels_last` only chooses the strides: shape and values are the same, and an HWC batch is not
    copied.
    """

    channels_last: bool = False
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_layout("ToCHW", self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        axes = image_axes("ToCHW", batch, self.layout)
        images = to_chw(batch, axes.channel)
        if self.channels_last:
            return images.contiguous(memory_format=torch.channels_last)
        return images.contiguous()
