"""An exponential moving average of the weights, moved by real updates only."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def start(params: Sequence[Tensor]) -> list[Tensor]:
    """The weights as they are, in float32 or wider."""
    return [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in params]


def move_(average: list[Tensor], params: Sequence[Tensor], decay: float) -> None:
    """average ← decay · average + (1 − decay) · weights."""
    now = [p.detach().to(a.dtype) for a, p in zip(average, params, strict=True)]
    torch._foreach_lerp_(average, now, 1 - decay)


@contextmanager
def instead_of(params: Sequence[Tensor], average: list[Tensor], room: list[Tensor]) -> Iterator[None]:
    """Inside, the parameters hold copies of the averages; afterwards their own storage again, untouched.

    `room` keeps the copies' storage from one time to the next: a captured evaluation finds it where it was.
    """
    kept = [p.data for p in params]
    if not room:
        room.extend(torch.empty_like(p, requires_grad=False) for p in params)
    for p, a, copy in zip(params, average, room, strict=True):
        p.data = copy.copy_(a)
    try:
        yield
    finally:
        for p, data in zip(params, kept, strict=True):
            p.data = data
