"""A model's schedule as the table of one fit. Each fit begins a schedule anew, but one of torch's goes on."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from halfstep.engine import Feed, Timing
from halfstep.errors import Notice
from halfstep.model.learning_rates__doubt import doubt
from halfstep.schedules import Schedule, from_torch, resolve, tables
from halfstep.schedules.resolve import check_scheduler
from halfstep.schedules.torch_schedulers import copy_scheduler, has_moved, last_update
from halfstep.step import TrainStep


class Tables:
    """The learning rates of every fit of a model. torch's scheduler stands, at update n of the fits with it, where
    n calls of its step() would have brought it: as in a loop, whatever was stopped early or resumed."""

    def __init__(self) -> None:
        self._scheduler: LRScheduler | None = None
        self._start: LRScheduler | None = (
            None  # as it stood before the first fit moved the optimizer's rates
        )
        self._first = 0  # updates that were over then
        self._asked = (0, 0)  # updates of the newest table, and of the fits before it
        self._short: ValueError | None = None

    def __call__(
        self, schedule: Any, step: TrainStep, timing: Timing, feed: Feed, saved: Mapping[str, Any] | None, done: int
    ) -> Tensor | None:  # fmt: skip
        """[groups, updates] for a fit that begins after `done` updates, or for the one that `saved` was made in, behind
        columns for those that are over; None where nothing is to be set."""
        if schedule is None:
            return None
        if saved is not None:
            return self._again(schedule, step, timing, feed, saved)
        count = updates(timing, feed.size, step.options.accumulate)
        if count is None:
            raise ValueError(
                "schedule: the data does not say how long it is; give fit(steps_per_epoch=…)"
            )
        new, text = schedule is not self._scheduler, doubt(schedule, step, timing.epochs, count)
        table = self._at_most(schedule, step, count, done)
        if new and text:
            warnings.warn(f"schedule: {text}", Notice, stacklevel=5)
        return table

    def _at_most(self, schedule: Any, step: TrainStep, count: int, done: int) -> Tensor:
        """Where a schedule has fewer updates, all it has: `check` refuses it, unless a checkpoint needs no more."""
        self._asked, self._short = (count, done), None
        try:
            return self._table(schedule, step, count, done)
        except ValueError as error:
            fewer = self._length(schedule, step, done)
            if fewer is None or not 0 < fewer < count:
                raise
            self._short = error
            return self._table(schedule, step, fewer, done)

    def check(self) -> None:
        """Refuses a schedule that ends before the fit does."""
        if self._short is not None:
            raise self._short

    def _again(
        self, schedule: Any, step: TrainStep, timing: Timing, feed: Feed, saved: Mapping[str, Any]
    ) -> Tensor | None:  # fmt: skip
        """None where the newest table will do; more updates than there are do no harm."""
        count, began = (
            going_on(saved, timing, feed, step.options.accumulate),
            saved["config"].get("began", 0),
        )
        assert count is not None  # a new fit would have been refused
        if self._short is None and self._asked[1] == began and self._asked[0] >= count:
            return None
        self._asked, self._short = (count, began), None
        return self._table(schedule, step, count, began)

    def _table(self, schedule: Any, step: TrainStep, count: int, done: int) -> Tensor:
        if isinstance(schedule, LRScheduler):
            return self._going_on(schedule, step, count, done)
        return _behind(resolve(schedule, step.optimizer, count), count, done)

    def _length(self, schedule: Any, step: TrainStep, done: int) -> int | None:
        """How many updates a schedule has rates for; None for one without an end."""
        if not isinstance(schedule, LRScheduler):
            return min(
                (s.length for s in resolve(schedule, step.optimizer) if s.length is not None),
                default=None,
            )
        end = last_update(schedule)
        past = max(done - self._first, 0) if schedule is self._scheduler else 0
        return None if end is None else end - past

    def _going_on(self, scheduler: LRScheduler, step: TrainStep, count: int, done: int) -> Tensor:
        start, first = self._start, self._first
        if scheduler is not self._scheduler:
            check_scheduler(scheduler, step.optimizer)
            start, first = copy_scheduler(scheduler), done
        else:
            _check_still(scheduler, step)
        assert start is not None
        past = max(done - first, 0)
        _check_end(scheduler, past, count)
        table = _behind(from_torch(start, past + count), past + count, done - past)
        self._scheduler, self._start, self._first = scheduler, start, first
        return table


def _behind(schedules: list[Schedule], count: int, done: int) -> Tensor:
    table = tables(schedules, count)
    return torch.cat([table[:, :1].expand(-1, done), table], dim=1)


def _check_still(scheduler: LRScheduler, step: TrainStep) -> None:
    """What a fit left is what the next goes on from: nobody stepped the scheduler or wrote into the rates between."""
    name = type(scheduler).__name__
    if has_moved(scheduler):
        raise ValueError(
            f"schedule: {name} was stepped by hand between two fits; fit moves it by itself, once an update. Leave out "
            f"scheduler.step(), or give the next fit a new one: model.schedule = {name}(optimizer, …)"
        )
    found, table = (
        [float(group["lr"]) for group in step.optimizer.param_groups],
        step.learning_rates.table,
    )
    assert table is not None
    at = min(
        int(step.state.updates), table.shape[1]
    )  # a skipped step has the rate of the update to come
    if found not in (left := table[:, max(at - 1, 0) : at + 1].t().tolist()):
        raise ValueError(
            f"schedule: expected the optimizer's rates as the last fit left them, {left[0]}, received {found}; give "
            f"the next fit a scheduler that begins there: model.schedule = {name}(optimizer, …)"
        )


def _check_end(scheduler: LRScheduler, past: int, count: int) -> None:
    end, name = last_update(scheduler), type(scheduler).__name__
    if past and end is not None and past + count > end + 1:
        raise ValueError(
            f"schedule: {name} was built for {end} updates; the fits before made {past} and this one has {count}. "
            f"Build it with total_steps={past + count} at first, or give this fit one of its own: model.schedule = "
            f"{name}(optimizer, …, total_steps={count})"
        )


def updates(timing: Timing, size: int | None, accumulate: int) -> int | None:
    """Updates in the whole run, at most: each pass over the data flushes its tail. None when nobody knows."""
    each = timing.epoch_steps or size
    return None if each is None else _spread(timing.epochs * each, size, accumulate)


def going_on(saved: Mapping[str, Any], timing: Timing, feed: Feed, accumulate: int) -> int | None:
    """Updates of the fit that a checkpoint was made in: those that it had made, and those to come."""
    loop, state, each, size = saved["loop"], saved["step"]["state"], timing.epoch_steps, feed.size
    same, epochs = saved["config"]["data"] == feed.describe(), timing.epochs - loop["epoch"]
    at = saved["feed"]["step"] if same else 0  # with other data a new pass begins
    if each is not None:
        begun = 0 if loop["epoch_over"] else max(each - loop["step"], int(loop["step"] > each))
        steps = epochs * each + begun
    elif size is not None:
        steps = (epochs + (not loop["epoch_over"])) * size - at
    else:
        return None
    made: int = int(state["updates"]) - saved["config"].get("began", 0)
    return made + _spread(max(steps, 0), size, accumulate, at, state["cycle"]["micro"])


def _spread(steps: int, size: int | None, accumulate: int, at: int = 0, micro: int = 0) -> int:
    """Updates in so many steps from batch `at` of a pass on, `micro` of the first update's being over."""
    if size is None:
        return steps
    first = min(size - at, steps)
    passes, rest = divmod(steps - first, size)
    return (
        -(-(first + micro) // accumulate) + passes * -(-size // accumulate) + -(-rest // accumulate)
    )
