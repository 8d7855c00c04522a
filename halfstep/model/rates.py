"""A model's schedule as the table of one fit. Each fit begins a schedule anew, but one of torch's goes on."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from halfstep.schedules import Schedule, from_torch, resolve, tables
from halfstep.schedules.resolve import check_scheduler
from halfstep.schedules.rolled import end_of, has_moved, twin
from halfstep.step import TrainStep


class Tables:
    """The learning rates of every fit of a model. torch's scheduler stands, at update n of the fits with it, where
    n calls of its step() would have brought it: as in a loop, whatever was stopped early or resumed."""

    def __init__(self) -> None:
        self._scheduler: LRScheduler | None = None
        self._start: LRScheduler | None = None  # as it stood before the first fit moved the optimizer's rates
        self._first = 0  # updates that were over then

    def __call__(self, schedule: Any, step: TrainStep, count: int | None, done: int) -> Tensor:
        """[groups, updates] for `count` updates, behind `done` columns for those that are over."""
        if count is None:
            raise ValueError("schedule: the data does not say how long it is; give fit(steps_per_epoch=…)")
        if isinstance(schedule, LRScheduler):
            return self._going_on(schedule, step, count, done)
        return _behind(resolve(schedule, step.optimizer, count), count, done)

    def _going_on(self, scheduler: LRScheduler, step: TrainStep, count: int, done: int) -> Tensor:
        if scheduler is not self._scheduler:
            check_scheduler(scheduler, step.optimizer)
            self._start, self._scheduler, self._first = twin(scheduler), scheduler, done
        else:
            _check_still(scheduler, step)
        assert self._start is not None
        past = max(done - self._first, 0)
        _check_end(scheduler, past, count)
        return _behind(from_torch(self._start, past + count), past + count, done - past)


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
    found, table = [float(group["lr"]) for group in step.optimizer.param_groups], step.rates.table
    assert table is not None
    at = min(int(step.state.updates), table.shape[1])  # a skipped step has the rate of the update to come
    if found not in (left := table[:, max(at - 1, 0) : at + 1].t().tolist()):
        raise ValueError(
            f"schedule: expected the optimizer's rates as the last fit left them, {left[0]}, received {found}; give "
            f"the next fit a scheduler that begins there: model.schedule = {name}(optimizer, …)"
        )


def _check_end(scheduler: LRScheduler, past: int, count: int) -> None:
    end, name = end_of(scheduler), type(scheduler).__name__
    if past and end is not None and past + count > end + 1:
        raise ValueError(
            f"schedule: {name} was built for {end} updates; the fits before made {past} and this one has {count}. "
            f"Build it with total_steps={past + count} at first, or give this fit one of its own: model.schedule = "
            f"{name}(optimizer, …, total_steps={count})"
        )


def updates(epochs: int, size: int | None, steps_per_epoch: int | None, accumulate: int) -> int | None:
    """Updates in the whole run, at most: each pass over the data flushes its tail. None when nobody knows."""
    if size is None:
        return None if steps_per_epoch is None else epochs * steps_per_epoch
    if steps_per_epoch is None:
        return epochs * -(-size // accumulate)
    passes, rest = divmod(epochs * steps_per_epoch, size)
    return passes * -(-size // accumulate) + -(-rest // accumulate)
