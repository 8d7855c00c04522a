"""Transforms that cut out or erase parts of images: random crops, the centre, rectangles."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.data.hashing import below
from halfstep.data.transforms.axes import (
    Axes,
    Layout,
    check_fill,
    check_layout,
    check_pixel_dtype,
    check_probability,
    image_axes,
    parse_range,
    parse_size,
    to_python,
)
from halfstep.data.transforms.chunks import in_chunks
from halfstep.data.transforms.images import Resize
from halfstep.data.transforms.random_numbers import exp, is_below, uniform
from halfstep.data.transforms.values import constant_vector
from halfstep.utils.checks import expect

Interpolation: TypeAlias = Literal["nearest", "bilinear", "bicubic"]

# How often a rectangle is drawn anew that does not fit the image, as in torchvision.
_TRIES = 10
_DRAWS_OF_RECTANGLE = 2 * _TRIES + 2

# Reach of the filters, in pixels of the smaller of the two images.
_FILTER_REACH = {"bilinear": 1, "bicubic": 2}


@dataclass(frozen=True)
class CenterCrop:
    """The window in the middle; an image that is too small gets a border of zeros."""

    size: int | tuple[int, int]
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", parse_size("CenterCrop", self.size))
        check_layout("CenterCrop", self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        axes = image_axes("CenterCrop", batch, self.layout)
        height, width = parse_size("CenterCrop", self.size)
        missing_rows = max(0, height - batch.shape[axes.row])
        missing_columns = max(0, width - batch.shape[axes.column])
        if missing_rows or missing_columns:
            # F.pad counts dimensions from the last one, which is the channel in HWC.
            padding = [0, 0] if axes.channel == 3 else []
            padding += [missing_columns // 2, missing_columns - missing_columns // 2]
            padding += [missing_rows // 2, missing_rows - missing_rows // 2]
            batch = F.pad(batch, padding)
        top = _half_to_even(batch.shape[axes.row] - height)
        left = _half_to_even(batch.shape[axes.column] - width)
        return batch.narrow(axes.row, top, height).narrow(axes.column, left, width)


@dataclass(frozen=True)
class RandomResizedCrop:
    """Crops a window of random area and aspect ratio, and resizes it to `size`.

    The area is uniform in `scale`, as a share of the image; the logarithm of width / height is
    uniform in that of `ratio`. A window that does not fit is drawn anew, up to 10 times; then the
    largest one in the centre is taken that keeps to `ratio`. Bilinear and bicubic filters are
    widened where the window shrinks (antialias). uint8 is rounded to nearest. The bits are the same
    on every device.
    """

    size: int | tuple[int, int]
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    interpolation: Interpolation = "bilinear"
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = _DRAWS_OF_RECTANGLE

    def __post_init__(self) -> None:
        name = "RandomResizedCrop"
        object.__setattr__(self, "size", parse_size(name, self.size))
        object.__setattr__(self, "scale", parse_range(name, "scale", self.scale, low=0, high=1))
        ratio = parse_range(name, "ratio", self.ratio, low=1e-6, high=1e6)
        object.__setattr__(self, "ratio", ratio)
        check_interpolation(name, self.interpolation, ("nearest", "bilinear", "bicubic"))
        check_layout(name, self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        axes = image_axes("RandomResizedCrop", batch, self.layout)
        if self.interpolation != "nearest":
            check_pixel_dtype("RandomResizedCrop", batch)
        windows = self.windows(words, batch.shape[axes.row], batch.shape[axes.column])

        def crop(part: Tensor, part_windows: Tensor) -> Tensor:
            return self.resize_windows(part, part_windows, axes)

        return in_chunks(crop, batch, windows)

    @property
    def for_evaluation(self) -> tuple[Any, ...]:
        """What is usual in its place where nothing is random: a resize, and the centre of it."""
        height, width = parse_size("RandomResizedCrop", self.size)
        if height != width:
            return (Resize((height, width), antialias=True, layout=self.layout),)
        shorter_edge = round(height * 8 / 7)
        return (
            Resize(shorter_edge, antialias=True, layout=self.layout),
            CenterCrop(height, layout=self.layout),
        )

    def windows(self, words: Tensor, height: int, width: int) -> Tensor:
        """int64 [B, 4]: top, left, height and width of each sample's window."""
        rows, columns = _draw_sizes(words, height, width, self.scale, self.ratio)
        fits = (rows >= 1) & (columns >= 1) & (rows <= height) & (columns <= width)
        fallback_rows, fallback_columns = self._central_window(height, width)
        has_fit = fits.any(0)
        rows = torch.where(has_fit, _first_that_fits(rows, fits), fallback_rows)
        columns = torch.where(has_fit, _first_that_fits(columns, fits), fallback_columns)

        top = below(words[-2], height - rows + 1)
        left = below(words[-1], width - columns + 1)
        top = torch.where(has_fit, top, (height - fallback_rows) // 2)
        left = torch.where(has_fit, left, (width - fallback_columns) // 2)
        return torch.stack([top, left, rows, columns], dim=1)

    def _central_window(self, height: int, width: int) -> tuple[int, int]:
        """Height and width of the largest window that keeps to the ratio."""
        smallest, largest = self.ratio
        if width < smallest * height:
            return min(height, round(width / smallest)), width
        if width > largest * height:
            return height, min(width, round(height * largest))
        return height, width

    def resize_windows(self, batch: Tensor, windows: Tensor, axes: Axes) -> Tensor:
        """The windows [B, 4] of top, left, height, width, each resized to `size`."""
        out_height, out_width = parse_size("RandomResizedCrop", self.size)
        height = batch.shape[axes.row]
        width = batch.shape[axes.column]
        top, left, rows, columns = windows.unbind(1)

        # As [B, planes, H, L]: a line is W pixels, or W pixels of C channels side by side.
        channels = 1 if axes.channel is None else batch.shape[axes.channel]
        line_channels = channels if axes.channel == 3 else 1
        planes = channels // line_channels
        source = batch.reshape(len(batch), planes, height, width * line_channels)

        if self.interpolation == "nearest":
            row_numbers = _nearest_pixels(top, rows, out_height)
            column_numbers = _nearest_pixels(left, columns, out_width)
            result = _take_rows(source, row_numbers)
            result = _take_columns(result, column_numbers, line_channels)
        else:
            row_taps = _filter_taps(self.interpolation, top, rows, out_height, height)
            column_taps = _filter_taps(self.interpolation, left, columns, out_width, width)
            compute_dtype = torch.promote_types(batch.dtype, torch.float32)
            result = _weighted_rows(source.to(compute_dtype), *row_taps)
            result = _weighted_columns(result, *column_taps, line_channels)
            if batch.dtype == torch.uint8:
                result = result.add_(0.5).clamp_(0, 255)  # the cast cuts off
            result = result.to(batch.dtype)

        if axes.channel == 1:
            return result
        shape = (len(batch), out_height, out_width)
        return result.view(shape if axes.channel is None else (*shape, channels))


@dataclass(frozen=True)
class RandomErasing:
    """Fills a rectangle of random area, aspect ratio and place with probability p.

    The area is uniform in `scale`, as a share of the image; the logarithm of height / width is
    uniform in that of `ratio`. A rectangle that does not fit is drawn anew, up to 10 times; then
    the image stays. `value` is one number, or one for each channel, in the batch's own units.
    """

    p: float = 0.5
    scale: tuple[float, float] = (0.02, 0.33)
    ratio: tuple[float, float] = (0.3, 3.3)
    value: float | tuple[float, ...] = 0
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = _DRAWS_OF_RECTANGLE + 1

    def __post_init__(self) -> None:
        name = "RandomErasing"
        check_probability(name, self.p)
        object.__setattr__(self, "scale", parse_range(name, "scale", self.scale, low=0, high=1))
        ratio = parse_range(name, "ratio", self.ratio, low=1e-6, high=1e6)
        object.__setattr__(self, "ratio", ratio)
        object.__setattr__(self, "value", _parse_value(name, self.value))
        check_layout(name, self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        axes = image_axes("RandomErasing", batch, self.layout)
        height = batch.shape[axes.row]
        width = batch.shape[axes.column]
        hole = rectangle_mask(self.rectangles(words, height, width), height, width)
        if axes.channel is not None:
            hole = hole.unsqueeze(axes.channel)

        values = self.value if isinstance(self.value, tuple) else (self.value,)
        for value in values:
            check_fill("RandomErasing", value, batch.dtype)
        if len(values) == 1:
            return batch.masked_fill(hole, values[0])
        channels = 1 if axes.channel is None else batch.shape[axes.channel]
        if len(values) != channels:
            raise ValueError(
                f"RandomErasing: expected one value or {channels}, one per channel of a batch of "
                f"shape {tuple(batch.shape)}, got {len(values)}"
            )
        fill = constant_vector(values, batch.dtype, batch.device)
        if axes.channel == 1:
            fill = fill.view(-1, 1, 1)
        return torch.where(hole, fill, batch)

    def rectangles(self, words: Tensor, height: int, width: int) -> Tensor:
        """int64 [B, 4]: top, left, height and width of what is erased; 0 rows where nothing is."""
        # Here the ratio is height / width.
        columns, rows = _draw_sizes(words[1:], width, height, self.scale, self.ratio)
        fits = (rows < height) & (columns < width)
        rows = _first_that_fits(rows, fits)
        columns = _first_that_fits(columns, fits)
        top = below(words[-2], height - rows + 1)
        left = below(words[-1], width - columns + 1)
        is_erased = is_below(words[0], self.p) & fits.any(0)
        return torch.stack([top, left, torch.where(is_erased, rows, 0), columns], dim=1)


def check_interpolation(name: str, interpolation: Any, known: Sequence[str]) -> None:
    """Raises a ValueError unless the interpolation is a known one."""
    choices = ", ".join(map(repr, known))
    expect(interpolation in known, name, f"interpolation {choices}", interpolation, known)


def rectangle_mask(rectangles: Tensor, height: int, width: int) -> Tensor:
    """[B, H, W] booleans: what is inside of top, left, height, width [B, 4]."""
    top, left, rows, columns = rectangles.unsqueeze(-1).unbind(1)
    y = torch.arange(height, device=rectangles.device) - top
    x = torch.arange(width, device=rectangles.device) - left
    in_rows = (y >= 0) & (y < rows)
    in_columns = (x >= 0) & (x < columns)
    return in_rows.unsqueeze(2) & in_columns.unsqueeze(1)


def _half_to_even(number: int) -> int:
    return round(number / 2)


def _parse_value(name: str, value: Any) -> float | tuple[float, ...]:
    value = to_python(value)
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    ok = len(values) > 0 and all(
        isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values
    )
    expect(ok, name, "value as a finite number or one per channel", value)
    return values if isinstance(value, list | tuple) else values[0]


# Rectangles


def _draw_sizes(
    words: Tensor,
    height: int,
    width: int,
    scale: tuple[float, float],
    ratio: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """Rows and columns of each try, int64 [tries, B]; columns / rows is the ratio."""
    area = uniform(words[0 : 2 * _TRIES : 2], scale[0], scale[1]) * float(height * width)
    # Half of the logarithm: the sides are √area · e^half and √area / e^half.
    half_log_ratio = uniform(
        words[1 : 2 * _TRIES : 2], math.log(ratio[0]) / 2, math.log(ratio[1]) / 2
    )
    side = area.sqrt()
    root_of_ratio = exp(half_log_ratio)
    rows = (side / root_of_ratio).round().to(torch.int64)
    columns = (side * root_of_ratio).round().to(torch.int64)
    return rows, columns


def _first_that_fits(sizes: Tensor, fits: Tensor) -> Tensor:
    """[B]: of [tries, B] the first try that fits; 0 where none does."""
    is_first = fits & (fits.to(torch.int64).cumsum(0) == 1)
    return torch.where(is_first, sizes, 0).sum(0)


# Resizing windows


def _nearest_pixels(start: Tensor, length: Tensor, out_length: int) -> Tensor:
    """int64 [B, out]: the source pixel of each output pixel, ⌊i · length / out⌋ from `start`."""
    place = torch.arange(out_length, device=start.device)
    return start.unsqueeze(1) + place * length.unsqueeze(1) // out_length


def _filter_taps(
    interpolation: str, start: Tensor, length: Tensor, out_length: int, source_length: int
) -> tuple[Tensor, Tensor]:
    """Source pixels and weights of each output pixel: int64 and float64 [taps, B, out].

    Pixels outside of the window weigh nothing, and the weights add up to 1.
    """
    reach = _FILTER_REACH[interpolation]
    tap_count = math.ceil(2 * reach * max(1.0, source_length / out_length))

    scale = (length.to(torch.float64) / out_length).unsqueeze(1)
    width = scale.clamp(min=1.0)
    place = torch.arange(out_length, device=start.device, dtype=torch.float64) + 0.5
    centre = place * scale
    first = (centre - width * reach + 0.5).floor()

    offsets = torch.arange(tap_count, device=start.device, dtype=torch.float64)
    pixel = first + offsets.view(-1, 1, 1)
    distance = ((pixel + 0.5 - centre) / width).abs()
    if interpolation == "bilinear":
        weight = (1 - distance).clamp(min=0)
    else:
        weight = _cubic(distance)
    is_inside = (pixel >= 0) & (pixel < length.unsqueeze(1))
    weight = torch.where(is_inside, weight, 0.0)
    # One by one: the order of a sum over a dimension may depend on the shape.
    total = weight[0]
    for more in weight[1:]:
        total = total + more
    last = (length - 1).unsqueeze(1).to(torch.float64)
    pixel = torch.minimum(pixel.clamp(min=0), last).to(torch.int64)
    return start.unsqueeze(1) + pixel, weight / total


def _cubic(distance: Tensor) -> Tensor:
    """Keys' cubic filter with a = −0.5, as Pillow and torch's antialiased resize use it."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((-0.5 * distance + 2.5) * distance - 4) * distance + 2
    return torch.where(distance < 1, near, torch.where(distance < 2, far, 0.0))


def _take_rows(source: Tensor, rows: Tensor) -> Tensor:
    """[B, P, out, L] of [B, P, H, L]: the rows [B, out] of every plane."""
    batch, planes, height, length = source.shape
    first_rows = torch.arange(batch * planes, device=rows.device) * height
    numbers = first_rows.view(batch, planes, 1) + rows.unsqueeze(1)
    taken = source.reshape(-1, length).index_select(0, numbers.view(-1))
    return taken.view(batch, planes, rows.shape[1], length)


def _take_columns(source: Tensor, columns: Tensor, line_channels: int) -> Tensor:
    """[B, P, H, out · channels] of [B, P, H, L]: the pixels [B, out] of every line."""
    numbers = columns
    if line_channels > 1:
        channel = torch.arange(line_channels, device=columns.device)
        numbers = (columns.unsqueeze(2) * line_channels + channel).flatten(1)
    _, planes, height, _ = source.shape
    return source.gather(3, numbers[:, None, None].expand(-1, planes, height, -1))


def _weighted_rows(source: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    result = None
    for tap_rows, tap_weights in zip(rows, weights.to(source.dtype), strict=True):
        term = _take_rows(source, tap_rows).mul_(tap_weights[:, None, :, None])
        result = term if result is None else result.add_(term)
    assert result is not None
    return result


def _weighted_columns(
    source: Tensor, columns: Tensor, weights: Tensor, line_channels: int
) -> Tensor:
    result = None
    for tap_columns, tap_weights in zip(columns, weights.to(source.dtype), strict=True):
        line_weights = tap_weights.repeat_interleave(line_channels, 1)
        term = _take_columns(source, tap_columns, line_channels)
        term.mul_(line_weights[:, None, None])
        result = term if result is None else result.add_(term)
    assert result is not None
    return result
