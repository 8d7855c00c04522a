"""Transforms of values: uint8 becomes float, labels become targets.

At the end: a run of neighbouring Rescale and Normalize as one multiplication and one addition.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.data.transforms.axes import Layout, check_layout, image_axes, to_python
from halfstep.utils.checks import expect

Number = int | float


# Never emptied: captured graphs read these tensors at their addresses.
_CONSTANTS: dict[tuple[tuple[Number, ...], torch.dtype, torch.device], Tensor] = {}


def constant_vector(values: tuple[Number, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values as a vector on a device, copied there once for all later calls.

    A compiled or captured graph that needs values nobody used before fills a vector of its own.
    """
    if torch.compiler.is_compiling():
        return _fill_vector(values, dtype, device)
    key = (values, dtype, device)
    if key not in _CONSTANTS:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return _fill_vector(values, dtype, device)  # not stored: its memory is the graph's
        # An inference tensor could not be used with autograd later. torch.tensor waits for the
        # copy, so any stream may read the result.
        with torch.inference_mode(False):
            vector = torch.tensor(values, dtype=dtype, device=device)
        return _CONSTANTS.setdefault(key, vector)
    return _CONSTANTS[key]


def _fill_vector(values: tuple[Number, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The vector by fill kernels alone: a capture refuses copies from the host."""
    return torch.stack([torch.full((), value, dtype=dtype, device=device) for value in values])


@dataclass(frozen=True)
class Rescale:
    """x · scale + shift in float32 (float64 stays float64), rounded after each of the two."""

    scale: float
    shift: float = 0.0
    draws: ClassVar[int] = 0
    channel_count: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", to_python(self.scale))
        object.__setattr__(self, "shift", to_python(self.shift))
        ok = math.isfinite(self.scale) and math.isfinite(self.shift)
        expect(ok, "Rescale", "finite scale and shift", (self.scale, self.shift))

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        return _to_floating(batch) * self.scale + self.shift

    def trailing_ones(self, batch: Tensor) -> list[int]:
        """No dimensions follow: one value serves every channel."""
        return []

    def coefficients(self, channel_count: int) -> list[tuple[float, float]]:
        """(a, b) of x · a + b, for each channel."""
        return [(self.scale, self.shift)] * channel_count


@dataclass(frozen=True)
class Normalize:
    """(x − mean) / std in float32 (float64 stays float64), one value per channel or for all."""

    mean: float | Sequence[float]  # numpy's numbers and arrays too
    std: float | Sequence[float]
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 0

    def __post_init__(self) -> None:
        means = _to_vector("mean", self.mean)
        stds = _to_vector("std", self.std)
        if min(stds) < torch.finfo(torch.float32).tiny:
            raise ValueError(
                f"Normalize: expected every std above 0 in float32, received {self.std!r}. "
                "A constant channel: 1."
            )
        if len(means) != len(stds) and 1 not in (len(means), len(stds)):
            raise ValueError(
                f"Normalize: expected as many means as stds, received {len(means)} and {len(stds)}"
            )
        object.__setattr__(self, "mean", means)
        object.__setattr__(self, "std", stds)
        check_layout("Normalize", self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        x = _to_floating(batch)
        trailing_ones = self.trailing_ones(batch)
        # Tensors, even for a single value: CUDA divides by a plain number by multiplying with its
        # reciprocal, which gives other bits.
        mean = constant_vector(_to_vector("mean", self.mean), x.dtype, x.device)
        std = constant_vector(_to_vector("std", self.std), x.dtype, x.device)
        return (x - mean.view(-1, *trailing_ones)) / std.view(-1, *trailing_ones)

    @property
    def channel_count(self) -> int:
        """How many channels have values of their own; 1 if one value serves all."""
        return max(len(_to_vector("mean", self.mean)), len(_to_vector("std", self.std)))

    def trailing_ones(self, batch: Tensor) -> list[int]:
        """A size of 1 for each dimension after the channel, so that the values broadcast."""
        count = self.channel_count
        if count == 1 and self.layout is None:
            return []
        channel_axis = image_axes("Normalize", batch, self.layout).channel
        batch_channels = 1 if channel_axis is None else batch.shape[channel_axis]
        if count not in (1, batch_channels):
            raise ValueError(
                f"Normalize: expected 1 mean and std or {batch_channels}, one per channel of a "
                f"batch of shape {tuple(batch.shape)}, got {count}"
            )
        if channel_axis is None:
            return []
        return [1] * (batch.dim() - 1 - channel_axis)

    def coefficients(self, channel_count: int) -> list[tuple[float, float]]:
        """(a, b) of x · a + b, for each channel."""
        means = _to_vector("mean", self.mean)
        if len(means) == 1:
            means = means * channel_count
        stds = _to_vector("std", self.std)
        if len(stds) == 1:
            stds = stds * channel_count
        return [(1 / std, -mean / std) for mean, std in zip(means, stds, strict=True)]


@dataclass(frozen=True)
class Cast:
    """Another dtype, rounded to nearest; what float16 cannot hold becomes inf.

    To integers torch cuts towards zero, and a value out of their range has no defined result.
    """

    dtype: torch.dtype | str
    draws: ClassVar[int] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _to_dtype("Cast", self.dtype))

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        return batch.to(_to_dtype("Cast", self.dtype))


@dataclass(frozen=True)
class OneHot:
    """Integer labels [B] as [B, classes]: `on` at the label, `off` elsewhere.

    Smoothing by s as MindSpore does it: on=1 − s, off=s / (classes − 1). A label outside
    0..classes−1 is a ValueError on the CPU. A device cannot report it without a sync; its row is
    `off` throughout there.
    """

    classes: int
    on: float = field(default=1.0, kw_only=True)
    off: float = field(default=0.0, kw_only=True)
    dtype: torch.dtype | str = field(default=torch.float32, kw_only=True)
    draws: ClassVar[int] = 0

    def __post_init__(self) -> None:
        ok = isinstance(self.classes, int) and self.classes >= 1
        expect(ok, "OneHot", "classes of at least 1", self.classes)
        object.__setattr__(self, "dtype", _to_dtype("OneHot", self.dtype))

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        if batch.is_floating_point() or batch.is_complex() or batch.dtype == torch.bool:
            raise TypeError(
                f"OneHot: expected integer labels, got {batch.dtype}. Put Cast('int64') before it."
            )
        if batch.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_range(batch)
        is_label = batch.unsqueeze(-1).long() == torch.arange(self.classes, device=batch.device)
        dtype = _to_dtype("OneHot", self.dtype)
        targets = torch.full(is_label.shape, self.off, dtype=dtype, device=batch.device)
        return targets.masked_fill(is_label, self.on)

    def _check_range(self, labels: Tensor) -> None:
        labels = labels.long()  # in uint8, a bound of 300 would wrap
        outside = labels[(labels < 0) | (labels >= self.classes)]
        if outside.numel():
            raise ValueError(
                f"OneHot: expected labels in 0..{self.classes - 1}, got {outside[0].item()} "
                f"({outside.numel()} of {labels.numel()} are outside). Count the classes again."
            )


@dataclass(frozen=True)
class Flatten:
    """[B, ...] as [B, N], in the order of the dimensions whatever the strides."""

    draws: ClassVar[int] = 0

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        if batch.dim() < 2:
            raise ValueError(
                f"Flatten: expected a batch of 2 dimensions or more, got shape {tuple(batch.shape)}"
            )
        return batch.flatten(1)


def _to_floating(batch: Tensor) -> Tensor:
    """The batch in float32 or wider: half precision would lose bits of a pixel."""
    return batch.to(torch.promote_types(batch.dtype, torch.float32))


def _to_vector(name: str, value: float | Sequence[float]) -> tuple[float, ...]:
    """A number, or a sequence of them, as a tuple of Python's finite numbers."""
    value = to_python(value)
    if isinstance(value, Sequence):
        values = tuple(to_python(item) for item in value)
    else:
        values = (value,)
    ok = len(values) > 0 and all(isinstance(v, Number) and math.isfinite(v) for v in values)
    expect(ok, "Normalize", f"{name} as a finite number or one per channel", value)
    return values


def _to_dtype(name: str, dtype: Any) -> torch.dtype:
    """A torch dtype, also by its name."""
    torch_dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(torch_dtype, torch.dtype):
        raise ValueError(
            f"{name}: expected a torch dtype or its name, for instance 'float32', "
            f"received {dtype!r}"
        )
    return torch_dtype


# A run of Rescale and Normalize as one multiplication and one addition: two passes over the memory
# instead of two for each transform.


def count_affine(transforms: Sequence[Any]) -> int:
    """How many transforms at the start are Rescale or Normalize.

    A subclass ends the run: it may compute something else.
    """
    count = 0
    while count < len(transforms) and type(transforms[count]) in (Rescale, Normalize):
        count += 1
    return count


def apply_affine(transforms: Sequence[Rescale | Normalize], batch: Tensor) -> Tensor:
    """x · a + b, rounded after each of the two; a and b are computed in float64.

    Off from one transform after the other by a few roundings.
    """
    channel_count = 1
    trailing_ones: list[int] = []
    for transform in transforms:
        own_ones = transform.trailing_ones(batch)  # checks the channels too
        if transform.channel_count > channel_count or len(own_ones) > len(trailing_ones):
            channel_count = max(transform.channel_count, channel_count)
            trailing_ones = own_ones

    factors, shifts = affine_coefficients(transforms, channel_count)
    dtype = torch.promote_types(batch.dtype, torch.float32)
    factor = constant_vector(factors, dtype, batch.device).view(-1, *trailing_ones)
    shift = constant_vector(shifts, dtype, batch.device).view(-1, *trailing_ones)
    return (batch * factor).add_(shift)


def affine_coefficients(
    transforms: Sequence[Rescale | Normalize], channel_count: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """a and b of x · a + b for the whole run, one of each for each channel."""
    factors = [1.0] * channel_count
    shifts = [0.0] * channel_count
    for transform in transforms:
        for channel, (factor, shift) in enumerate(transform.coefficients(channel_count)):
            factors[channel] = factors[channel] * factor
            shifts[channel] = shifts[channel] * factor + shift
    return tuple(factors), tuple(shifts)
