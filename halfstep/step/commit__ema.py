"""The exponential moving average of the weights (EMA). Only committed updates move it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor


def start(params: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the weights, in float32 or wider: a 16-bit average would not move."""
    dtypes = [torch.promote_types(p.dtype, torch.float32) for p in params]
    return [p.detach().to(dtype, copy=True) for p, dtype in zip(params, dtypes, strict=True)]


def update_(averages: list[Tensor], params: Sequence[Tensor], decay: float) -> None:
    """average ← decay · average + (1 − decay) · weight, in place."""
    weights = [p.detach().to(a.dtype) for a, p in zip(averages, params, strict=True)]
    torch._foreach_lerp_(averages, weights, 1 - decay)


@contextmanager
def averages_as_weights(
    params: Sequence[Tensor], averages: list[Tensor], storage: list[Tensor]
) -> Iterator[None]:
    """Inside, the parameters hold copies of the averages; afterwards their own memory again.

    `storage` is filled on first use and holds the copies: a captured evaluation finds them at the
    same address every time.
    """
    own_data = [p.data for p in params]
    if not storage:
        storage.extend(torch.empty_like(p, requires_grad=False) for p in params)
    for p, average, copy in zip(params, averages, storage, strict=True):
        p.data = copy.copy_(average)
    try:
        yield
    finally:
        for p, data in zip(params, own_data, strict=True):
            p.data = data
