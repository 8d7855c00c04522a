"""TrivialAugment: one random operation of fourteen for each image, with a random strength."""

import math
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from halfstep.data.hashing import below
from halfstep.data.transforms.affine import transform_images
from halfstep.data.transforms.axes import (
    Layout,
    check_channels,
    check_fill,
    check_layout,
    from_chw,
    image_axes,
    to_chw,
    to_python,
)
from halfstep.data.transforms.chunks import in_chunks
from halfstep.data.transforms.colour import grey, mean_per_sample, to_range
from halfstep.data.transforms.random_numbers import sin_cos
from halfstep.data.transforms.values import constant_vector
from halfstep.utils.checks import expect

# The table of the paper's wide space, in torchvision's order: the first and the last of the equally
# spaced strengths, and whether a sign is random.
OPERATIONS: dict[str, tuple[float, float, bool]] = {
    "Identity": (0.0, 0.0, False),
    "ShearX": (0.0, 0.99, True),  # the tangent of the angle
    "ShearY": (0.0, 0.99, True),
    "TranslateX": (0.0, 32.0, True),  # pixels, cut to whole ones
    "TranslateY": (0.0, 32.0, True),
    "Rotate": (0.0, 135.0, True),  # degrees
    "Brightness": (0.0, 0.99, True),  # the factor is 1 + strength
    "Color": (0.0, 0.99, True),
    "Contrast": (0.0, 0.99, True),
    "Sharpness": (0.0, 0.99, True),
    "Posterize": (8.0, 2.0, False),  # bits that stay, rounded
    "Solarize": (1.0, 0.0, False),  # the threshold, as a share of 255
    "AutoContrast": (0.0, 0.0, False),
    "Equalize": (0.0, 0.0, False),
}
_NAMES = tuple(OPERATIONS)
_SIGNED = tuple(is_signed for _, _, is_signed in OPERATIONS.values())
_LEVELS = 256


@dataclass(frozen=True)
class TrivialAugment:
    """One of fourteen operations for each uint8 image, each as likely, and one of `bins` strengths.

    The operations and strengths are those of torchvision's TrivialAugmentWide. Pixels from outside
    the image are `fill`, the nearest pixel is taken where an image is moved. The bits are the same
    on every device.
    """

    bins: int = 31
    fill: int = 0
    layout: Layout | None = field(default=None, kw_only=True)
    strengths: tuple[float, ...] = field(init=False, repr=False, compare=False)
    """Those of each operation, one operation after the other."""
    draws: ClassVar[int] = 3

    def __post_init__(self) -> None:
        name = "TrivialAugment"
        ok = isinstance(self.bins, int) and self.bins >= 2
        expect(ok, name, "bins of at least 2", self.bins)
        object.__setattr__(self, "fill", to_python(self.fill))
        object.__setattr__(self, "strengths", _strengths(self.bins))
        check_fill(name, self.fill, torch.uint8)
        check_layout(name, self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        name = "TrivialAugment"
        axes = image_axes(name, batch, self.layout)
        check_channels(name, batch, axes.channel)
        if batch.dtype != torch.uint8:
            raise TypeError(
                f"{name}: expected a uint8 batch, got {batch.dtype}. Put it before Rescale, "
                "Normalize and Cast."
            )
        operation, strength = self.choose(words)

        def change(part: Tensor, part_operation: Tensor, part_strength: Tensor) -> Tensor:
            images = to_chw(part, axes.channel)
            images = _change_colours(images, part_operation, part_strength)
            return from_chw(images, axes.channel)

        changed = in_chunks(change, batch, operation, strength)
        matrices = _matrices(operation, strength, batch.shape[axes.row], batch.shape[axes.column])
        return transform_images(name, changed, matrices, "nearest", self.fill, self.layout)

    def choose(self, words: Tensor) -> tuple[Tensor, Tensor]:
        """Each sample's operation, int64 [B], and its strength with its sign, float64 [B]."""
        operation = below(words[0], len(_NAMES))
        step = below(words[1], self.bins)
        table = constant_vector(self.strengths, torch.float64, words.device)
        strength = table[operation * self.bins + step]
        is_signed = constant_vector(_SIGNED, torch.bool, words.device)[operation]
        is_negative = is_signed & (words[2] < 2**31)
        return operation, torch.where(is_negative, -strength, strength)


def _strengths(bins: int) -> tuple[float, ...]:
    """`bins` strengths of each operation.

    They are the float32 numbers of torch.linspace: a shift of 16 pixels is cut to 15 where float32
    has a little less.
    """
    strengths: list[float] = []
    for first, last, _ in OPERATIONS.values():
        strengths += torch.linspace(first, last, bins, device="cpu").tolist()
    return tuple(strengths)


def _is(operation: Tensor, name: str) -> Tensor:
    return operation == _NAMES.index(name)


def _strength_of(operation: Tensor, strength: Tensor, name: str) -> Tensor:
    """The strength where it is this operation's turn, else 0."""
    return torch.where(_is(operation, name), strength, 0.0)


def _matrices(operation: Tensor, strength: Tensor, height: int, width: int) -> Tensor:
    """float64 [B, 2, 3] as `inverse_matrices` has them; the identity for other operations."""
    sin, cos = sin_cos(_strength_of(operation, strength, "Rotate") * (math.pi / 180))
    shear_x = _strength_of(operation, strength, "ShearX")
    shear_y = _strength_of(operation, strength, "ShearY")
    shift_x = _strength_of(operation, strength, "TranslateX").trunc()
    shift_y = _strength_of(operation, strength, "TranslateY").trunc()

    # A rotation turns counter-clockwise. A shear leaves the first row or column in its place: the
    # centre of the image is half of its size away from there.
    rows = [
        cos,
        shear_x - sin,
        shear_x * (height / 2) - shift_x,
        shear_y + sin,
        cos,
        shear_y * (width / 2) - shift_y,
    ]
    return torch.stack(rows, dim=1).view(-1, 2, 3)


# Colours. What a pixel becomes depends on its own level alone for most operations: one table of 256
# levels for each channel of each image does them all.


def _change_colours(images: Tensor, operation: Tensor, strength: Tensor) -> Tensor:
    colours = images.to(torch.float32)
    greys = grey(colours)
    if colours.shape[1] == 3:
        greys = greys.floor_()

    levels = images.flatten(2).to(torch.int64)
    tables = _level_tables(images, levels, greys, operation, strength)
    changed = tables.gather(2, levels).view(images.shape)

    # The two that need other channels, or neighbours.
    factor = (1 + strength).to(torch.float32).view(-1, 1, 1, 1)
    rest = (-strength).to(torch.float32).view(-1, 1, 1, 1)  # 1 − factor
    if colours.shape[1] == 3:
        saturated = to_range((colours * factor).add_(greys * rest), is_integer=True)
        is_colour = _is(operation, "Color").view(-1, 1, 1, 1)
        changed = torch.where(is_colour, saturated.to(torch.uint8), changed)
    if images.shape[2] > 2 and images.shape[3] > 2:
        is_sharp = _is(operation, "Sharpness").view(-1, 1, 1, 1)
        sharpened = to_range(_sharpen(colours, rest), is_integer=True)
        changed = torch.where(is_sharp, sharpened.to(torch.uint8), changed)
    return changed


def _sharpen(colours: Tensor, rest: Tensor) -> Tensor:
    """Towards the blurred image by `rest`, away from it where that is negative.

    The blur weighs a pixel 5/13 and its eight neighbours 1/13; the border is left as it is.
    """
    in_rows = colours[:, :, :-2] + colours[:, :, 1:-1]
    in_rows = in_rows.add_(colours[:, :, 2:])
    around = in_rows[..., :-2] + in_rows[..., 1:-1]
    around = around.add_(in_rows[..., 2:])
    middle = colours[..., 1:-1, 1:-1]
    blurred = around.add_(middle * 4).mul_(1 / 13).round_()
    result = colours.clone()
    result[..., 1:-1, 1:-1] = blurred.sub_(middle).mul_(rest).add_(middle)
    return result


def _level_tables(
    images: Tensor, levels: Tensor, greys: Tensor, operation: Tensor, strength: Tensor
) -> Tensor:
    """uint8 [B, C, 256]: what each level becomes."""
    pixels = images.flatten(2)
    level = torch.arange(_LEVELS, device=images.device, dtype=torch.float32)
    whole_level = torch.arange(_LEVELS, device=images.device)
    factor = (1 + strength).to(torch.float32).view(-1, 1, 1)
    rest = (-strength).to(torch.float32).view(-1, 1, 1)

    bright = to_range(level * factor, is_integer=True)
    mean = mean_per_sample(greys, is_integer=True).view(-1, 1, 1)
    contrasted = to_range((level * factor).add_(mean * rest), is_integer=True)
    kept_bits = torch.where(_is(operation, "Posterize"), strength, 8.0).round().to(torch.int64)
    lost_bits = (8 - kept_bits).view(-1, 1, 1)
    posterized = ((whole_level >> lost_bits) << lost_bits).to(torch.float32)
    threshold = (255 * strength).to(torch.float32).view(-1, 1, 1)
    solarized = torch.where(level >= threshold, 255 - level, level)

    tables = level.expand(*pixels.shape[:2], _LEVELS)
    by_name = {
        "Brightness": bright,
        "Contrast": contrasted,
        "Posterize": posterized,
        "Solarize": solarized,
        "AutoContrast": _stretched_levels(pixels, level),
        "Equalize": _equalized_levels(levels, level),
    }
    for name, table in by_name.items():
        tables = torch.where(_is(operation, name).view(-1, 1, 1), table, tables)
    return tables.to(torch.uint8)


def _stretched_levels(pixels: Tensor, level: Tensor) -> Tensor:
    """float32 [B, C, 256]: the smallest level becomes 0, the largest 255; a single one stays."""
    smallest = pixels.amin(2, keepdim=True).to(torch.float32)
    largest = pixels.amax(2, keepdim=True).to(torch.float32)
    is_flat = smallest == largest
    scale = torch.where(is_flat, 1.0, (largest - smallest) * (1 / 255))
    smallest = torch.where(is_flat, 0.0, smallest)
    return to_range((level - smallest).div_(scale), is_integer=True)


def _equalized_levels(pixels: Tensor, level: Tensor) -> Tensor:
    """float32 [B, C, 256]: levels by how many pixels are below them, as Pillow computes it."""
    counts = torch.zeros(*pixels.shape[:2], _LEVELS, dtype=torch.int64, device=pixels.device)
    ones = torch.ones((), dtype=torch.int64, device=pixels.device)
    counts.scatter_add_(2, pixels, ones.expand(pixels.shape))
    below_or_at = counts.cumsum(2)

    # The pixels of the largest level do not count for the step from one level to the next.
    largest = pixels.amax(2, keepdim=True)
    step = (pixels.shape[2] - counts.gather(2, largest)) // 255
    strictly_below = below_or_at - counts
    equalized = (strictly_below + step // 2) // step.clamp(min=1)
    return torch.where(step == 0, level, equalized.clamp(max=255).to(torch.float32))
