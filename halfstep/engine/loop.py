"""The loop: steps up to the next visit, their rows to the callbacks, evaluation, visit.

Start with `Loop.run_epochs`; it reads top to bottom. A *visit* is the moment at which the host and
the network stand at the same step: rows are delivered, weights may be read, signals are heard.
"""

import math
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

from halfstep.distributed import Ranks, Request
from halfstep.engine import signals
from halfstep.engine.batch_errors import explain_batch_error
from halfstep.engine.events import Callback, Events
from halfstep.engine.feed import Args, Feed
from halfstep.engine.limits import TimeLimit
from halfstep.engine.run import (
    ExtraColumns,
    HistoryEntries,
    Row,
    Run,
    StepPosition,
    Timing,
    make_rows,
    ratio,
    read_rows,
)
from halfstep.engine.signals import Signals
from halfstep.engine.streaks import StreakWatch
from halfstep.engine.train_metrics import TrainMetrics
from halfstep.errors import NonFiniteError
from halfstep.step import Record
from halfstep.step.lane_accumulate import LaneAccumulate
from halfstep.step.objective import batch_size
from halfstep.step.overflow import raise_device_errors
from halfstep.step.state import with_extras
from halfstep.utils import rng
from halfstep.utils.saved_state import SavedValue

# How often the host reads results when nobody says: signals are heard, progress bars move.
VISIT_EVERY_S = 0.25
EAGER_STEPS_PER_VISIT = 50
CAPTURED_STEPS_PER_VISIT = 1 << 16  # time ends such a visit

# Runs an evaluation: (should it stop?) → scores, or None when it was stopped.
Evaluate = Callable[[Callable[[], bool]], dict[str, float] | None]


class Runner(Protocol):
    """Many steps without the host: engine/captured/runner.py has it, where that folder is there."""

    step_samples: list[int]  # the samples of each step since `run` was called
    pass_over: bool  # the pass has given its last batch

    def run(
        self, max_steps: int, should_stop: Callable[[], object], max_seconds: float | None = None
    ) -> list[int]: ...
    def flush(self) -> bool: ...
    def rows(self) -> tuple[list[list[float]], list[int]]: ...
    def extras(self) -> list[list[float]]: ...


def _no_runner() -> Runner | None:
    return None


class Loop:
    """Runs `step` over `feed`, with callbacks and evaluations.

    `make_runner` gives a Runner for captured steps, or None for eager ones.
    """

    def __init__(
        self,
        run: Run,
        step: Any,
        feed: Feed,
        callbacks: Sequence[Callback],
        timing: Timing,
        evaluate: Evaluate | None,
        make_runner: Callable[[], Runner | None] = _no_runner,
    ) -> None:
        self.run = run
        self.step = step
        self.feed = feed
        self.timing = timing
        self.evaluate = evaluate
        self.events = Events(run, callbacks)
        self.callbacks = self.events.callbacks
        self.reads_every_step = any(callback.exact for callback in callbacks)
        self.signals = Signals()
        self.make_runner = make_runner
        # What the step reports beside its record: parts of the loss, metrics on training data.
        self.objective = getattr(step, "objective", None)
        self.train_metrics: TrainMetrics | None = getattr(self.objective, "observer", None)

        # The processes that train together: what one host wants, all must do at the same step.
        ranks: Ranks | None = getattr(step, "ranks", None)
        self.ranks = ranks if ranks is not None and ranks.count > 1 else None
        self._agreed_limit = 1  # steps until the next visit, with several ranks

        self.captured_runner = make_runner()
        run.evaluates = evaluate is not None
        step_options = getattr(step, "options", None)
        self.fingerprints = bool(getattr(step_options, "fingerprint_every", 0))

        self.streaks = StreakWatch()

        self.pending = False  # rows of this position are out, its evaluation and visit are not
        self.flushing = False
        self.config: dict[str, Any] = {}  # what the run was made of, in words
        self.time_limit: TimeLimit | None = None
        self.on_begun: Callable[[], object] = lambda: None
        # Called before rows are handed out: what it raises leaves them unwritten.
        self.before_rows: Callable[[], object] = lambda: None

        # Of the visit under way.
        self._batches: Iterator[Args] | None = None
        self._positions: list[StepPosition] = []
        self._records: list[Record] = []
        self._visit_started = 0.0

        # Since the last entry of the history: Σ loss · samples, Σ samples.
        self._losses: list[float] = [0.0, 0.0]
        # And of the columns beside the loss: Σ part · samples; totals and counts of metrics.
        self._parts: dict[str, float] = {}
        self._counts: dict[str, tuple[float, float]] = {}

    def run_epochs(self) -> None:
        """Trains from where the run stands to its end. `end` is called whatever happens."""
        run = self.run
        if self.ranks is not None:
            self.ranks.requests.clear()
        with self.signals:
            try:
                self.events.call_until_error("begin")
                run.has_begun = True
                self.on_begun()
                if self.pending:
                    self._evaluate_and_visit()
                while self._goes_on():
                    self._begin_steps()
                    if self.captured_runner is not None:
                        self._run_captured(self.captured_runner)
                    else:
                        # The step is called from here: few frames between fit and forward.
                        for args in self._eager_batches():
                            try:
                                self._records.append(self.step(*args))
                            except Exception as error:
                                self._explain(error, run.position + 1, args)
                                self._take_over_step(error, args)
                                raise
                    self._deliver_rows()
                    if self.pending or run.epoch_over:  # a signal may come before the first step
                        self._evaluate_and_visit()
                    self._stop_after_time()
                if not run.stopped:
                    self.streaks.warn_at_end()
            except BaseException as error:
                run.error = error
                self._rescue_rows()
                raise
            finally:
                self.events.call_end()
        was_stopped = self.signals.caught is not None
        if self.ranks is not None:  # a rank that ended now would have the first one killed
            self._must_stop()  # a signal that came last is for all ranks too
            self.ranks.any_of([], "the end of the run")
            was_stopped = self.ranks.requests.take(Request.STOP)
        is_first_rank = self.ranks is None or self.ranks.index == 0
        if was_stopped and not signals.QUIET and is_first_rank:
            print(
                f"halfstep: {self._stop_reason()} after step {run.position}; "
                "where a Checkpoint saves the run, fit(resume='auto') goes on from here",
                file=sys.stderr,
            )
        self.signals.raise_caught()
        if was_stopped:  # the signal came to another rank: the job ends on all of them
            raise SystemExit(128 + signal.SIGTERM)

    def _goes_on(self) -> bool:
        """Whether there are steps to do; on all ranks the same ones, up to the same visit."""
        run = self.run
        if self.ranks is not None:
            stopped = run.stopped
            if stopped is None and self.signals.caught:
                stopped = self.signals.caught.name
            own = (stopped, self._own_steps_until_visit())
            reasons, limits = zip(*self.ranks.gather_objects(own, "a visit"), strict=True)
            self._agreed_limit = min(limits)
            for reason in reasons:
                if reason is not None:
                    run.stop(reason)
        must_go_on = not run.stopped or self._cycle_is_spread
        return must_go_on and not self._is_finished()

    @property
    def _cycle_is_spread(self) -> bool:
        """Whether an update cycle is open that cannot be saved, so that a stop waits for its end.

        Its sums are spread over lanes or ranks.
        """
        return not getattr(self.step, "can_be_saved", True)

    def _is_finished(self) -> bool:
        run = self.run
        return (run.epoch, run.epoch_over) >= (run.epochs, True)

    def _stop_after_time(self) -> None:
        """Ends a run whose time is over. It has made a visit: a run that goes on gets somewhere."""
        limit = self.time_limit
        if limit is None or self._is_finished():
            return
        is_over = limit.is_over
        if self.ranks is not None:
            if is_over:
                self.ranks.requests.ask(Request.TIME_OVER)
            is_over = self.ranks.requests.take(Request.TIME_OVER)
        if is_over:
            self.run.stop(limit.reason(self.run.position))

    def _begin_steps(self) -> None:
        run = self.run
        if run.epoch_over:
            run.epoch += 1
            run.step = 0
            run.seconds = 0.0
            run.epoch_over = False
        # compile="auto" may have decided since the last pass.
        if self.captured_runner is None and self._batches is None:
            self.captured_runner = self.make_runner()
        if self.train_metrics is not None:
            self.train_metrics.use_captured(self.captured_runner is not None)
            if getattr(self.step, "lanes", None) is not None:
                self.train_metrics.use_divided_batches()
        if run.step == 0:
            self.events.call_all("epoch_begin")
        self._positions = []
        self._records = []
        run.scores = None
        self._visit_started = time.perf_counter()

    def _eager_batches(self) -> Iterator[Args]:
        """The batches up to the next visit. The end of a pass ends a visit too."""
        limit = self._steps_until_visit()
        if self._batches is None:
            self._batches = self.feed.start()
            accumulator = getattr(self.step, "accumulator", None)
            if isinstance(accumulator, LaneAccumulate):
                accumulator.compares_next_batch = True  # a pass may begin by a shuffle
        while len(self._positions) < limit and not self._must_stop():
            args = next(self._batches, None)
            if args is None:
                self._end_pass()
                return
            yield args
            self.feed.advance(1)
            self._add_position(batch_size(args))
            if self.feed.pass_is_over:
                self._end_pass()
                return
            if self.timing.sink is None and self._visit_is_due():
                return

    def _must_stop(self) -> bool:
        """Whether a signal came: to this process, or to any of the ranks that train together."""
        is_asked = self.signals.caught is not None
        if self.ranks is not None:
            if is_asked:
                self.ranks.requests.ask(Request.STOP)
            is_asked = self.ranks.requests.is_agreed(Request.STOP)
        return is_asked and not self._cycle_is_spread

    def _visit_is_due(self) -> bool:
        """Whether the host should look in: some time has passed, on the clock of any rank."""
        is_late = time.perf_counter() > self._visit_started + VISIT_EVERY_S
        if self.ranks is None:
            return is_late
        if is_late:
            self.ranks.requests.ask(Request.VISIT)
        return self.ranks.requests.take(Request.VISIT)

    def _run_captured(self, runner: Runner) -> None:
        """The steps up to the next visit, without the host."""
        seconds = None if self.timing.sink else VISIT_EVERY_S
        try:
            runner.run(self._steps_until_visit(), lambda: self.signals.caught, seconds)
        except Exception as error:
            self._explain(error, self.run.position + len(runner.step_samples) + 1, None)
            raise
        finally:
            for samples in runner.step_samples:
                self._add_position(samples)
        if runner.pass_over:
            self._end_pass()

    def _explain(self, error: Exception, global_step: int, args: Args | None) -> None:
        net = self.run.model.net
        explain_batch_error(error, f"step {global_step}", args, self.feed.names, net)

    def _add_position(self, samples: int) -> None:
        run = self.run
        run.position += 1
        self._positions.append(
            StepPosition(
                epoch=run.epoch,
                step=run.step + len(self._positions) + 1,
                global_step=run.position,
                samples=samples,
            )
        )

    def _deliver_rows(self) -> None:
        """Every step's row to every callback, in order."""
        run = self.run
        positions = self._positions
        records = self._records
        self._positions = []
        self._records = []
        rows: list[Row] = []
        if self.captured_runner is not None:
            numbers, fingerprints = self.captured_runner.rows()
            extras = self.captured_runner.extras()
            rows = make_rows(positions, numbers, fingerprints, extras, self._extra_columns())
        elif records:
            rows = read_rows(
                positions,
                records,
                fingerprints=self.fingerprints,
                extra_columns=self._extra_columns(),
            )
        run.seconds += time.perf_counter() - self._visit_started
        self.before_rows()
        self.pending = bool(rows)
        if self._must_stop():
            run.stop(self._stop_reason())
        self.events.deliver_rows(self._advance_run(rows))
        if self.captured_runner is not None or getattr(self.step, "decides_on_device", False):
            raise_device_errors(self.step, rows)
        self.streaks.warn()

    def _extra_columns(self) -> ExtraColumns:
        """The names of what the records have beside the fields of every record."""
        part_names = getattr(self.objective, "part_names", None) or ()
        metric_names: Sequence[str] = ()
        if self.train_metrics is not None:
            metric_names = self.train_metrics.names
        return ExtraColumns.of(part_names, metric_names)

    def _take_over_step(self, error: Exception, args: Args) -> None:
        """After an error that a step raised at its end: the step counts, and has a row."""
        if isinstance(error, NonFiniteError) and error.record is not None:
            self._records.append(error.record)
            self.feed.advance(1)
            self._add_position(batch_size(args))
            if self.feed.pass_is_over:
                self._end_pass()

    def _advance_run(self, rows: list[Row]) -> Iterator[Row]:
        """Moves the run from row to row while they are handed out."""
        run = self.run
        for row in rows:
            run.row = row
            run.step = row.step
            run.global_step = row.global_step
            self.streaks.take(row)
            if row.skipped:
                run.skipped += 1
            else:  # a skipped step's loss may be inf, and it moved nothing
                self._losses[0] += row.loss * row.samples
                self._losses[1] += row.samples
                self._add_extras(row)
            yield row
        run.training = self._training_means()

    def _add_extras(self, row: Row) -> None:
        """Adds the parts of a step's loss, weighted as the loss is, and what its metrics count."""
        for name, part in row.parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + part * row.samples
            if not math.isfinite(part):
                self.streaks.take_part(row, name, part)
        for name, (total, count) in row.counts.items():
            total_before, count_before = self._counts.get(name, (0.0, 0.0))
            self._counts[name] = (total_before + total, count_before + count)

    def _training_means(self) -> dict[str, float | None]:
        """The mean loss, its parts and the training metrics since the last entry of the history."""
        loss_sum, samples = self._losses
        means: dict[str, float | None] = {"loss": loss_sum / samples if samples else None}
        for name, part_sum in self._parts.items():
            means[name] = part_sum / samples if samples else None
        for name, (total, count) in self._counts.items():
            means[name] = ratio(total, count) if count else None
        return means

    def _end_pass(self) -> None:
        """The end of a pass over the data: its tail is an update of its own."""
        if self.feed.step == 0:
            raise ValueError(
                "fit: expected at least one batch in a pass, "
                f"got none in pass {self.feed.pass_number}. Can the data be gone through again?"
            )
        self._batches = None
        self.feed.end_pass()
        if self.timing.epoch_steps is None:
            self.run.epoch_over = True

        # An error in here leaves a torn state, unless the cycle is closed.
        self.flushing = True
        if self.captured_runner is not None:
            self.captured_runner.flush()
        else:
            self._flush_step()
        self.flushing = False

    def _flush_step(self) -> None:
        """The update of the tail belongs to the last step, which keeps its own loss."""
        tail = None
        try:
            tail = self.step.flush()
        except NonFiniteError as error:
            tail = error.record
            raise
        finally:
            if self._records and isinstance(tail, Record):
                last = self._records[-1]
                tail = Record(*tail)._replace(loss=last.loss)
                self._records[-1] = with_extras(tail, last.parts, last.counts)

    def _steps_until_visit(self) -> int:
        """Steps until the host must look in, on whichever rank that is first."""
        return self._own_steps_until_visit() if self.ranks is None else self._agreed_limit

    def _own_steps_until_visit(self) -> int:
        """Steps until the host of this process must look in."""
        run = self.run
        timing = self.timing
        if timing.sink:
            limit = timing.sink
        elif self.reads_every_step:  # a callback reads weights at every step
            limit = 1
        elif self.captured_runner is None:
            limit = EAGER_STEPS_PER_VISIT
        else:
            limit = CAPTURED_STEPS_PER_VISIT
        limits = [limit]
        if run.stopped and self._cycle_is_spread:
            limits.append(self.step.options.accumulate - self.step.state.cycle.micro)
        if timing.epoch_steps is not None:
            limits.append(timing.epoch_steps - run.step)
        if timing.valid_steps:
            limits.append(timing.valid_steps - run.position % timing.valid_steps)
        for next_stop in self.events.next_stops:
            stop = next_stop(run)
            if stop is not None and stop > run.position:
                limits.append(stop - run.position)
        return max(1, min(limits))

    def _evaluate_and_visit(self) -> None:
        """Evaluation, the end of the epoch, the visit; in this order: a checkpoint knows all."""
        run = self.run
        timing = self.timing
        if timing.epoch_steps is not None and run.step >= timing.epoch_steps:
            run.epoch_over = True
        run.scores = None
        if self.evaluate and self._evaluation_is_due():
            self.pending = True
            # An evaluation moves no random state: a DataLoader would, by being started.
            with rng.preserved_states():
                run.valid_step = -1
                run.scores = self.evaluate(self._stop_evaluation)
            if run.scores is None:  # stopped by a signal: still pending when the run is resumed
                run.stop(self._stop_reason())
                return
        if run.epoch_over or run.scores is not None:
            self._append_history()
        self.pending = False
        if run.epoch_over:
            self.events.call_all("epoch_end", "visit")
        else:
            self.events.call_all("visit")

    def _stop_evaluation(self) -> bool:
        """Called before each batch of an evaluation: whether a signal came in between."""
        self.run.valid_step += 1
        self.events.call_all("valid_step")
        if self.ranks is not None:
            self._must_stop()  # asks, if there was a signal
            self.ranks.any_of([], "an evaluation")
        return self._must_stop()

    def _stop_reason(self) -> str:
        return self.signals.caught.name if self.signals.caught else signals.OTHER_RANK

    def _evaluation_is_due(self) -> bool:
        run = self.run
        timing = self.timing
        if self.pending and timing.valid_steps > 0 and run.position % timing.valid_steps == 0:
            return True
        return run.epoch_over and timing.valid_epochs(run.epoch)

    def _append_history(self) -> None:
        entry: dict[str, Any] = {
            "epoch": self.run.epoch,
            "step": self.run.global_step,
            **self._training_means(),
        }
        if self.train_metrics is not None:
            entry.update(self.train_metrics.other_values())
        for name, score in (self.run.scores or {}).items():
            entry[f"valid_{name}"] = score
        self.run.history.append(entry)
        self._losses = [0.0, 0.0]
        self._parts = {}
        self._counts = {}

    def _rescue_rows(self) -> None:
        """After an error: delivers the rows of the steps that were done.

        What cannot be read any more is no new error.
        """
        with suppress(Exception):
            if self._positions:
                self._records = self._records[: len(self._positions)]
                self._deliver_rows()

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands, between steps."""
        run = self.run
        return {
            "epochs": run.epochs,
            "epoch": run.epoch,
            "step": run.step + run.position - run.global_step,  # after an error rows may lag
            "global_step": run.position,
            "pending": self.pending,
            "epoch_over": run.epoch_over,
            "losses": list(self._losses),
            "history": [dict(entry) for entry in run.history],
            **self._extra_state(),
        }

    def _extra_state(self) -> dict[str, Any]:
        """Sums of what a run may have beside the loss; a run without them saves none."""
        state: dict[str, Any] = {}
        if self._parts:
            state["parts"] = dict(self._parts)
        if self._counts:
            state["counts"] = {name: list(pair) for name, pair in self._counts.items()}
        others = {} if self.train_metrics is None else self.train_metrics.state_dict()
        if others:
            state["train_metrics"] = others
        return state

    def check_state(self, saved: SavedValue) -> None:
        """ValueError for a state that `load_state_dict` cannot take. Changes nothing."""
        position = saved.field("global_step").whole_number()
        # Each epoch has a step or more.
        saved.field("epoch").whole_number(minimum=1, maximum=position + 1)
        saved.field("step").whole_number(maximum=position)
        saved.field("epochs").whole_number(minimum=1)
        saved.field("pending").flag()
        saved.field("epoch_over").flag()
        loss_sum, samples = saved.field("losses").items(2)
        loss_sum.number()
        samples.number(minimum=0)
        self._check_extra_state(saved)
        for entry in saved.field("history").items():
            for name, value in entry.entries().items():
                if not isinstance(name, str):
                    entry.refuse("names of scores")
                if name in ("epoch", "step"):
                    value.whole_number()

    def _check_extra_state(self, saved: SavedValue) -> None:
        parts = saved.optional_field("parts")
        if parts is not None:
            for part in parts.entries().values():
                part.number()
        counts = saved.optional_field("counts")
        if counts is not None:
            for pair in counts.entries().values():
                total, count = pair.items(2)
                total.number()
                count.number()
        others = saved.optional_field("train_metrics")
        if others is not None and self.train_metrics is not None:
            self.train_metrics.check_state(others)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where a saved loop stood."""
        run = self.run
        run.epoch = state["epoch"]
        run.step = state["step"]
        run.global_step = state["global_step"]
        run.position = state["global_step"]
        run.epoch_over = state["epoch_over"]
        run.history = HistoryEntries(dict(entry) for entry in state["history"])
        self.pending = state["pending"]
        self._losses = list(state["losses"])
        self._parts = dict(state.get("parts", {}))
        self._counts = {name: (pair[0], pair[1]) for name, pair in state.get("counts", {}).items()}
        if self.train_metrics is not None:
            self.train_metrics.load_state_dict(state.get("train_metrics", {}))
