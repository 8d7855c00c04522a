"""Schedules that do what was asked for, and perhaps not what was meant."""

from collections.abc import Mapping
from typing import Any

from torch.optim.lr_scheduler import LRScheduler

from halfstep.model.schedule_unit import LENGTH_SETTINGS, Unit
from halfstep.schedules import resolve
from halfstep.schedules.group_schedules import is_one_per_group
from halfstep.step import TrainStep


def suspicious_schedule(
    schedule: Any, unit: Unit, step: TrainStep, epochs: int, updates: int | None
) -> str:
    """A warning for a scheduler that counts epochs, or one schedule for groups of several rates.

    An empty text where nothing is suspicious.
    """
    if not isinstance(schedule, LRScheduler):
        return _one_for_all_groups(schedule, step)
    if unit == "update" and updates is not None:
        return _counts_epochs(schedule, epochs, updates)
    return ""


def _counts_epochs(scheduler: LRScheduler, epochs: int, updates: int) -> str:
    length = _scheduler_length(scheduler)
    if not length or length > epochs or updates <= epochs:
        return ""
    updates_per_epoch = -(-updates // epochs)
    return (
        f"{type(scheduler).__name__} is moved once per update, and what it was built for is over "
        f"after {length} of the {updates} updates of this fit, as if it counted epochs. "
        f"By updates: {_stretched(scheduler, updates_per_epoch)}. "
        "To move it once per epoch: Model(schedule_every='epoch')"
    )


def _scheduler_length(scheduler: Any) -> int:
    """The calls of step() that a scheduler was built for; 0 for one that does not say."""
    parts = getattr(scheduler, "_schedulers", None)
    if parts:
        milestones = getattr(scheduler, "_milestones", None)
        if not milestones:  # all at once
            return max(map(_scheduler_length, parts))
        # One after the other.
        last_length = _scheduler_length(parts[-1])
        return milestones[-1] + last_length if last_length else 0

    setting = _length_setting(scheduler)
    if setting is None:
        return 0
    value = getattr(scheduler, setting)
    if hasattr(value, "__iter__"):
        value = max(value, default=0)
    return int(value)


def _stretched(scheduler: Any, factor: int) -> str:
    """The code that builds the scheduler for `factor` times as many calls."""
    name = type(scheduler).__name__
    parts = getattr(scheduler, "_schedulers", None)
    if parts:
        code = f"[{', '.join(_stretched(part, factor) for part in parts)}]"
        milestones = getattr(scheduler, "_milestones", None)
        if not milestones:
            return f"{name}({code})"
        stretched_milestones = [milestone * factor for milestone in milestones]
        return f"{name}(optimizer, {code}, milestones={stretched_milestones})"

    setting = _length_setting(scheduler)
    if setting is None:
        return f"{name}(optimizer, …)"
    value = getattr(scheduler, setting)
    if hasattr(value, "__iter__"):
        stretched: Any = [milestone * factor for milestone in sorted(value)]
    else:
        stretched = value * factor
    return f"{name}(optimizer, {setting}={stretched}, …)"


def _length_setting(scheduler: Any) -> str | None:
    for setting in LENGTH_SETTINGS:
        if hasattr(scheduler, setting):
            return setting
    return None


def _one_for_all_groups(schedule: Any, step: TrainStep) -> str:
    rates = [float(group["lr"]) for group in step.optimizer.param_groups]
    have_one_rate = len(set(rates)) < 2
    if have_one_rate or isinstance(schedule, Mapping) or is_one_per_group(schedule):
        return ""
    shared = resolve(schedule, step.optimizer)[0]
    code = "…"
    if "lr" in dict(shared.settings):
        code = f"{shared.name}({{:g}}, …)"
    by_group = ", ".join(f"{i}: {code.format(rate)}" for i, rate in enumerate(rates))
    rate_list = ", ".join(f"{rate:g}" for rate in rates)
    return (
        f"expected one per parameter group, as their rates are {rate_list}, received {shared} "
        f"for all: every group gets its rates. One per group: schedule={{{by_group}}}"
    )
