"""What decides the next step, in one structure. Its saved form is derived from its fields."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep.precision.loss_scale import ScaleState


@dataclass
class Cycle:
    """The open update cycle: gradients so far, their weight, and the buffers as they were when it began."""

    micro: int = 0
    grads: list[Tensor | None] = field(default_factory=list)
    weight: Tensor | None = None
    nominal: Tensor | None = None
    loss: Tensor | None = None
    buffers: list[Tensor] = field(default_factory=list)

    def close(self) -> None:
        """No open cycle; the buffers' storage is kept for the next."""
        self.micro, self.grads, self.weight, self.nominal, self.loss = 0, [], None, None, None


@dataclass
class StepState:
    """Counters, loss scale, averages and the open cycle, beside the network's and the optimizer's own state.

    `updates` is the schedule position, `streak` the skips in a row, `bad` the parameters whose gradients were
    non-finite at the last skip, `halted` the cycle at which nonfinite="raise" tripped and after which nothing may move,
    counted by the Update that ran it (0: none).
    """

    steps: int
    updates: Tensor
    skips: Tensor
    streak: Tensor
    scale: Tensor
    growth: Tensor
    halted: Tensor
    bad: Tensor
    ema: list[Tensor]
    residue: list[Tensor]
    cycle: Cycle = field(default_factory=Cycle)

    @classmethod
    def start(cls, device: torch.device, scale: ScaleState, parameters: int) -> "StepState":
        zero = torch.zeros((), dtype=torch.int64, device=device)
        bad = torch.zeros(parameters, dtype=torch.bool, device=device)
        updates, skips, streak = (zero.clone() for _ in range(3))
        return cls(0, updates, skips, streak, scale.scale, scale.growth, zero, bad, [], [])


def state_to_dict(state: Any) -> Any:
    """Plain dicts, lists, numbers and cloned tensors, field by field."""
    if is_dataclass(state) and not isinstance(state, type):
        return {f.name: state_to_dict(getattr(state, f.name)) for f in fields(state)}
    if isinstance(state, Tensor):
        return state.detach().clone()
    return [state_to_dict(v) for v in state] if isinstance(state, list) else state


def load_state(state: Any, saved: dict[str, Any], device: torch.device) -> None:
    """Puts every field of `saved` into `state`; a missing or unknown field is an error."""
    names = [f.name for f in fields(state)]
    if sorted(names) != sorted(saved):
        raise ValueError(
            f"step state: expected the fields {', '.join(names)}; received {', '.join(saved)}"
        )
    for name in names:
        mine, value = getattr(state, name), saved[name]
        if is_dataclass(mine):
            load_state(mine, value, device)
        else:
            setattr(state, name, _copy(value, device))


def _copy(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    return (
        [_copy(v, device) for v in value]
        if isinstance(value, Sequence) and not isinstance(value, str)
        else value
    )
