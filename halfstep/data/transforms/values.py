"""Transforms of values: where uint8 becomes float, and labels become targets."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from halfstep.data.transforms.axes import Layout, axes, check_layout, plain

Value = int | float


_KEPT: dict[
    tuple[tuple[Value, ...], torch.dtype, torch.device], Tensor
] = {}  # for good: captured graphs read them


def constant(values: tuple[Value, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """The values as a vector, copied to a device once; a graph that meets them before any other call fills its own."""
    if torch.compiler.is_compiling():
        return _filled(values, dtype, device)
    key = (values, dtype, device)
    if key not in _KEPT:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return _filled(values, dtype, device)  # not kept: the memory is the graph's
        with torch.inference_mode(False):  # an inference tensor could never meet autograd later
            return _KEPT.setdefault(
                key, torch.tensor(values, dtype=dtype, device=device)
            )  # waits: any stream may read
    return _KEPT[key]


def _filled(values: tuple[Value, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """By kernels alone: a capture refuses copies from the host."""
    return torch.stack([torch.full((), value, dtype=dtype, device=device) for value in values])


@dataclass(frozen=True)
class Rescale:
    """x · scale + shift in float32 (float64 stays float64), rounded after each of the two."""

    scale: float
    shift: float = 0.0
    draws: ClassVar[int] = 0
    channels: ClassVar[int] = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", plain(self.scale))
        object.__setattr__(self, "shift", plain(self.shift))
        if not (math.isfinite(self.scale) and math.isfinite(self.shift)):
            raise ValueError(
                f"Rescale: expected finite scale and shift, got {self.scale!r} and {self.shift!r}"
            )

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        return _floating(batch) * self.scale + self.shift

    def trailing(self, batch: Tensor) -> list[int]:
        return []

    def terms(self, channels: int) -> list[tuple[float, float]]:
        """(a, b) of x · a + b, for each channel."""
        return [(self.scale, self.shift)] * channels


@dataclass(frozen=True)
class Normalize:
    """(x − mean) / std in float32 (float64 stays float64), with one value per channel or one for all."""

    mean: float | Sequence[float]  # numpy's numbers and arrays too
    std: float | Sequence[float]
    layout: Layout | None = field(default=None, kw_only=True)
    draws: ClassVar[int] = 0

    def __post_init__(self) -> None:
        mean, std = _vector("mean", self.mean), _vector("std", self.std)
        if min(std) < torch.finfo(torch.float32).tiny:
            raise ValueError(
                f"Normalize: expected every std above 0 in float32, got {self.std!r}. A constant channel: 1."
            )
        if len(mean) != len(std) and 1 not in (len(mean), len(std)):
            raise ValueError(
                f"Normalize: expected as many means as stds, got {len(mean)} and {len(std)}"
            )
        object.__setattr__(self, "mean", mean)
        object.__setattr__(self, "std", std)
        check_layout("Normalize", self.layout)

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        x, trailing = _floating(batch), self.trailing(batch)
        # tensors, one value or many: CUDA divides by a plain number as it multiplies by the reciprocal, other bits
        mean, std = (
            constant(_vector("", v), x.dtype, x.device).view(-1, *trailing)
            for v in (self.mean, self.std)
        )
        return (x - mean) / std

    @property
    def channels(self) -> int:
        return max(len(_vector("", self.mean)), len(_vector("", self.std)))

    def terms(self, channels: int) -> list[tuple[float, float]]:
        """(a, b) of x · a + b, for each channel."""
        mean, std = (
            _vector("", v) * (1 if len(_vector("", v)) > 1 else channels)
            for v in (self.mean, self.std)
        )
        return [(1 / s, -m / s) for m, s in zip(mean, std, strict=True)]

    def trailing(self, batch: Tensor) -> list[int]:
        """Ones for the dimensions after the channel."""
        count = self.channels
        if count == 1 and self.layout is None:
            return []
        channel = axes("Normalize", batch, self.layout).channel
        channels = 1 if channel is None else batch.shape[channel]
        if count not in (1, channels):
            raise ValueError(
                f"Normalize: expected 1 mean and std or {channels}, one per channel of a batch of shape "
                f"{tuple(batch.shape)}, got {count}"
            )
        return [] if channel is None else [1] * (batch.dim() - 1 - channel)


@dataclass(frozen=True)
class Cast:
    """Another dtype, rounded to nearest; what float16 cannot hold becomes inf. To integers torch cuts towards zero, and
    a value out of their range has no defined result."""

    dtype: torch.dtype | str
    draws: ClassVar[int] = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _dtype("Cast", self.dtype))

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        return batch.to(_dtype("Cast", self.dtype))


@dataclass(frozen=True)
class OneHot:
    """Integer labels [B] as [B, classes]: `on` at the label, `off` elsewhere.

    Smoothing by s as MindSpore does it: on=1 − s, off=s / (classes − 1). A label outside 0..classes−1 is a ValueError
    on the CPU; a device cannot say so without a sync, and its row there is `off` throughout.
    """

    classes: int
    on: float = field(default=1.0, kw_only=True)
    off: float = field(default=0.0, kw_only=True)
    dtype: torch.dtype | str = field(default=torch.float32, kw_only=True)
    draws: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if not isinstance(self.classes, int) or self.classes < 1:
            raise ValueError(f"OneHot: expected classes of at least 1, got {self.classes!r}")
        object.__setattr__(self, "dtype", _dtype("OneHot", self.dtype))

    def __call__(self, batch: Tensor, words: Tensor) -> Tensor:
        if batch.is_floating_point() or batch.is_complex() or batch.dtype == torch.bool:
            raise TypeError(
                f"OneHot: expected integer labels, got {batch.dtype}. Put Cast('int64') before it."
            )
        if batch.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_range(batch)
        hot = batch.unsqueeze(-1).long() == torch.arange(self.classes, device=batch.device)
        cold = torch.full(
            hot.shape, self.off, dtype=_dtype("OneHot", self.dtype), device=batch.device
        )
        return cold.masked_fill(hot, self.on)

    def _check_range(self, labels: Tensor) -> None:
        labels = labels.long()  # a bound of 300 would wrap in uint8
        wrong = labels[(labels < 0) | (labels >= self.classes)]
        if wrong.numel():
            raise ValueError(
                f"OneHot: expected labels in 0..{self.classes - 1}, got {wrong[0].item()} "
                f"({wrong.numel()} of {labels.numel()} are outside). Count the classes again."
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


def _floating(batch: Tensor) -> Tensor:
    return batch.to(
        torch.promote_types(batch.dtype, torch.float32)
    )  # half sums of pixels would lose bits


def _vector(name: str, value: float | Sequence[float]) -> tuple[float, ...]:
    value = plain(value)
    values = tuple(map(plain, value)) if isinstance(value, Sequence) else (value,)
    if not values or not all(isinstance(v, Value) and math.isfinite(v) for v in values):
        raise ValueError(
            f"Normalize: expected {name} as a finite number or one per channel, got {value!r}"
        )
    return values


def _dtype(name: str, dtype: Any) -> torch.dtype:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype):
        raise ValueError(
            f"{name}: expected a torch dtype or its name, for instance 'float32', got {dtype!r}"
        )
    return found
