"""A model's schedule as the learning rates of one fit, by update or by epoch.

Each fit begins a schedule anew; a scheduler of torch's continues where it stands.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from halfstep.engine import Callback, Feed, Run, Timing
from halfstep.errors import Notice
from halfstep.model.schedule_unit import (
    Unit,
    check_unit,
    choose_unit,
    describe_unit,
    resumed_unit,
)
from halfstep.model.schedule_warnings import suspicious_schedule
from halfstep.schedules import Schedule, from_torch, resolve, tables
from halfstep.schedules.group_schedules import check_scheduler
from halfstep.schedules.torch_schedulers import copy_scheduler, has_moved, last_update
from halfstep.step import TrainStep
from halfstep.step.optimizer import lr_dtype
from halfstep.utils.keywords import user_stacklevel


class ScheduleTables:
    """The learning rates of every fit of a model.

    A schedule moves once per update or once per epoch. A scheduler of torch's stands where as many
    calls of its step() as there were updates (or epochs) of the fits with it would have brought it:
    as in a loop, whatever was stopped early or resumed.

    By update, the table on the device has a column for each update, and the step finds its own. By
    epoch, it has one column, into which `EpochRates` writes the rates of the next epoch.
    """

    def __init__(self) -> None:
        self._scheduler: LRScheduler | None = None
        # The scheduler as it stood before the first fit moved the optimizer's rates, and the
        # updates that were over then.
        self._scheduler_start: LRScheduler | None = None
        self._updates_at_start = 0
        self._scheduler_unit: Unit = "update"
        # Of the newest table: its updates, and those of the fits before it.
        self._table_updates = 0
        self._updates_before = 0
        self._too_short: ValueError | None = None
        # Of the newest fit.
        self._unit: Unit | None = None  # None without a schedule
        self._notice = ""
        # By epoch: the rates [groups, epochs] of the newest fit and of those before it with the
        # same scheduler; the epochs of the fits before it, and of all.
        self._epoch_rates = torch.zeros(0, 0)
        self._epochs_before = 0
        self._epochs_done = 0

    def for_new_fit(
        self,
        schedule: Any,
        every: Unit | None,
        step: TrainStep,
        timing: Timing,
        feed: Feed,
        updates_before: int,
    ) -> Tensor | None:
        """The table of a fit that begins after so many updates. None where there is no schedule.

        `every` is what the user said about its unit. By update, columns for the updates that are
        over stand before the table.
        """
        check_unit(schedule, every)
        self._unit = None
        self._notice = ""
        self._too_short = None
        if schedule is None:
            if every is not None:
                raise ValueError(
                    f"schedule_every={every!r}: expected a schedule beside it, got none; "
                    "give Model(schedule=…)"
                )
            return None
        updates = total_updates(timing, feed.size, step.options.accumulate)
        is_new = schedule is not self._scheduler
        if is_new:
            choice = choose_unit(schedule, every, timing.epochs, updates)
            unit = choice.unit
            self._too_short = choice.refusal
            self._notice = choice.notice
        else:
            unit = self._same_unit(every)
        if self._too_short is not None:
            # A checkpoint may say the unit. What is wrong in both is refused at once.
            check_scheduler(schedule, step.optimizer)
            from_torch(schedule, 2)
            return None

        warning = suspicious_schedule(schedule, unit, step, timing.epochs, updates)
        if is_new and warning:
            warnings.warn(f"schedule: {warning}", Notice, stacklevel=user_stacklevel())
        if unit == "epoch":
            epochs_before = self._epochs_before_fit(schedule)
            return self._table_by_epoch(schedule, step, timing.epochs, epochs_before, done=0)
        if updates is None:
            raise unknown_length()
        self._unit = unit
        return self._as_long_as_possible(schedule, step, updates, updates_before)

    def for_resumed_fit(
        self,
        schedule: Any,
        every: Unit | None,
        step: TrainStep,
        timing: Timing,
        feed: Feed,
        saved: Mapping[str, Any],
    ) -> Tensor | None:
        """The table of the fit that `saved` was made in; None where the newest one will do."""
        if schedule is None:
            return None
        resumed = resumed_unit(schedule, every, saved["config"])
        if resumed is not None:
            unit = resumed.unit
            self._notice = resumed.notice
        elif self._unit is not None:
            unit = self._unit
        else:
            self.check()
            raise AssertionError("a fit with a schedule has a unit")

        if unit == "epoch":
            epochs_before = 0
            if isinstance(schedule, LRScheduler):
                epochs_before = saved["config"].get("schedule", {}).get("epochs_before", 0)
            self._too_short = None
            done = epochs_done(saved["loop"])
            return self._table_by_epoch(schedule, step, timing.epochs, epochs_before, done=done)

        updates = updates_of_saved_fit(saved, timing, feed, step.options.accumulate)
        if updates is None:
            raise unknown_length()
        updates_before = saved["config"].get("began", 0)
        is_same_fit = self._updates_before == updates_before and self._unit == unit
        self._unit = unit
        # More updates than are needed do no harm.
        if self._too_short is None and is_same_fit and self._table_updates >= updates:
            return None
        self._table_updates = updates
        self._updates_before = updates_before
        self._too_short = None
        return self._make_table(schedule, step, updates, updates_before)

    def check(self) -> None:
        """Refuses a schedule that ends before the fit does, or one whose unit nobody has said.

        Says which unit was chosen for the user.
        """
        if self._too_short is not None:
            raise self._too_short
        if self._notice:
            warnings.warn(f"schedule: {self._notice}", Notice, stacklevel=user_stacklevel())

    def describe(self, schedule: Any) -> dict[str, Any]:
        """The schedule's unit and position, for a checkpoint; nothing where there is none."""
        if schedule is None or self._unit is None:
            return {}
        return {"schedule": describe_unit(schedule, self._unit, self._epochs_before)}

    def go_to_epoch(self, step: TrainStep, done: int) -> None:
        """Writes the rates of the next epoch, after so many epochs of this fit, to the device.

        Past the end the last ones hold.
        """
        if self._unit != "epoch":
            return
        self._epochs_done = self._epochs_before + done
        table = step.learning_rates.table
        assert table is not None
        # In place, on the device: captured steps read this very tensor, and nothing waits.
        table.copy_(self._column_of_epoch(self._epochs_done))

    def _column_of_epoch(self, done: int) -> Tensor:
        """The rates [groups, 1] after so many epochs."""
        column = min(done, self._epoch_rates.shape[1] - 1)
        return self._epoch_rates[:, column : column + 1]

    def _same_unit(self, every: Unit | None) -> Unit:
        """The unit of the scheduler that earlier fits have moved already."""
        if every not in (None, self._scheduler_unit):
            raise ValueError(
                f"schedule_every={every!r}: the fits before have moved this scheduler once per "
                f"{self._scheduler_unit}; leave schedule_every as it was, or give this fit a "
                "scheduler of its own: model.schedule = …"
            )
        return self._scheduler_unit

    def _epochs_before_fit(self, schedule: Any) -> int:
        """Epochs of earlier fits with this scheduler of torch's; others begin with each fit."""
        return self._epochs_done if schedule is self._scheduler else 0

    def _table_by_epoch(
        self, schedule: Any, step: TrainStep, epochs: int, epochs_before: int, *, done: int
    ) -> Tensor:
        """The one column of the epoch that comes after `done` epochs of this fit."""
        all_epochs = epochs_before + epochs
        if isinstance(schedule, LRScheduler):
            start = self._start_of(schedule, step)
            _check_end(schedule, epochs_before, epochs, unit="epoch")
            schedules = from_torch(start, all_epochs)
            if schedule is not self._scheduler:
                self._updates_at_start = int(step.state.updates)
            self._keep_scheduler(schedule, start, "epoch", self._updates_at_start)
        else:
            schedules = resolve(schedule, step.optimizer)
            for one in schedules:
                _check_epochs(one, all_epochs)

        rates = tables(schedules, all_epochs, step.device, lr_dtype(step.device))
        self._unit = "epoch"
        self._epoch_rates = rates
        self._epochs_before = epochs_before
        self._epochs_done = epochs_before + done
        return self._column_of_epoch(self._epochs_done).clone()

    def _start_of(self, scheduler: LRScheduler, step: TrainStep) -> LRScheduler:
        """A copy of the scheduler as it was before the first fit with it."""
        if scheduler is self._scheduler:
            self._check_untouched(scheduler, step)
            assert self._scheduler_start is not None
            return self._scheduler_start
        check_scheduler(scheduler, step.optimizer)
        return copy_scheduler(scheduler)

    def _check_untouched(self, scheduler: LRScheduler, step: TrainStep) -> None:
        """Refuses a scheduler that was stepped, or rates that were changed, between two fits."""
        name = type(scheduler).__name__
        if has_moved(scheduler):
            raise ValueError(
                f"schedule: {name} was stepped by hand between two fits; "
                f"fit moves it by itself, once per {self._scheduler_unit}. Leave out "
                "scheduler.step(), or give the next fit a new one: "
                f"model.schedule = {name}(optimizer, …)"
            )
        rates = [float(group["lr"]) for group in step.optimizer.param_groups]
        if self._scheduler_unit == "epoch":
            table = self._epoch_rates
            position = self._epochs_done
        else:
            assert step.learning_rates.table is not None
            table = step.learning_rates.table
            position = int(step.state.updates)
        # Where nothing was updated since, the rate of the update or epoch to come is not set yet.
        position = min(position, table.shape[1])
        expected = table[:, max(position - 1, 0) : position + 1].t().tolist()
        if rates not in expected:
            raise ValueError(
                "schedule: expected the optimizer's rates as the last fit left them, "
                f"{expected[0]}, received {rates}; give the next fit a scheduler that begins "
                f"there: model.schedule = {name}(optimizer, …)"
            )

    def _keep_scheduler(
        self, scheduler: LRScheduler, start: LRScheduler, unit: Unit, updates_at_start: int
    ) -> None:
        self._scheduler = scheduler
        self._scheduler_start = start
        self._scheduler_unit = unit
        self._updates_at_start = updates_at_start

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
        updates_at_start = self._updates_at_start
        if scheduler is not self._scheduler:
            updates_at_start = updates_before
        start = self._start_of(scheduler, step)

        past_updates = max(updates_before - updates_at_start, 0)
        _check_end(scheduler, past_updates, updates, unit="update")
        all_updates = past_updates + updates
        schedules = from_torch(start, all_updates)
        table = with_past_columns(schedules, all_updates, updates_before - past_updates)
        self._keep_scheduler(scheduler, start, "update", updates_at_start)
        return table


class EpochRates(Callback):
    """Moves a schedule that counts epochs, at the end of each: as scheduler.step() in a loop."""

    def __init__(self, tables: ScheduleTables, step: TrainStep) -> None:
        self._tables = tables
        self._step = step

    def epoch_end(self, run: Run) -> None:
        self._tables.go_to_epoch(self._step, run.epoch)


def epochs_done(loop: Mapping[str, Any]) -> int:
    """The epochs of a saved fit that were over, their evaluation too."""
    is_over = loop["epoch_over"] and not loop["pending"]
    return int(loop["epoch"]) if is_over else int(loop["epoch"]) - 1


def unknown_length() -> ValueError:
    return ValueError(
        "schedule: the data does not say how long it is; give fit(steps_per_epoch=…), or let the "
        "schedule count epochs: Model(schedule_every='epoch')"
    )


def _check_epochs(schedule: Schedule, epochs: int) -> None:
    """Refuses a schedule by epoch that ends before the fit does."""
    if schedule.length is not None and schedule.length < epochs:
        raise ValueError(
            f"schedule: {schedule}: expected rates for {epochs} epochs, as schedule_every='epoch' "
            f"says, received {schedule.length}; build it for {epochs} epochs, or train for "
            f"{schedule.length} at most"
        )


def with_past_columns(schedules: list[Schedule], updates: int, past_updates: int) -> Tensor:
    """The table of the schedules, behind columns for updates that are over."""
    table = tables(schedules, updates)
    past = table[:, :1].expand(-1, past_updates)
    return torch.cat([past, table], dim=1)


def _check_end(scheduler: LRScheduler, past: int, coming: int, *, unit: Unit) -> None:
    """Refuses a scheduler that was built for fewer calls of step() than its fits have together."""
    end = last_update(scheduler)
    name = type(scheduler).__name__
    if end is None or past + coming <= end + 1:
        return
    if not past and unit == "epoch":
        raise ValueError(
            f"schedule: {name} was built for {end} epochs, as schedule_every='epoch' says, and "
            f"this fit has {coming}; build it with total_steps={coming}"
        )
    if past:
        raise ValueError(
            f"schedule: {name} was built for {end} {unit}s; the fits before made {past} "
            f"and this one has {coming}. Build it with total_steps={past + coming} at first, "
            f"or give this fit one of its own: model.schedule = "
            f"{name}(optimizer, …, total_steps={coming})"
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
        steps_left = full_epochs_left * feed.size
        if not loop["epoch_over"]:
            steps_left += max(feed.size - batches_into_pass, 1)
    else:
        return None

    updates_made: int = int(state["updates"]) - saved["config"].get("began", 0)
    return updates_made + count_updates(
        steps_left,
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
    # A pass that a smaller limit leaves behind ends with its next step.
    steps_of_first_pass = min(max(pass_size - batches_into_pass, 1), steps)
    full_passes, last_steps = divmod(steps - steps_of_first_pass, pass_size)
    return (
        _divide_up(steps_of_first_pass + open_micro_batches, accumulate)
        + full_passes * _divide_up(pass_size, accumulate)
        + _divide_up(last_steps, accumulate)
    )


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)
