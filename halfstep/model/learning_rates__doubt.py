"""Schedules that do what was asked for, and perhaps not what was meant, in words."""

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from halfstep.schedules import resolve
from halfstep.schedules.resolve import is_one_per_group
from halfstep.step import TrainStep

_LENGTHS = (
    "T_max",
    "total_iters",
    "step_size",
    "T_0",
    "milestones",
)  # as torch's schedulers call their own length


def doubt(schedule: Any, step: TrainStep, epochs: int, count: int) -> str:
    """A scheduler that counts epochs, or one schedule for groups of different rates, in words."""
    return (
        _by_epochs(schedule, epochs, count)
        if isinstance(schedule, LRScheduler)
        else _alike(schedule, step)
    )


def _by_epochs(scheduler: LRScheduler, epochs: int, count: int) -> str:
    length, name = _length(scheduler), type(scheduler).__name__
    if not length or length > epochs or count <= epochs:
        return ""
    each = -(-count // epochs)
    return (
        f"{name} is moved once per update, and what it was built for is over after {length} of the {count} updates of "
        f"this fit, as if it counted epochs. By updates: {_longer(scheduler, each)}. To hold each rate for an epoch: "
        f"schedule=hs.schedules.from_torch(scheduler, {count}, every={each})"
    )


def _length(scheduler: Any) -> int:
    """The calls of step() that a scheduler was built for; 0 for one that does not say."""
    inner = getattr(scheduler, "_schedulers", None)
    if inner:
        before = getattr(scheduler, "_milestones", None)  # one after the other, or all at once
        last = _length(inner[-1])
        return before[-1] + last if before and last else 0 if before else max(map(_length, inner))
    found = next((getattr(scheduler, name) for name in _LENGTHS if hasattr(scheduler, name)), 0)
    return int(max(found, default=0) if hasattr(found, "__iter__") else found)


def _longer(scheduler: Any, each: int) -> str:
    """How to build it for `each` times the updates."""
    name, inner = type(scheduler).__name__, getattr(scheduler, "_schedulers", None)
    if inner:
        parts = f"[{', '.join(_longer(s, each) for s in inner)}]"
        ends = getattr(scheduler, "_milestones", None)
        return (
            f"{name}(optimizer, {parts}, milestones={[m * each for m in ends]})"
            if ends
            else f"{name}({parts})"
        )
    key = next((key for key in _LENGTHS if hasattr(scheduler, key)), None)
    if key is None:
        return f"{name}(optimizer, …)"
    found = getattr(scheduler, key)
    longer = [m * each for m in sorted(found)] if hasattr(found, "__iter__") else found * each
    return f"{name}(optimizer, {key}={longer}, …)"


def _alike(schedule: Any, step: TrainStep) -> str:
    rates = [float(group["lr"]) for group in step.optimizer.param_groups]
    if len(set(rates)) < 2 or isinstance(schedule, Mapping) or is_one_per_group(schedule):
        return ""
    one = resolve(schedule, step.optimizer)[0]
    maker = f"{one.name}({{:g}}, …)" if "lr" in dict(one.settings) else "…"
    own = ", ".join(f"{i}: {maker.format(rate)}" for i, rate in enumerate(rates))
    return (
        f"expected one per parameter group, as their rates are {', '.join(f'{rate:g}' for rate in rates)}, received "
        f"{one} for all: every group gets its rates. One per group: schedule={{{own}}}"
    )
