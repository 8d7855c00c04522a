"""torch's schedulers as tables of rates.

A scheduler is copied, on a stand-in for its optimizer, and the copy is stepped to its end: the
user's own objects stay as they are.
"""

import copy
import warnings
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from halfstep.schedules.formulas import per_epoch, sequence
from halfstep.schedules.schedule import Schedule, check_updates

# Of halfstep's one_cycle, and of torch's OneCycleLR by other names.
ONE_CYCLE_DEFAULTS = {"rise": 0.3, "div": 25.0, "final_div": 1e4}


def from_torch(scheduler: LRScheduler, updates: int, *, every: int = 1) -> list[Schedule]:
    """One table per parameter group: the rates of the next `updates` updates, bit for bit.

    `every` is how many updates pass between two calls of scheduler.step(): the updates of an epoch
    for a scheduler that is stepped once per epoch. Update 0 has the rate the scheduler stands at.
    """
    check_is_table(scheduler)
    every = check_updates("from_torch: every", every, minimum=1)
    updates = check_updates("from_torch: updates", updates, minimum=1)
    rate_count = -(-updates // every)  # rounded up
    _check_end(scheduler, rate_count)

    rates = _run_ahead(copy_scheduler(scheduler), rate_count)
    name = type(scheduler).__name__
    schedules = [sequence(group_rates, name=name) for group_rates in rates]
    if every == 1:
        return schedules
    return [per_epoch(schedule, every) for schedule in schedules]


def has_moved(scheduler: Any) -> bool:
    """Whether step() was called, or the scheduler was built or loaded in the middle of a run."""
    if getattr(scheduler, "last_epoch", 0) > 0:
        return True
    inner_schedulers = getattr(scheduler, "_schedulers", ())
    return any(has_moved(inner) for inner in inner_schedulers)


def last_update(scheduler: Any) -> int | None:
    """How many updates a OneCycleLR was built for: its step() refuses more. Others never end."""
    return scheduler.total_steps if isinstance(scheduler, OneCycleLR) else None


def check_is_table(scheduler: Any) -> None:
    """Raises an error unless this is a scheduler of torch that depends on nothing but its steps."""
    if isinstance(scheduler, ReduceLROnPlateau):
        code = f"hs.ReduceLROnPlateau('loss', {scheduler.factor:g}, {scheduler.patience})"
        raise ValueError(
            "schedule: ReduceLROnPlateau follows a measured value, so it is no table of rates by "
            f"update; give the callback to fit() instead: fit(…, callbacks=[{code}])"
        )
    for part in getattr(scheduler, "_schedulers", ()):
        check_is_table(part)
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(
            "from_torch: expected a scheduler of torch.optim.lr_scheduler, "
            f"received {type(scheduler).__name__}"
        )


def copy_scheduler(scheduler: LRScheduler) -> LRScheduler:
    """A copy of the scheduler on a stand-in for its optimizer.

    The stand-in has copies of the groups' settings, no state, and a step() that does nothing.
    Parameters are shared and never written.
    """
    optimizer = scheduler.optimizer
    _check_rates(scheduler)

    groups = []
    for group in optimizer.param_groups:
        settings = {name: copy.deepcopy(v) for name, v in group.items() if name != "params"}
        groups.append({"params": group["params"], **settings})
    stand_in = object.__new__(type(optimizer))
    replaced = {"param_groups": groups, "state": {}, "step": lambda: None}
    vars(stand_in).update({**vars(optimizer), **replaced})
    if stand_in.param_groups is not groups:
        # A wrapper with the groups of another optimizer: the copy would move those.
        raise _no_table(scheduler, f"its optimizer {type(optimizer).__name__} wraps another one")

    # What a deep copy shall take instead of copying: parameters as they are, and the stand-in.
    memo: dict[int, Any] = {id(p): p for group in groups for p in group["params"]}
    memo[id(optimizer)] = stand_in
    try:
        return copy.deepcopy(scheduler, memo)
    except Exception as error:
        raise _no_table(scheduler, f"it cannot be copied ({error})") from error


def _check_end(scheduler: LRScheduler, rate_count: int) -> None:
    end = last_update(scheduler)
    if end is None:
        return
    done = scheduler.last_epoch
    if done + rate_count > end + 1:  # torch forgives one step() more
        position = f", {done} of which are over," if done else ""
        raise ValueError(
            f"schedule: {type(scheduler).__name__} was built for {end} updates{position} and "
            f"{rate_count} are asked for; build it with total_steps={done + rate_count}"
        )


def _check_rates(scheduler: LRScheduler) -> None:
    """The optimizer's rates must be as the scheduler left them: many multiply what they find."""
    last_rates = getattr(scheduler, "_last_lr", None)
    if last_rates is None:
        return
    expected = [float(rate) for rate in last_rates]
    received = [float(group["lr"]) for group in scheduler.optimizer.param_groups]
    if received != expected:
        raise ValueError(
            f"schedule: expected the optimizer's rates as {type(scheduler).__name__} left them, "
            f"{expected}, received {received}; build the optimizer and its scheduler anew"
        )


def _run_ahead(scheduler: LRScheduler, rate_count: int) -> list[list[float]]:
    """The rates of each parameter group, by stepping the scheduler."""
    groups = scheduler.optimizer.param_groups
    settings_before = [copy.deepcopy(_other_settings(group)) for group in groups]
    rates = [[float(group["lr"])] for group in groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that no optimizer.step() came first
        for update in range(1, rate_count):
            try:
                scheduler.step()
            except Exception as error:
                reason = f"its step() number {update} raised {type(error).__name__}: {error}"
                raise _no_table(scheduler, reason) from error
            for group_rates, group in zip(rates, groups, strict=True):
                group_rates.append(float(group["lr"]))
            _check_other_settings(scheduler, settings_before)
    return rates


def _check_other_settings(scheduler: LRScheduler, settings_before: list[dict[str, Any]]) -> None:
    """A table holds learning rates only: a momentum that moves with them would be lost."""
    for before, group in zip(settings_before, scheduler.optimizer.param_groups, strict=True):
        changed = []
        for name, value in _other_settings(group).items():
            if name not in before or not _is_equal(before[name], value):
                changed.append(name)
        if changed:
            raise ValueError(
                f"schedule: {type(scheduler).__name__} changes {', '.join(changed)} besides the "
                "learning rate, which a table of rates cannot do; build the optimizer anew (the "
                f"scheduler has changed it), and {_rates_alone(scheduler)}"
            )


def _rates_alone(scheduler: LRScheduler) -> str:
    """What gives the rates of a scheduler that changes other settings too."""
    parts = getattr(scheduler, "_schedulers", None) or [scheduler]
    cycling = [part for part in parts if getattr(part, "cycle_momentum", False)]
    if not cycling:
        return "the scheduler without what changes it"
    name = type(cycling[0]).__name__
    without_momentum = f"build {name}(…, cycle_momentum=False)"
    formula = _one_cycle_formula(scheduler)
    if formula is None:
        return without_momentum
    return f"give schedule={formula}, or {without_momentum}"


def _one_cycle_formula(scheduler: LRScheduler) -> str | None:
    """The call of hs.schedules.one_cycle that has the rates of a OneCycleLR; None where none has.

    It has two phases, and one rate at the top for all parameter groups.
    """
    if not isinstance(scheduler, OneCycleLR) or len(scheduler._schedule_phases) != 2:
        return None
    group = scheduler.optimizer.param_groups[0]
    if any(other["max_lr"] != group["max_lr"] for other in scheduler.optimizer.param_groups):
        return None
    settings = {
        "rise": (scheduler._schedule_phases[0]["end_step"] + 1) / scheduler.total_steps,
        "div": group["max_lr"] / group["initial_lr"],
        "final_div": group["initial_lr"] / group["min_lr"],
    }
    arguments = [f"{group['max_lr']:.12g}", str(scheduler.total_steps)]
    for name, default in ONE_CYCLE_DEFAULTS.items():
        text = f"{settings[name]:.12g}"  # the digits that a division and its inverse leave
        if float(text) != default:
            arguments.append(f"{name}={text}")
    if scheduler._anneal_func_type == "linear":
        arguments.append("shape='linear'")
    return f"hs.schedules.one_cycle({', '.join(arguments)})"


def _other_settings(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group except its learning rate."""
    return {name: value for name, value in group.items() if name not in ("params", "lr")}


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.equal(b)
    return bool(a == b)


def _no_table(scheduler: LRScheduler, reason: str) -> ValueError:
    return ValueError(
        f"schedule: {type(scheduler).__name__} cannot be run ahead into a table: {reason}; "
        "give a list of rates or a function update -> rate instead"
    )
