"""torch's schedulers as tables: run ahead on a stand-in, so that the user's own objects stay as they are."""

import copy
import warnings
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR, ReduceLROnPlateau

from halfstep.schedules.formulas import per_epoch, sequence
from halfstep.schedules.schedule import Schedule, whole_of


def from_torch(scheduler: LRScheduler, updates: int, *, every: int = 1) -> list[Schedule]:
    """One table per parameter group: the rates of the next `updates` updates, bit for bit those of scheduler.step().

    `every` is how many updates pass between two step() calls: the updates of an epoch for a scheduler stepped per
    epoch. Update 0 has the rate the scheduler stands at.
    """
    refuse_feedback(scheduler)
    each = whole_of(every, "from_torch: every", least=1)
    count = -(-whole_of(updates, "from_torch: updates", least=1) // each)
    _check_end(scheduler, count)
    rows = _roll(twin(scheduler), count)
    schedules = [sequence(row, name=type(scheduler).__name__) for row in rows]
    return schedules if each == 1 else [per_epoch(s, each) for s in schedules]


def has_moved(scheduler: Any) -> bool:
    """Whether step() was called since it was built, or it was built or loaded in the middle of a run."""
    inner = getattr(scheduler, "_schedulers", ())
    return getattr(scheduler, "last_epoch", 0) > 0 or any(has_moved(s) for s in inner)


def end_of(scheduler: Any) -> int | None:
    """The updates that a OneCycleLR was built for: its step() refuses more. The others go on for ever."""
    return scheduler.total_steps if isinstance(scheduler, OneCycleLR) else None


def refuse_feedback(scheduler: Any) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ValueError(
            "schedule: ReduceLROnPlateau follows a measured value, so it is no table of rates by update; "
            "give the callback hs.ReduceLROnPlateau to fit() instead"
        )
    if not isinstance(scheduler, LRScheduler):
        expected = "a scheduler of torch.optim.lr_scheduler"
        raise TypeError(f"from_torch: expected {expected}, received {type(scheduler).__name__}")


def twin(scheduler: LRScheduler) -> LRScheduler:
    """A copy of the scheduler on a stand-in for its optimizer; parameters are shared and never written."""
    optimizer = scheduler.optimizer
    _check_rates(scheduler)
    stand_in = object.__new__(type(optimizer))
    groups = [
        {k: v if k == "params" else copy.deepcopy(v) for k, v in g.items()}
        for g in optimizer.param_groups
    ]
    vars(stand_in).update(
        {**vars(optimizer), "param_groups": groups, "state": {}, "step": lambda: None}
    )
    if (
        stand_in.param_groups is not groups
    ):  # a wrapper whose groups are another optimizer's: those would be moved
        raise _no_table(scheduler, f"its optimizer {type(optimizer).__name__} wraps another one")
    memo: dict[int, Any] = {id(p): p for g in groups for p in g["params"]}
    try:
        return copy.deepcopy(scheduler, {**memo, id(optimizer): stand_in})
    except Exception as error:
        raise _no_table(scheduler, f"it cannot be copied ({error})") from error


def _check_end(scheduler: LRScheduler, count: int) -> None:
    end = end_of(scheduler)
    if (
        end is not None and (over := scheduler.last_epoch) + count > end + 1
    ):  # torch forgives one step() more
        past = f", {over} of which are over," if over else ""
        raise ValueError(
            f"schedule: {type(scheduler).__name__} was built for {end} updates{past} and {count} are asked for; build "
            f"it with total_steps={over + count}"
        )


def _check_rates(scheduler: LRScheduler) -> None:
    """The rates in the optimizer must be those the scheduler left there: many schedulers multiply what they find."""
    last = getattr(scheduler, "_last_lr", None)
    found = [float(g["lr"]) for g in scheduler.optimizer.param_groups]
    if last is not None and [float(v) for v in last] != found:
        raise ValueError(
            f"schedule: expected the optimizer's rates as {type(scheduler).__name__} left them, "
            f"{[float(v) for v in last]}, received {found}; build the optimizer and its scheduler anew"
        )


def _roll(rolled: LRScheduler, count: int) -> list[list[float]]:
    groups = rolled.optimizer.param_groups
    before = [copy.deepcopy(_others(g)) for g in groups]
    rows: list[list[float]] = [[float(g["lr"])] for g in groups]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's remark that no optimizer.step() came first
        for update in range(1, count):
            _advance(rolled, update)
            for row, group in zip(rows, groups, strict=True):
                row.append(float(group["lr"]))
            _refuse_other_changes(rolled, before, groups)
    return rows


def _advance(rolled: LRScheduler, update: int) -> None:
    try:
        rolled.step()
    except Exception as error:
        raise _no_table(
            rolled, f"its step() number {update} raised {type(error).__name__}: {error}"
        ) from error


def _refuse_other_changes(
    rolled: LRScheduler, before: list[dict[str, Any]], groups: list[dict[str, Any]]
) -> None:
    """A table holds learning rates only; a momentum that cycles with them would be lost without a word."""
    for old, group in zip(before, groups, strict=True):
        changed = [k for k, v in _others(group).items() if k not in old or not _same(old[k], v)]
        if changed:
            raise ValueError(
                f"schedule: {type(rolled).__name__} changes {', '.join(changed)} besides the learning rate, which a "
                "table of rates cannot do; build the optimizer anew, and the scheduler with cycle_momentum=False or "
                "without what changes it"
            )


def _others(group: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in group.items() if k not in ("params", "lr")}


def _same(a: Any, b: Any) -> bool:
    return a.equal(b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def _no_table(scheduler: LRScheduler, why: str) -> ValueError:
    return ValueError(
        f"schedule: {type(scheduler).__name__} cannot be run ahead into a table: {why}; "
        "give a list of rates or a function update -> rate instead"
    )
