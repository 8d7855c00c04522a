"""What a regression is measured by: the mean absolute error, and R²."""

from typing import Any, Self

import torch
from torch import Tensor

from halfstep.metrics.counters import Ratio

COUNTERS = 4  # values, their sum, their squares, squared errors


class MeanAbsoluteError(Ratio):
    """The mean of |output − target|, times `scale`: the unit of targets that were divided by it."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__(torch.float64)
        self.scale = scale

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Adds a batch of outputs and targets of one shape."""
        errors = _errors("MeanAbsoluteError", outputs, targets)
        self._add(errors.abs().sum() * self.scale, errors.numel())


class R2Score:
    """1 − Σ (target − output)² / Σ (target − mean)²: 1 is perfect, 0 is the mean itself.

    The sums are float64, over all updates. NaN for fewer than two
    targets, −inf or NaN where all targets are equal.
    """

    def __init__(self) -> None:
        self.sums = torch.zeros(COUNTERS, dtype=torch.float64)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Adds a batch of outputs and targets of one shape."""
        errors = _errors("R2Score", outputs, targets)
        values = targets.detach().double()
        batch = [
            torch.full((), values.numel(), dtype=torch.float64, device=values.device),
            values.sum(),
            values.square().sum(),
            errors.square().sum(),
        ]
        self.sums = self.sums.to(values.device) + torch.stack(batch)

    def compute(self) -> Tensor:
        """The score so far, a float64 tensor on the device."""
        count, total, squares, squared_errors = self.sums
        around_mean = squares - total.square() / count
        score = 1 - squared_errors / around_mean
        return torch.where(count > 1, score, torch.nan)

    def reset(self) -> None:
        """Sets the sums to zero."""
        self.sums = torch.zeros_like(self.sums)

    def merge(self, other: Self) -> None:
        """Adds what another has seen."""
        self.sums = self.sums + other.sums.to(self.sums.device)

    def to(self, device: torch.device | str) -> Self:
        """Moves the sums."""
        self.sums = self.sums.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """A copy of the sums."""
        return {"sums": self.sums.clone()}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restores saved sums."""
        sums = saved.get("sums")
        if not isinstance(sums, Tensor) or sums.shape != (COUNTERS,):
            raise ValueError(f"R2Score: expected {COUNTERS} sums, received {sums!r}")
        self.sums = sums.to(self.sums)


def _errors(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.shape != targets.shape:
        raise ValueError(
            f"{name}: expected outputs and targets of one shape, received {tuple(outputs.shape)} "
            f"and {tuple(targets.shape)}; give targets [N, 1] for a network with one output"
        )
    return outputs.detach().double() - targets.detach().double()
