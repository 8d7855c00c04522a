"""Neighbouring Rescale and Normalize as one multiplication and one addition."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep.data.transforms.values import Normalize, Rescale, constant


def linear(transforms: Sequence[Any]) -> int:
    """How many at the start are Rescale or Normalize; a class made from one of them may compute something else."""
    count = 0
    while count < len(transforms) and type(transforms[count]) in (Rescale, Normalize):
        count += 1
    return count


def affine(parts: Sequence[Rescale | Normalize], batch: Tensor) -> Tensor:
    """x · a + b, rounded after each of the two; a and b are made of the parts in float64.

    Two passes over the memory in all; off from one part after the other by a few roundings.
    """
    channels = 1
    trailing: list[int] = []
    for part in parts:
        here = part.trailing(batch)  # checks the channels too
        if part.channels > channels or len(here) > len(trailing):
            channels, trailing = max(part.channels, channels), here
    dtype = torch.promote_types(batch.dtype, torch.float32)
    scale, shift = (
        constant(v, dtype, batch.device).view(-1, *trailing) for v in terms(parts, channels)
    )
    return (batch * scale).add_(shift)


def terms(
    parts: Sequence[Rescale | Normalize], channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """a and b, one for each channel."""
    a, b = [1.0] * channels, [0.0] * channels
    for part in parts:
        for i, (factor, shift) in enumerate(part.terms(channels)):
            a[i], b[i] = a[i] * factor, b[i] * factor + shift
    return tuple(a), tuple(b)
