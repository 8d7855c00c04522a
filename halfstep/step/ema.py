"""An exponential moving average of the weights, moved by real updates only."""

from collections.abc import Sequence

import torch
from torch import Tensor


def start(params: Sequence[Tensor]) -> list[Tensor]:
    """The weights as they are, in float32 or wider."""
    return [p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True) for p in params]


def move_(average: list[Tensor], params: Sequence[Tensor], decay: float) -> None:
    """average ← decay · average + (1 − decay) · weights."""
    now = [p.detach().to(a.dtype) for a, p in zip(average, params, strict=True)]
    torch._foreach_lerp_(average, now, 1 - decay)
