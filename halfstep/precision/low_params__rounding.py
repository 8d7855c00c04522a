"""Storing an fp32 update in low parameters without losing it: stochastic rounding, or a Kahan residue beside each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from halfstep.precision.policy import BF16, F16


def stochastic(x: Tensor, dtype: torch.dtype, key: Tensor) -> Tensor:
    """float32 → fp16/bf16, up or down with probabilities that make the mean exact; a low value never moves.

    The draws are an integer hash of (key, element), so that they repeat on any device and leave torch's RNG alone.
    """
    drop = 13 if dtype == F16 else 16  # mantissa bits that the low dtype does not have
    noise = _hash32(x.numel(), key).view(x.shape) & ((1 << drop) - 1)
    up = ((x.contiguous().view(torch.int32) + noise) >> drop << drop).view(torch.float32)
    if dtype == F16:  # below 2**-14 float16 steps by 2**-24 whatever the exponent
        steps = (x.abs() * 2.0**24 + noise * 2.0**-drop).floor()
        up = torch.where(x.abs() < 2.0**-14, torch.copysign(steps * 2.0**-24, x), up)
    low = torch.where(x.isfinite(), up, x).to(dtype)
    return torch.where(
        low.isinf(), x.to(dtype), low
    )  # at the top of the range: what nearest keeps finite stays so


def _hash32(n: int, key: Tensor) -> Tensor:
    """n well-mixed 32-bit integers (lowbias32 on a counter); int32 arithmetic wraps, alike on host and device."""
    h = torch.arange(n, dtype=torch.int32, device=key.device) * -1640531527 + key
    for shift, factor in ((16, 0x7FEB352D), (15, -2073254261)):  # 0x846CA68B as int32
        h = (h ^ (h >> shift & (1 << (32 - shift)) - 1)) * factor
    return h ^ (h >> 16 & 0xFFFF)


def key_for(update: Tensor, index: int) -> Tensor:
    """One int32 key per (update, parameter)."""
    return ((update * 0x9E3779B1 + index * 0x85EBCA77) & 0x7FFFFFFF).to(torch.int32)


class Widened:
    """Low parameters as fp32 while the optimizer steps, so that its arithmetic and its state are fp32.

    Kahan keeps what rounding cut off (the residue, in the low dtype) and adds it back at the next update.
    """

    def __init__(self, params: Sequence[Tensor], rounding: str) -> None:
        self.params, self.kahan = [p for p in params if p.dtype in (F16, BF16)], rounding == "kahan"

    def residue(self) -> list[Tensor]:
        """A zero residue for each low parameter, when the rounding needs one."""
        return [torch.zeros_like(p, requires_grad=False) for p in self.params] if self.kahan else []

    @contextmanager
    def wide(self, residue: list[Tensor], update: Tensor) -> Iterator[None]:
        """fp32 parameters inside; on leaving, rounded into the low storage they had before."""
        stored = [p.data for p in self.params]
        for i, p in enumerate(self.params):
            p.data = p.data.float().add_(residue[i]) if self.kahan else p.data.float()
        try:
            yield
            for i, (p, low) in enumerate(zip(self.params, stored, strict=True)):
                low.copy_(
                    p.data if self.kahan else stochastic(p.data, low.dtype, key_for(update, i))
                )
                if self.kahan:
                    residue[i].copy_(p.data.sub_(low))
        finally:
            for p, low in zip(self.params, stored, strict=True):
                p.data, p.grad = low, None

    @contextmanager
    def as_wide(self) -> Iterator[None]:
        """fp32 parameters inside, the stored ones untouched: for loading optimizer state without rounding it."""
        stored = [p.data for p in self.params]
        for p in self.params:
            p.data = p.data.float()
        try:
            yield
        finally:
            for p, low in zip(self.params, stored, strict=True):
                p.data = low
