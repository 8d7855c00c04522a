"""Rotation, scaling, shear and translation of images by one matrix for each sample."""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.data.transforms.axes import (
    Axes,
    Layout,
    check_fill,
    check_layout,
    check_pixel_dtype,
    from_chw,
    image_axes,
    parse_range,
    to_chw,
    to_python,
)
from halfstep.data.transforms.chunks import in_chunks
from halfstep.data.transforms.crops import Interpolation, check_interpolation
from halfstep.data.transforms.random_numbers import sin_cos, uniform
from halfstep.utils.checks import expect

_RADIANS = math.pi / 180
_INTERPOLATIONS = ("nearest", "bilinear")


@dataclass(frozen=True)
class RandomRotation:
    """Rotates around the centre by an angle that is uniform in −degrees..degrees, or in two limits.

    Positive angles turn counter-clockwise. Pixels from outside the image are `fill`. "nearest"
    gives the same bits on every device; "bilinear" differs in the last bits of a float, and rounds
    uint8 to nearest.
    """

    degrees: float | tuple[float, float]
    interpolation: Interpolation = "nearest"
    fill: float = 0
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        name = "RandomRotation"
        object.__setattr__(self, "degrees", _parse_degrees(name, "degrees", self.degrees))
        object.__setattr__(self, "fill", to_python(self.fill))
        check_interpolation(name, self.interpolation, _INTERPOLATIONS)
        check_layout(name, self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        low, high = _parse_degrees("RandomRotation", "degrees", self.degrees)
        # Rows count downwards, so a positive angle of the formula turns clockwise.
        matrices = inverse_matrices(angle=-uniform(words[0], low, high))
        return transform_images(
            "RandomRotation", batch, matrices, self.interpolation, self.fill, self.layout
        )


@dataclass(frozen=True)
class RandomAffine:
    """Rotates, translates, scales and shears, each by a uniform number of its own.

    `translate` is the largest shift as a share of width and height, in whole pixels; `scale` the
    two limits of a factor; `shear` the degrees along x: one number, two limits, or four for x and
    y. Positive angles turn clockwise, as in torchvision. Everything else is as in RandomRotation.
    """

    degrees: float | tuple[float, float]
    translate: tuple[float, float] | None = None
    scale: tuple[float, float] | None = None
    shear: float | tuple[float, float] | tuple[float, float, float, float] | None = None
    interpolation: Interpolation = "nearest"
    fill: float = 0
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 6

    def __post_init__(self) -> None:
        name = "RandomAffine"
        object.__setattr__(self, "degrees", _parse_degrees(name, "degrees", self.degrees))
        object.__setattr__(self, "fill", to_python(self.fill))
        if self.translate is not None:
            pair = to_python(self.translate)
            ok = isinstance(pair, list | tuple) and len(pair) == 2
            ok = ok and all(isinstance(t, int | float) and 0 <= t <= 1 for t in pair)
            expect(ok, name, "translate as two shares in 0..1, of width and height", pair)
            object.__setattr__(self, "translate", tuple(pair))
        if self.scale is not None:
            scale = parse_range(name, "scale", self.scale, low=1e-6, high=1e6)
            object.__setattr__(self, "scale", scale)
        if self.shear is not None:
            object.__setattr__(self, "shear", _parse_shear(name, self.shear))
        check_interpolation(name, self.interpolation, _INTERPOLATIONS)
        check_layout(name, self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        axes = image_axes("RandomAffine", batch, self.layout)
        matrices = self.matrices(words, batch.shape[axes.row], batch.shape[axes.column])
        return transform_images(
            "RandomAffine", batch, matrices, self.interpolation, self.fill, self.layout
        )

    def matrices(self, words: Tensor, height: int, width: int) -> Tensor:
        """float64 [B, 2, 3]: from a place in the output to its place in the input."""
        low, high = _parse_degrees("RandomAffine", "degrees", self.degrees)
        angle = uniform(words[0], low, high)
        shift_x = shift_y = shear_x = shear_y = scale = None
        if self.translate is not None:
            reach_x = self.translate[0] * width
            reach_y = self.translate[1] * height
            shift_x = uniform(words[1], -reach_x, reach_x).round()
            shift_y = uniform(words[2], -reach_y, reach_y).round()
        if self.scale is not None:
            scale = uniform(words[3], self.scale[0], self.scale[1])
        if self.shear is not None:
            limits = _parse_shear("RandomAffine", self.shear)
            shear_x = uniform(words[4], limits[0], limits[1])
            shear_y = uniform(words[5], limits[2], limits[3])
        return inverse_matrices(
            angle=angle,
            shift_x=shift_x,
            shift_y=shift_y,
            scale=scale,
            shear_x=shear_x,
            shear_y=shear_y,
        )


def inverse_matrices(
    *,
    angle: Tensor,
    shift_x: Tensor | None = None,
    shift_y: Tensor | None = None,
    scale: Tensor | None = None,
    shear_x: Tensor | None = None,
    shear_y: Tensor | None = None,
) -> Tensor:
    """float64 [B, 2, 3]: from a place in the output to its place in the input.

    Places are (x, y) from the centre of the image. Forward, a place is sheared along x, along y,
    scaled, turned by `angle` and shifted; all angles are in degrees.
    """
    zero = torch.zeros_like(angle)
    sin, cos = sin_cos(angle * _RADIANS)
    tan_x = tan_y = zero
    if shear_x is not None:
        sin_x, cos_x = sin_cos(shear_x * _RADIANS)
        tan_x = sin_x / cos_x
    if shear_y is not None:
        sin_y, cos_y = sin_cos(shear_y * _RADIANS)
        tan_y = sin_y / cos_y

    # Forward: rotation · [[1, 0], [−tan_y, 1]] · [[1, −tan_x], [0, 1]], whose determinant is 1.
    # cos(angle − shear_y) / cos(shear_y) = cos + sin · tan_y, and the sine likewise.
    a = cos + sin * tan_y
    c = sin - cos * tan_y
    b = -(a * tan_x + sin)
    d = cos - c * tan_x

    # The inverse of [[a, b], [c, d]] is [[d, −b], [−c, a]].
    factor = 1.0 if scale is None else 1 / scale
    x_of_x = d * factor
    x_of_y = -b * factor
    y_of_x = -c * factor
    y_of_y = a * factor
    shift_x = zero if shift_x is None else shift_x
    shift_y = zero if shift_y is None else shift_y
    x_offset = -(x_of_x * shift_x + x_of_y * shift_y)
    y_offset = -(y_of_x * shift_x + y_of_y * shift_y)
    rows = [x_of_x, x_of_y, x_offset, y_of_x, y_of_y, y_offset]
    return torch.stack(rows, dim=1).view(-1, 2, 3)


def transform_images(
    name: str,
    batch: Tensor,
    matrices: Tensor,
    interpolation: Interpolation,
    fill: float,
    layout: Layout | None,
) -> Tensor:
    """The images after their matrices of `inverse_matrices`; `fill` from outside of them."""
    axes = image_axes(name, batch, layout)
    check_fill(name, fill, batch.dtype)
    if interpolation == "bilinear":
        check_pixel_dtype(name, batch)

    def transform(part: Tensor, part_matrices: Tensor) -> Tensor:
        x, y = _source_places(part_matrices, part.shape[axes.row], part.shape[axes.column])
        if interpolation == "nearest":
            return take_nearest(part, x, y, axes, fill)
        return _interpolate(part, x, y, axes, fill)

    return in_chunks(transform, batch, matrices)


def _source_places(matrices: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    """x and y [B, H, W] in pixels of the input, of each output pixel; float32."""
    x = torch.arange(width, device=matrices.device) - (width - 1) / 2
    y = torch.arange(height, device=matrices.device) - (height - 1) / 2
    # The offset and the centre of the image in float64: one rounding to float32.
    matrices = matrices.clone()
    matrices[:, 0, 2] += (width - 1) / 2
    matrices[:, 1, 2] += (height - 1) / 2
    x_of_x, x_of_y, x_offset, y_of_x, y_of_y, y_offset = (
        matrices.view(-1, 6).to(torch.float32).t().unsqueeze(-1).unbind(0)
    )
    source_x = (x * x_of_x).unsqueeze(1) + (y * x_of_y + x_offset).unsqueeze(2)
    source_y = (x * y_of_x).unsqueeze(1) + (y * y_of_y + y_offset).unsqueeze(2)
    return source_x, source_y


def take_nearest(batch: Tensor, x: Tensor, y: Tensor, axes: Axes, fill: float) -> Tensor:
    """The pixel next to each place, between two the even one; outside of the image `fill`."""
    height = batch.shape[axes.row]
    width = batch.shape[axes.column]
    column = x.round()
    row = y.round()
    is_inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
    number = (row * width + column).to(torch.int64)
    number = torch.where(is_inside, number, 0)

    # Pixels as one dimension.
    if axes.channel == 1:
        pixels = batch.flatten(2)
        number = number.flatten(1).unsqueeze(1)
    elif axes.channel == 3:
        pixels = batch.flatten(1, 2)
        number = number.flatten(1).unsqueeze(2)
    else:
        pixels = batch.flatten(1)
        number = number.flatten(1)
    pixel_axis = 2 if axes.channel == 1 else 1
    taken = pixels.gather(pixel_axis, number.expand(pixels.shape)).view(batch.shape)
    if axes.channel is not None:
        is_inside = is_inside.unsqueeze(axes.channel)
    # A tensor of the same dtype: a plain 3.0 would make floats of uint8.
    return torch.where(is_inside, taken, taken.new_full((), fill))


def _interpolate(batch: Tensor, x: Tensor, y: Tensor, axes: Axes, fill: float) -> Tensor:
    """Between the four pixels around each place, those outside of the image being `fill`."""
    height = batch.shape[axes.row]
    width = batch.shape[axes.column]
    compute_dtype = torch.promote_types(batch.dtype, torch.float32)
    images = to_chw(batch, axes.channel).to(compute_dtype)
    if fill:
        images = images - fill  # grid_sample takes zeros from outside
    grid = torch.stack([(x + 0.5) * (2 / width) - 1, (y + 0.5) * (2 / height) - 1], dim=-1)
    result = F.grid_sample(
        images, grid.to(compute_dtype), mode="bilinear", padding_mode="zeros", align_corners=False
    )
    if fill:
        result = result + fill
    if batch.dtype == torch.uint8:
        result = result.round_().clamp_(0, 255)
    return from_chw(result.to(batch.dtype), axes.channel)


def _parse_degrees(name: str, what: str, degrees: Any) -> tuple[float, float]:
    return parse_range(name, what, degrees, low=-36000, high=36000, around=0)


def _parse_shear(name: str, shear: Any) -> tuple[float, float, float, float]:
    """The limits along x and along y of a shear that is written as one number, two or four."""
    shear = to_python(shear)
    along_y: Any = (0.0, 0.0)
    if isinstance(shear, list | tuple) and len(shear) == 4:
        along_y = tuple(shear[2:])
        shear = tuple(shear[:2])
    x_limits = parse_range(name, "shear", shear, low=-89, high=89, around=0)
    y_limits = parse_range(name, "shear", along_y, low=-89, high=89, around=0)
    return (*x_limits, *y_limits)
