"""Transforms of colours and sharpness: jitter, grey, blur.

uint8 images keep uint8, and every step rounds down as torchvision's does. Floats are colours from
0 to 1.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from halfstep.data.transforms.axes import (
    Layout,
    check_channels,
    check_layout,
    check_pixel_dtype,
    check_probability,
    from_chw,
    image_axes,
    parse_range,
    to_chw,
    to_python,
)
from halfstep.data.transforms.chunks import in_chunks
from halfstep.data.transforms.random_numbers import exp, is_below, uniform
from halfstep.utils.checks import expect

# Shares of red, green and blue in grey: ITU-R BT.601, with the digits of torchvision.
GREY_SHARES = (0.2989, 0.587, 0.114)

# The order of the factors, and of the operations before they are shuffled.
BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


@dataclass(frozen=True)
class ColorJitter:
    """Changes brightness, contrast, saturation and hue by random factors, in random order.

    Each is a number d for factors uniform in 1 − d..1 + d (hue: shifts in −d..d of the circle), two
    limits, or 0 to leave it. Hue and saturation leave images of one channel alone.
    """

    brightness: float | tuple[float, float] = 0
    contrast: float | tuple[float, float] = 0
    saturation: float | tuple[float, float] = 0
    hue: float | tuple[float, float] = 0
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 8

    def __post_init__(self) -> None:
        name = "ColorJitter"
        for what in ("brightness", "contrast", "saturation"):
            value = getattr(self, what)
            limits = parse_range(name, what, value, low=0, high=1e6, around=1)
            object.__setattr__(self, what, limits)
        hue = parse_range(name, "hue", self.hue, low=-0.5, high=0.5, around=0)
        object.__setattr__(self, "hue", hue)
        check_layout(name, self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        axes = image_axes("ColorJitter", batch, self.layout)
        check_pixel_dtype("ColorJitter", batch)
        channels = check_channels("ColorJitter", batch, axes.channel)
        operations = self._operations(channels)
        if not operations:
            return batch

        def change(part: Tensor, part_words: Tensor) -> Tensor:
            return self._change(to_chw(part, axes.channel), part_words.t(), operations)

        images = in_chunks(change, batch, words.t())
        return from_chw(images, axes.channel)

    def limits(self) -> tuple[tuple[float, float], ...]:
        """The limits of the four factors."""
        values: Any = (self.brightness, self.contrast, self.saturation, self.hue)
        return tuple(values)

    def factors(self, words: Tensor) -> Tensor:
        """float64 [4, B]: brightness, contrast and saturation as factors, hue as a shift."""
        return torch.stack(
            [uniform(words[i], low, high) for i, (low, high) in enumerate(self.limits())]
        )

    def order(self, words: Tensor) -> Tensor:
        """int64 [4, B]: when each operation comes; all orders are equally likely.

        An operation comes after those whose word is smaller; of equal words, the first one's is.
        """
        ranks = []
        for i in range(4):
            before = [words[4 + j] < words[4 + i] for j in range(4) if j > i]
            before += [words[4 + j] <= words[4 + i] for j in range(4) if j < i]
            ranks.append(torch.stack(before).sum(0))
        return torch.stack(ranks)

    def _operations(self, channels: int) -> list[int]:
        """Those that change anything."""
        neutral = (1.0, 1.0, 1.0, 0.0)
        pairs = zip(self.limits(), neutral, strict=True)
        changing = [i for i, (limits, value) in enumerate(pairs) if limits != (value, value)]
        if channels == 1:
            changing = [i for i in changing if i in (BRIGHTNESS, CONTRAST)]
        return changing

    def _change(self, images: Tensor, words: Tensor, operations: list[int]) -> Tensor:
        factors = self.factors(words)
        order = self.order(words)
        # Ranks among the operations that change anything.
        ranks = {
            i: torch.stack([order[j] < order[i] for j in operations if j != i]).sum(0)
            if len(operations) > 1
            else torch.zeros_like(order[i])
            for i in operations
        }
        colours = to_colours(images)
        blends = [i for i in operations if i != HUE]
        is_integer = images.dtype == torch.uint8

        def blend_at(colours: Tensor, place: int, where: Tensor | None) -> Tensor:
            """The blends whose turn it is; one of brightness, contrast, saturation or none."""
            is_due = {i: ranks[i] == place for i in blends}
            if where is not None:
                is_due = {i: due & where for i, due in is_due.items()}
            return blend_by_kind(colours, is_due, factors, is_integer)

        if HUE not in operations:
            for place in range(len(blends)):
                colours = blend_at(colours, place, None)
            return colours.to(images.dtype)

        # Hue costs as much as all the rest: it runs once, between the blends that come before it
        # and those that come after it in the order of each sample.
        hue_rank = ranks[HUE]
        for place in range(len(blends)):
            colours = blend_at(colours, place, hue_rank > place)
        colours = shift_hue(colours, factors[HUE], is_integer)
        for place in range(1, len(blends) + 1):
            colours = blend_at(colours, place, hue_rank < place)
        return colours.to(images.dtype)


@dataclass(frozen=True)
class Grayscale:
    """Grey images of one channel, or of three equal ones. One channel stays, or is repeated."""

    channels: Literal[1, 3] = 1
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 0

    def __post_init__(self) -> None:
        expect(self.channels in (1, 3), "Grayscale", "channels 1 or 3", self.channels)
        check_layout("Grayscale", self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        axes = image_axes("Grayscale", batch, self.layout)
        check_pixel_dtype("Grayscale", batch)
        channels = check_channels("Grayscale", batch, axes.channel)
        if axes.channel is None and self.channels == 3:
            raise ValueError(
                f"Grayscale: expected images with a channel for channels=3, got shape "
                f"{tuple(batch.shape)}. Put a ToCHW before it."
            )
        if axes.channel is None:
            return batch
        images = to_chw(batch, axes.channel)
        if channels == 3:
            images = grey(to_colours(images)).to(batch.dtype)
        return from_chw(images.expand(-1, self.channels, -1, -1), axes.channel)


@dataclass(frozen=True)
class RandomGrayscale:
    """Grey with probability p. The channels stay as many, and are equal then."""

    p: float = 0.1
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_probability("RandomGrayscale", self.p)
        check_layout("RandomGrayscale", self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        axes = image_axes("RandomGrayscale", batch, self.layout)
        check_pixel_dtype("RandomGrayscale", batch)
        if check_channels("RandomGrayscale", batch, axes.channel) == 1:
            return batch
        images = to_chw(batch, axes.channel)

        def change(part: Tensor, is_grey: Tensor) -> Tensor:
            greys = grey(to_colours(part)).to(part.dtype)
            return torch.where(is_grey.view(-1, 1, 1, 1), greys, part)

        changed = in_chunks(change, images, is_below(words[0], self.p))
        return from_chw(changed, axes.channel)


@dataclass(frozen=True)
class GaussianBlur:
    """Blurs by a Gauss filter whose sigma is uniform between two limits, in pixels.

    `kernel_size` is odd, one number or (across, down), as in torchvision. The image is mirrored
    at its border. uint8 is rounded to nearest.
    """

    kernel_size: int | tuple[int, int]
    sigma: float | tuple[float, float] = (0.1, 2.0)
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        name = "GaussianBlur"
        sizes = to_python(self.kernel_size)
        sizes = (sizes, sizes) if isinstance(sizes, int) else sizes
        ok = isinstance(sizes, list | tuple) and len(sizes) == 2
        ok = ok and all(isinstance(n, int) and n >= 1 and n % 2 == 1 for n in sizes)
        expect(ok, name, "kernel_size as an odd number or (across, down)", self.kernel_size)
        object.__setattr__(self, "kernel_size", tuple(sizes))
        sigma = to_python(self.sigma)
        sigma = (sigma, sigma) if isinstance(sigma, int | float) else sigma
        limits = parse_range(name, "sigma", sigma, low=1e-3, high=1e6)
        object.__setattr__(self, "sigma", limits)
        check_layout(name, self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        axes = image_axes("GaussianBlur", batch, self.layout)
        check_pixel_dtype("GaussianBlur", batch)
        across, down = self._sizes()
        height = batch.shape[axes.row]
        width = batch.shape[axes.column]
        if height <= down // 2 or width <= across // 2:
            raise ValueError(
                f"GaussianBlur: expected images larger than half of the kernel {across}×{down}, "
                f"got {height}×{width}. Take a smaller kernel_size."
            )
        low, high = self._limits()

        def blur(part: Tensor, sigma: Tensor) -> Tensor:
            images = to_colours(to_chw(part, axes.channel))
            images = _filter_axis(images, 3, _gauss_weights(sigma, across))
            images = _filter_axis(images, 2, _gauss_weights(sigma, down))
            if part.dtype == torch.uint8:
                images = images.round_()
            return images.to(part.dtype)

        return from_chw(in_chunks(blur, batch, uniform(words[0], low, high)), axes.channel)

    def _sizes(self) -> tuple[int, int]:
        assert isinstance(self.kernel_size, tuple)
        return self.kernel_size

    def _limits(self) -> tuple[float, float]:
        assert isinstance(self.sigma, tuple)
        return self.sigma


# Colours: [B, C, H, W] in float32 or wider. Those of uint8 images are whole numbers from 0 to 255.


def to_colours(images: Tensor) -> Tensor:
    """The pixels in float32, or as they are in a wider type."""
    return images.to(torch.promote_types(images.dtype, torch.float32))


def grey(colours: Tensor) -> Tensor:
    """[B, 1, H, W]: the shares of red, green and blue; one channel is grey already."""
    if colours.shape[1] == 1:
        return colours
    red, green, blue = colours.split(1, dim=1)
    shares: Tensor = red * GREY_SHARES[0]
    shares.add_(green * GREY_SHARES[1])
    shares.add_(blue * GREY_SHARES[2])
    return shares


def mean_per_sample(values: Tensor, is_integer: bool) -> Tensor:
    """[B, 1, 1, 1]: the mean of [B, 1, H, W], whose bits do not depend on the batch or device.

    It is a sum of integers, which may be added in any order: multiples of 2^-32 where the values
    are no whole numbers.
    """
    factor = 1 if is_integer else 2**32
    scaled = values if is_integer else (values.to(torch.float64) * factor).round()
    total = scaled.sum((1, 2, 3), keepdim=True, dtype=torch.int64)
    count = values[0].numel() if len(values) else 1
    return (total.to(torch.float64) / (count * factor)).to(values.dtype)


def blend(colours: Tensor, other: Tensor, factor: Tensor, is_integer: bool) -> Tensor:
    """colours · factor + other · (1 − factor), cut off at the range, rounded down for integers."""
    factor = factor.view(-1, 1, 1, 1)
    result = colours * factor.to(colours.dtype)
    result = result.add_(other * (1 - factor).to(colours.dtype))
    return to_range(result, is_integer)


def to_range(colours: Tensor, is_integer: bool) -> Tensor:
    """Cut off at 0 and the largest colour, in place; rounded down for integers."""
    if is_integer:
        return colours.clamp_(0, 255).floor_()
    return colours.clamp_(0, 1)


def blend_by_kind(
    colours: Tensor, is_due: dict[int, Tensor], factors: Tensor, is_integer: bool
) -> Tensor:
    """One of brightness, contrast and saturation for each sample, or none.

    `is_due` has a mask [B] for each kind; no sample is in two of them.
    """
    factor = torch.ones_like(factors[0])
    other = colours.new_zeros(())
    if CONTRAST in is_due or SATURATION in is_due:
        greys = grey(colours)
        if is_integer:
            greys = greys.floor()
    if CONTRAST in is_due:
        mean = mean_per_sample(greys, is_integer)
        other = torch.where(is_due[CONTRAST].view(-1, 1, 1, 1), mean, other)
    if SATURATION in is_due:
        other = torch.where(is_due[SATURATION].view(-1, 1, 1, 1), greys, other)
    for kind, due in is_due.items():
        factor = torch.where(due, factors[kind], factor)
    return blend(colours, other, factor, is_integer)


def shift_hue(colours: Tensor, shift: Tensor, is_integer: bool) -> Tensor:
    """Turns the hue by a share of the circle; the largest and the smallest channel stay."""
    if is_integer:
        colours = colours * (1 / 255)
    red, green, blue = colours.unbind(1)
    largest = torch.maximum(torch.maximum(red, green), blue)
    smallest = torch.minimum(torch.minimum(red, green), blue)
    chroma = largest - smallest
    divisor = torch.where(chroma == 0, 1.0, chroma)

    # The hue in sixths of the circle, from red.
    from_red = (green - blue) / divisor
    from_green = (blue - red) / divisor + 2
    from_blue = (red - green) / divisor + 4
    sixths = torch.where(largest == green, from_green, from_blue)
    sixths = torch.where(largest == red, from_red, sixths)
    sixths = sixths + (shift * 6).to(colours.dtype).view(-1, 1, 1)

    # Each channel falls from the largest to the smallest value and back, a third of a circle apart.
    result = torch.empty_like(colours)
    for channel, offset in enumerate((5, 3, 1)):
        place = (sixths + offset).remainder_(6)
        fall = torch.minimum(place, 4 - place).clamp_(0, 1)
        result[:, channel] = largest - chroma * fall
    if is_integer:
        result = result.mul_(255.999).floor_()
    return result


def _gauss_weights(sigma: Tensor, size: int) -> Tensor:
    """float64 [size, B]: e^(−x² / 2σ²) at whole pixels from the middle, which add up to 1."""
    places = torch.arange(size // 2 + 1, device=sigma.device, dtype=torch.float64)
    half = exp((-(places * places).unsqueeze(1) / (2 * sigma * sigma)).clamp(min=-500))
    weights = torch.cat([half[1:].flip(0), half])
    total = weights[0]
    for more in weights[1:]:
        total = total + more
    return weights / total


def _filter_axis(images: Tensor, axis: int, weights: Tensor) -> Tensor:
    """The weighted sum of neighbours along an axis, mirrored at the ends."""
    size = len(weights)
    reach = size // 2
    if reach == 0:
        return images
    length = images.shape[axis]
    padding = [reach, reach, 0, 0] if axis == 3 else [0, 0, reach, reach]
    padded = F.pad(images, padding, mode="reflect")
    factors = weights.to(images.dtype).view(size, -1, 1, 1, 1)
    result = padded.narrow(axis, reach, length) * factors[reach]
    for i in range(reach):
        pair = padded.narrow(axis, i, length) + padded.narrow(axis, size - 1 - i, length)
        result = result.add_(pair.mul_(factors[i]))
    return result
