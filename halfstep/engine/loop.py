"""The loop: steps up to the next visit, their rows to the callbacks, evaluation, visit. It reads top to bottom."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from halfstep.engine import signals
from halfstep.engine.batch_errors import explain_batch_error
from halfstep.engine.captured.runner import CapturedRunner, raise_device_errors
from halfstep.engine.events import Events
from halfstep.engine.events__callback import Callback
from halfstep.engine.feed import Args, Feed
from halfstep.engine.run import Run
from halfstep.engine.run__rows import Row, StepPosition, read
from halfstep.engine.run__rows import rows as make
from halfstep.engine.run__timing import Timing
from halfstep.engine.signals import Signals
from halfstep.step import Record
from halfstep.step.objective import batch_size as samples_of
from halfstep.utils import rng

_LOOK_S, _LOOK_STEPS = (
    0.25,
    50,
)  # how often the host looks in when nobody says: signals are heard, bars move
_MOST = 1 << 16  # steps of a sunk visit that only time ends
Evaluate = Callable[[Callable[[], bool]], dict[str, float] | None]


class Loop:
    """Runs `step` over `feed`; `evaluate` returns scores, or None when a signal cut it short."""

    def __init__(
        self, run: Run, step: Any, feed: Feed, callbacks: Sequence[Callback], timing: Timing,
        evaluate: Evaluate | None, engine: Callable[[], CapturedRunner | None] = lambda: None,
    ) -> None:  # fmt: skip
        self.run, self.step, self.feed, self.timing, self.evaluate = (
            run,
            step,
            feed,
            timing,
            evaluate,
        )
        self.events, run.evaluates = Events(run, callbacks), evaluate is not None
        self.callbacks, self.exact = self.events.callbacks, any(c.exact for c in callbacks)
        self.signals, self.engine, self.sunk = Signals(), engine, engine()
        self.pending = False  # rows of this position are out, its evaluation and visit are not
        self.flushing = False
        self.config: dict[str, Any] = {}  # what the run was made of, in words
        self._batches: Iterator[Args] | None = None
        self._places: list[StepPosition] = []
        self._records: list[Record] = []
        self._started = 0.0
        self._losses: list[float] = [
            0.0,
            0.0,
        ]  # weighted sum and weight since the last entry of the history

    def go(self) -> None:
        """From where the run stands to its end; `end` is called whatever happens."""
        run = self.run
        with self.signals:
            try:
                self.events.first("begin")
                if self.pending:
                    self._settle()
                while not run.stopped and (run.epoch, run.epoch_over) < (run.epochs, True):
                    self._open()
                    if self.sunk is not None:
                        self._sink(self.sunk)
                    else:
                        for args in (
                            self._due()
                        ):  # the step is called from here: few frames between fit and forward
                            try:
                                self._records.append(self.step(*args))
                            except Exception as error:
                                explain_batch_error(
                                    error,
                                    f"step {run.position + 1}",
                                    args,
                                    self.feed.names,
                                    run.model.net,
                                )
                                raise
                    self._deliver()
                    if self.pending or run.epoch_over:  # a signal may come before the first step
                        self._settle()
            except BaseException as error:
                run.error = error
                self._save_rows()
                raise
            finally:
                self.events.end()
        if self.signals.caught and not signals.QUIET:
            advice = "where a Checkpoint saves the run, fit(resume='auto') goes on from here"
            print(
                f"halfstep: {self.signals.caught.name} after step {run.position}; {advice}",
                file=sys.stderr,
            )
        self.signals.raise_again()

    def _open(self) -> None:
        run = self.run
        if run.epoch_over:
            run.epoch, run.step, run.seconds, run.epoch_over = run.epoch + 1, 0, 0.0, False
        if self.sunk is None and self._batches is None:  # compile="auto" may have made up its mind
            self.sunk = self.engine()
        if run.step == 0:
            self.events.every("epoch_begin")
        self._places, self._records, run.scores = [], [], None
        self._started = time.perf_counter()

    def _due(self) -> Iterator[Args]:
        """The batches up to the next visit. A pass ends a visit, and its tail is flushed with its last step."""
        limit = self._limit()
        if self._batches is None:
            self._batches = self.feed.start()
        while len(self._places) < limit and not self.signals.caught:
            args = next(self._batches, None)
            if args is None:
                return self._pass_over()
            yield args
            self.feed.done(1)
            self._place(samples_of(args))
            if self.feed.step == self.feed.size:
                return self._pass_over()
            if self.timing.sink is None and time.perf_counter() > self._started + _LOOK_S:
                return None
        return None

    def _sink(self, sunk: CapturedRunner) -> None:
        """The steps up to the next visit, without the host."""
        run = self.run
        try:
            sunk.run(
                self._limit(), lambda: self.signals.caught, None if self.timing.sink else _LOOK_S
            )
        except Exception as error:
            explain_batch_error(
                error,
                f"step {run.position + len(sunk.done) + 1}",
                None,
                self.feed.names,
                run.model.net,
            )
            raise
        finally:
            for samples in sunk.done:
                self._place(samples)
        if sunk.over:
            self._pass_over()

    def _place(self, samples: int) -> None:
        run = self.run
        run.position += 1
        self._places.append(
            StepPosition(run.epoch, run.step + len(self._places) + 1, run.position, samples)
        )

    def _deliver(self) -> None:
        """Every step's row to every callback, in order."""
        run = self.run
        places, records = self._places, self._records
        self._places, self._records = [], []
        if self.sunk is not None:
            rows = make(places, *self.sunk.rows())
        else:
            rows = read(places, records, fingerprints=self._fingerprints()) if records else []
        run.seconds += time.perf_counter() - self._started
        self.pending = bool(rows)
        if self.signals.caught:
            run.stop(self.signals.caught.name)
        self.events.rows(self._shown(rows))
        if self.sunk is not None or getattr(self.step, "decides_on_device", False):
            raise_device_errors(self.step)

    def _shown(self, rows: list[Row]) -> Iterator[Row]:
        """The run at each row in turn."""
        run = self.run
        for row in rows:
            run.step, run.global_step = row.step, row.global_step
            if not row.skipped:  # its loss may be inf, and it moved nothing
                self._losses[0] += row.loss * row.samples
                self._losses[1] += row.samples
            yield row

    def _pass_over(self) -> None:
        if self.feed.step == 0:
            again = "Can the data be gone through again?"
            raise ValueError(
                f"fit: expected at least one batch in a pass, got none in pass {self.feed.passes}. {again}"
            )
        self._batches = None
        self.feed.ended()
        if self.timing.epoch_steps is None:
            self.run.epoch_over = True
        self.flushing = True  # an error in here leaves a torn state, unless the cycle is closed
        tail = self.step.flush() if self.sunk is None else self.sunk.flush()
        self.flushing = False
        if self._records and isinstance(tail, Record):
            self._records[-1] = tail._replace(loss=self._records[-1].loss)

    def _limit(self) -> int:
        """Steps until the host must look in."""
        run, timing = self.run, self.timing
        limits = [timing.sink or (1 if self.exact else _LOOK_STEPS if self.sunk is None else _MOST)]
        if timing.epoch_steps is not None:
            limits.append(timing.epoch_steps - run.step)
        if timing.valid_steps:
            limits.append(timing.valid_steps - run.position % timing.valid_steps)
        asked: list[int] = [
            stop for next_stop in self.events.stops if (stop := next_stop(run)) is not None
        ]
        return max(
            1, min([*limits, *(stop - run.position for stop in asked if stop > run.position)])
        )

    def _settle(self) -> None:
        """Evaluation, the end of the epoch, and the visit, in this order: a checkpoint knows all of it."""
        run, timing = self.run, self.timing
        if timing.epoch_steps is not None and run.step >= timing.epoch_steps:
            run.epoch_over = True
        run.scores = None
        if self.evaluate and self._evaluation_due():
            self.pending = True
            run.scores = self._scores(self.evaluate)
            if run.scores is None:  # cut short by a signal: still pending when the run is resumed
                assert self.signals.caught is not None
                return run.stop(self.signals.caught.name)
        if run.epoch_over or run.scores is not None:
            self._note()
        self.pending = False
        self.events.every(*(["epoch_end"] if run.epoch_over else []), "visit")

    def _evaluation_due(self) -> bool:
        run, timing = self.run, self.timing
        by_steps = (
            self.pending and timing.valid_steps > 0 and run.position % timing.valid_steps == 0
        )
        return by_steps or (run.epoch_over and timing.valid_epochs(run.epoch))

    def _scores(self, evaluate: Evaluate) -> dict[str, float] | None:
        """An evaluation moves no random state: a DataLoader would, by being started."""
        with rng.kept():
            return evaluate(lambda: self.signals.caught is not None)

    def _note(self) -> None:
        total, weight = self._losses
        entry = {
            "epoch": self.run.epoch,
            "step": self.run.global_step,
            "loss": total / weight if weight else None,
        }
        self.run.history.append(
            {**entry, **{f"valid_{k}": v for k, v in (self.run.scores or {}).items()}}
        )
        self._losses = [0.0, 0.0]

    def _save_rows(self) -> None:
        """After an error: the rows of the steps that were done. What cannot be read any more is no new error."""
        with suppress(Exception):
            if self._places:
                self._records = self._records[: len(self._places)]
                self._deliver()

    def _fingerprints(self) -> bool:
        return bool(getattr(getattr(self.step, "options", None), "fingerprint_every", 0))

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands, between steps."""
        run = self.run
        return {
            "epochs": run.epochs,
            "epoch": run.epoch,
            "step": run.step + run.position - run.global_step,  # after an error rows may lag behind
            "global_step": run.position,
            "pending": self.pending,
            "epoch_over": run.epoch_over,
            "losses": list(self._losses),
            "history": [dict(entry) for entry in run.history],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        run = self.run
        run.epoch, run.step = state["epoch"], state["step"]
        run.global_step = run.position = state["global_step"]
        self.pending, run.epoch_over = state["pending"], state["epoch_over"]
        self._losses, run.history = (
            list(state["losses"]),
            [dict(entry) for entry in state["history"]],
        )
