"""A model's schedule as the table of learning rates of one fit.

Each fit begins a schedule anew; a scheduler of torch's continues where it stands.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from halfstep.engine import Feed, Timing
from halfstep.errors import Notice
from halfstep.model.schedule_warnings import suspicious_schedule
from halfstep.schedules import Schedule, from_torch, resolve, tables
from halfstep.schedules.group_schedules import check_scheduler
from halfstep.schedules.torch_schedulers import copy_scheduler, has_moved, last_update
from halfstep.step import TrainStep
from halfstep.utils.keywords import user_stacklevel


class ScheduleTables:
    """The learning rates of every fit of a model.

    At update n of the fits with it, a scheduler of torch's stands where n calls of its step() would
    have brought it: as in a loop, whatever was stopped early or resumed.
    """

    def __init__(self) -> None:
        self._scheduler: LRScheduler | None = None
        # The scheduler as it stood before the first fit moved the optimizer's rates, and the
        # updates that were over then.
        self._scheduler_start: LRScheduler | None = None
        self._updates_at_start = 0
        # Of the newest table: its updates, and those of the fits before it.
        self._table_updates = 0
        self._updates_before = 0
        self._too_short: ValueError | None = None

    def for_new_fit(
        self, schedule: Any, step: TrainStep, timing: Timing, feed: Feed, updates_before: int
    ) -> Tensor | None:
        """The table [groups, updates] of a fit that begins after so many updates.

        Columns for the updates that are over stand before it. None where there is no schedule.
        """
        if schedule is None:
            return None
        updates = total_updates(timing, feed.size, step.options.accumulate)
        if updates is None:
            raise ValueError(
                "schedule: the data does not say how long it is; give fit(steps_per_epoch=…)"
            )
        is_new = schedule is not self._scheduler
        warning = suspicious_schedule(schedule, step, timing.epochs, updates)
        table = self._as_long_as_possible(schedule, step, updates, updates_before)
        if is_new and warning:
            warnings.warn(f"schedule: {warning}", Notice, stacklevel=user_stacklevel())
        return table

    def for_resumed_fit(
        self, schedule: Any, step: TrainStep, timing: Timing, feed: Feed, saved: Mapping[str, Any]
    ) -> Tensor | None:
        """The table of the fit that `saved` was made in; None where the newest one will do."""
        if schedule is None:
            return None
        updates = updates_of_saved_fit(saved, timing, feed, step.options.accumulate)
        assert updates is not None  # a new fit would have been refused
        updates_before = saved["config"].get("began", 0)
        is_same_fit = self._updates_before == updates_before
        # More updates than are needed do no harm.
        if self._too_short is None and is_same_fit and self._table_updates >= updates:
            return None
        self._table_updates = updates
        self._updates_before = updates_before
        self._too_short = None
        return self._make_table(schedule, step, updates, updates_before)

    def check(self) -> None:
        """Refuses a schedule that ends before the fit does."""
        if self._too_short is not None:
            raise self._too_short

    def _as_long_as_possible(
        self, schedule: Any, step: TrainStep, updates: int, updates_before: int
    ) -> Tensor:
        """The table; where a schedule has fewer updates, all it has.

        `check` then refuses it, unless a checkpoint turns out to need no more.
        """
        self._table_updates = updates
        self._updates_before = updates_before
        self._too_short = None
        try:
            return self._make_table(schedule, step, updates, updates_before)
        except ValueError as error:
            length = self._schedule_length(schedule, step, updates_before)
            if length is None or not 0 < length < updates:
                raise
            self._too_short = error
            return self._make_table(schedule, step, length, updates_before)

    def _make_table(
        self, schedule: Any, step: TrainStep, updates: int, updates_before: int
    ) -> Tensor:
        if isinstance(schedule, LRScheduler):
            return self._continue_scheduler(schedule, step, updates, updates_before)
        schedules = resolve(schedule, step.optimizer, updates)
        return with_past_columns(schedules, updates, updates_before)

    def _schedule_length(self, schedule: Any, step: TrainStep, updates_before: int) -> int | None:
        """How many updates a schedule has rates for; None for one without an end."""
        if not isinstance(schedule, LRScheduler):
            schedules = resolve(schedule, step.optimizer)
            lengths = [one.length for one in schedules if one.length is not None]
            return min(lengths, default=None)
        end = last_update(schedule)
        if end is None:
            return None
        if schedule is not self._scheduler:
            return end
        return end - max(updates_before - self._updates_at_start, 0)

    def _continue_scheduler(
        self, scheduler: LRScheduler, step: TrainStep, updates: int, updates_before: int
    ) -> Tensor:
        """The rates of torch's scheduler for this fit, from where the fits before have left it."""
        if scheduler is self._scheduler:
            _check_untouched(scheduler, step)
            start = self._scheduler_start
            updates_at_start = self._updates_at_start
        else:
            check_scheduler(scheduler, step.optimizer)
            start = copy_scheduler(scheduler)
            updates_at_start = updates_before
        assert start is not None

        past_updates = max(updates_before - updates_at_start, 0)
        _check_end(scheduler, past_updates, updates)
        all_updates = past_updates + updates
        schedules = from_torch(start, all_updates)
        table = with_past_columns(schedules, all_updates, updates_before - past_updates)

        self._scheduler = scheduler
        self._scheduler_start = start
        self._updates_at_start = updates_at_start
        return table


def with_past_columns(schedules: list[Schedule], updates: int, past_updates: int) -> Tensor:
    """The table of the schedules, behind columns for updates that are over."""
    table = tables(schedules, updates)
    past = table[:, :1].expand(-1, past_updates)
    return torch.cat([past, table], dim=1)


def _check_untouched(scheduler: LRScheduler, step: TrainStep) -> None:
    """Refuses a scheduler that was stepped, or rates that were changed, between two fits."""
    name = type(scheduler).__name__
    if has_moved(scheduler):
        raise ValueError(
            f"schedule: {name} was stepped by hand between two fits; "
            "fit moves it by itself, once an update. Leave out scheduler.step(), "
            f"or give the next fit a new one: model.schedule = {name}(optimizer, …)"
        )
    rates = [float(group["lr"]) for group in step.optimizer.param_groups]
    table = step.learning_rates.table
    assert table is not None
    # A skipped step has the rate of the update to come.
    position = min(int(step.state.updates), table.shape[1])
    expected = table[:, max(position - 1, 0) : position + 1].t().tolist()
    if rates not in expected:
        raise ValueError(
            "schedule: expected the optimizer's rates as the last fit left them, "
            f"{expected[0]}, received {rates}; give the next fit a scheduler that begins there: "
            f"model.schedule = {name}(optimizer, …)"
        )


def _check_end(scheduler: LRScheduler, past_updates: int, updates: int) -> None:
    """Refuses a scheduler that was built for fewer updates than its fits have together."""
    end = last_update(scheduler)
    name = type(scheduler).__name__
    all_updates = past_updates + updates
    if past_updates and end is not None and all_updates > end + 1:
        raise ValueError(
            f"schedule: {name} was built for {end} updates; the fits before made {past_updates} "
            f"and this one has {updates}. Build it with total_steps={all_updates} at first, "
            f"or give this fit one of its own: model.schedule = "
            f"{name}(optimizer, …, total_steps={updates})"
        )


def total_updates(timing: Timing, pass_size: int | None, accumulate: int) -> int | None:
    """Updates in the whole run, at most; None when nobody knows."""
    epoch_steps = timing.epoch_steps or pass_size
    if epoch_steps is None:
        return None
    return count_updates(timing.epochs * epoch_steps, pass_size, accumulate)


def updates_of_saved_fit(
    saved: Mapping[str, Any], timing: Timing, feed: Feed, accumulate: int
) -> int | None:
    """Updates of the fit that a checkpoint was made in: those made, and those to come."""
    loop = saved["loop"]
    state = saved["step"]["state"]
    epoch_steps = timing.epoch_steps
    full_epochs_left = timing.epochs - loop["epoch"]
    # With other data a new pass begins.
    is_same_data = saved["config"]["data"] == feed.describe()
    batches_into_pass = saved["feed"]["step"] if is_same_data else 0

    if epoch_steps is not None:
        if loop["epoch_over"]:
            steps_left_in_epoch = 0
        elif loop["step"] > epoch_steps:
            # steps_per_epoch was made smaller: the epoch ends with its next step.
            steps_left_in_epoch = 1
        else:
            steps_left_in_epoch = epoch_steps - loop["step"]
        steps_left = full_epochs_left * epoch_steps + steps_left_in_epoch
    elif feed.size is not None:
        passes_left = full_epochs_left if loop["epoch_over"] else full_epochs_left + 1
        steps_left = passes_left * feed.size - batches_into_pass
    else:
        return None

    updates_made: int = int(state["updates"]) - saved["config"].get("began", 0)
    return updates_made + count_updates(
        max(steps_left, 0),
        feed.size,
        accumulate,
        batches_into_pass=batches_into_pass,
        open_micro_batches=state["cycle"]["micro"],
    )


def count_updates(
    steps: int,
    pass_size: int | None,
    accumulate: int,
    *,
    batches_into_pass: int = 0,
    open_micro_batches: int = 0,
) -> int:
    """Updates in so many steps. Each pass over the data flushes its tail."""
    if pass_size is None:
        return steps
    steps_of_first_pass = min(pass_size - batches_into_pass, steps)
    full_passes, last_steps = divmod(steps - steps_of_first_pass, pass_size)
    return (
        _divide_up(steps_of_first_pass + open_micro_batches, accumulate)
        + full_passes * _divide_up(pass_size, accumulate)
        + _divide_up(last_steps, accumulate)
    )


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)
