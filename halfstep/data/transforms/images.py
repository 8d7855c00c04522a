"""Transforms of pixels and of where they are, on whole batches; the batch's dtype and layout stay as they are."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.data.hashing import below
from halfstep.data.transforms.axes import (
    Axes,
    Layout,
    axes,
    borders,
    check_fill,
    check_layout,
    pair,
    plain,
    to_chw,
)


@dataclass(frozen=True)
class PadCrop:
    """Pads with `fill`, then cuts out a window, uniform over all places where it fits."""

    size: int | tuple[int, int]
    padding: int | tuple[int, int, int, int] = 0
    """One number for every side, or left, top, right, bottom: MindSpore's order."""
    fill: float = 0
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", pair("PadCrop", self.size))
        object.__setattr__(self, "padding", borders("PadCrop", self.padding))
        object.__setattr__(self, "fill", plain(self.fill))
        check_layout("PadCrop", self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        at = axes("PadCrop", batch, self.layout)
        height, width = pair("PadCrop", self.size)
        padded = self._padded(batch, at)
        self._check_fit(batch, padded, at)
        windows = padded.unfold(at.row, height, 1).unfold(
            at.column, width, 1
        )  # every window, as a view
        if at.channel is not None:
            windows = windows.movedim(
                at.channel, at.channel + 2
            )  # [B, rows, columns, then a batch's own order]
        row, column = (
            below(word, n) for word, n in zip(words.unbind(), windows.shape[1:3], strict=True)
        )
        return windows[torch.arange(len(batch), device=batch.device), row, column]

    def _padded(self, batch: Tensor, at: Axes) -> Tensor:
        check_fill("PadCrop", self.fill, batch.dtype)
        left, top, right, bottom = borders("PadCrop", self.padding)
        inner = [0, 0] if at.channel == 3 else []  # F.pad counts dimensions from the last
        return F.pad(batch, [*inner, left, right, top, bottom], value=self.fill)

    def _check_fit(self, batch: Tensor, padded: Tensor, at: Axes) -> None:
        (height, width), (rows, columns) = (
            pair("PadCrop", self.size),
            (padded.shape[at.row], padded.shape[at.column]),
        )
        if height > rows or width > columns:
            was = f"{batch.shape[at.row]}×{batch.shape[at.column]}"
            raise ValueError(
                f"PadCrop: expected an image that a window of {height}×{width} fits into, got {was}, padded to "
                f"{rows}×{columns}. Pad more or crop less."
            )


@dataclass(frozen=True)
class Flip:
    """Left to right with probability p, each sample by itself; p is met to 2^-32, and 0 and 1 exactly."""

    p: float = 0.5
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if not 0 <= self.p <= 1:
            raise ValueError(f"Flip: expected a probability p in 0..1, got {self.p!r}")
        check_layout("Flip", self.layout)

    @property
    def below(self) -> int:
        """Words below it turn an image."""
        return round(self.p * 2**32)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        at = axes("Flip", batch, self.layout)
        flipped = words[0] < self.below
        return torch.where(flipped.view(-1, *[1] * (batch.dim() - 1)), batch.flip(at.column), batch)


@dataclass(frozen=True)
class Cutout:
    """Fills a rectangle whose centre is uniform over the pixels, cut off at the border.

    Of n rows around the centre row c, the first is c − n // 2; columns likewise.
    """

    size: int | tuple[int, int]
    fill: float = 0
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", pair("Cutout", self.size))
        object.__setattr__(self, "fill", plain(self.fill))
        check_layout("Cutout", self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        at = axes("Cutout", batch, self.layout)
        check_fill("Cutout", self.fill, batch.dtype)
        height, width = pair("Cutout", self.size)
        rows = _span(words[0], batch.shape[at.row], height)
        columns = _span(words[1], batch.shape[at.column], width)
        hole = rows.unsqueeze(2) & columns.unsqueeze(1)
        return batch.masked_fill(
            hole if at.channel is None else hole.unsqueeze(at.channel), self.fill
        )


@dataclass(frozen=True)
class Resize:
    """Bilinear, corners not aligned, in float32 (float64 stays); `antialias` widens the filter where the image shrinks.

    uint8 is rounded to nearest, ties up. OpenCV (MindSpore's default) and Pillow (with antialias) use fixed-point
    weights: one level off on up to a quarter of the pixels of noise. CPU, CUDA and compiled code differ in the last
    bits of a float, and so by a level next to a tie.
    """

    size: int | tuple[int, int]
    """(height, width), or the shorter edge: the longer one keeps the aspect ratio, rounded to nearest (MindSpore)."""
    antialias: bool = False
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 0

    def __post_init__(self) -> None:
        height, width = pair("Resize", self.size)
        object.__setattr__(
            self, "size", self.size if isinstance(self.size, int) else (height, width)
        )
        check_layout("Resize", self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        at = axes("Resize", batch, self.layout)
        if not (batch.is_floating_point() or batch.dtype == torch.uint8):
            raise TypeError(
                f"Resize: expected a uint8 or floating batch, got {batch.dtype}. Put a Cast before it."
            )
        images = to_chw(batch, at.channel).to(torch.promote_types(batch.dtype, torch.float32))
        if batch.dtype == torch.uint8:
            images = (
                images + 0.5
            )  # the weights add up to 1: the cast back, which cuts, then rounds without another pass
        target = self._target(batch.shape[at.row], batch.shape[at.column])
        out = F.interpolate(
            images, target, mode="bilinear", align_corners=False, antialias=self.antialias
        )
        out = out.to(batch.dtype)
        return out.squeeze(1) if at.channel is None else out.movedim(1, at.channel)

    def _target(self, height: int, width: int) -> tuple[int, int]:
        if not isinstance(self.size, int):
            return self.size
        short, long = sorted((height, width))
        longer = (2 * self.size * long + short) // (2 * short)  # size · long / short, to nearest
        return (self.size, longer) if height <= width else (longer, self.size)


@dataclass(frozen=True)
class ToCHW:
    """[B, H, W, C] as [B, C, H, W], a gray batch as [B, 1, H, W]; CHW stays.

    `channels_last` is about strides alone: the same shape and values, and for an HWC batch no copy.
    """

    channels_last: bool = False
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 0

    def __post_init__(self) -> None:
        check_layout("ToCHW", self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        images = to_chw(batch, axes("ToCHW", batch, self.layout).channel)
        return images.contiguous(
            memory_format=torch.channels_last if self.channels_last else torch.contiguous_format
        )


def _span(word: Tensor, extent: int, length: int) -> Tensor:
    """[B, extent] bools: the `length` places around a centre that is uniform over 0..extent−1."""
    first = below(word, extent) - length // 2
    place = torch.arange(extent, device=word.device) - first.unsqueeze(1)
    return (place >= 0) & (place < length)
