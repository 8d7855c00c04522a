"""The progress of a run: a bar in a terminal, a table in a notebook, lines elsewhere.

`fit` adds one by itself, and so does `halfstep train`. This file decides what is shown; where and
how is decided in progress_displays.py.
"""

import signal
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal, TextIO

from halfstep.callbacks.progress_displays import (
    Display,
    Number,
    Position,
    labelled,
    start_display,
)
from halfstep.engine import Callback, Run
from halfstep.utils.checks import one_of
from halfstep.utils.saved_state import SavedValue
from halfstep.utils.text import plural, printable

Style = Literal["auto", "lines"]
STYLES = ("auto", "lines")

# Less than the time between two visits of a captured run, so that each of them is drawn.
REFRESH_EVERY_S = 0.2
SHOWN_RATES = 3  # of parameter groups


class ProgressBar(Callback):
    """`epoch 2/10 ━━━━━╺━━ 450/938  loss 0.4123  eta 0:01:10  812 steps/s  lr 0.01`.

    A bar on a terminal (of the package rich, on stderr), a table in a notebook, and elsewhere only
    the lines that stay: one for each epoch and each evaluation. `fit` adds one by itself unless
    `progress=False`. `style="lines"` draws nothing that moves; `file` is where lines go in place
    of stderr. With loss scaling, `scale 65536` and the run's `skipped` steps too. The rate and
    `eta` are of training; evaluations come on top.
    """

    writes = True
    shows_progress = True

    def __init__(self, style: Style = "auto", *, file: TextIO | None = None) -> None:
        one_of("ProgressBar: style", style, STYLES)
        self.style = style
        self.file = file
        self._display: Display | None = None
        self._run: Run | None = None
        self._earlier_skipped = 0  # before this process, if resumed
        self._scores: dict[str, float] = {}
        self._next_refresh = 0.0
        self._pass_steps: int | None = None  # of the last epoch, where the data has no length
        self._reset_epoch(first_step=0)

    def _reset_epoch(self, first_step: int) -> None:
        self._first_step = first_step  # the step of the epoch from which run.seconds counts
        self._kept_step = first_step  # the last one that a line stays of

    def begin(self, run: Run) -> None:
        self._reset_epoch(first_step=run.step)
        self._scores = {}
        self._next_refresh = 0.0
        self._pass_steps = None
        if run.resumed is None:
            self._earlier_skipped = 0
        self._run = run
        self._display = None
        try:
            self._display = start_display(self.style, self.file)
            if self._display is not None and run.resumed is not None:
                self._display.note(_resume_note(run))
        except (OSError, ValueError):
            self._give_up()

    def epoch_begin(self, run: Run) -> None:
        self._reset_epoch(first_step=0)
        self._move(run)  # the first step of a run may take long: it is compiled

    def visit(self, run: Run) -> None:
        if run.scores is None or run.epoch_over:
            self._move(run)
        else:
            self._scores = run.scores
            self._keep(run, f"{_epoch(run)} step {run.step}", _history_numbers(run))

    def valid_step(self, run: Run) -> None:
        if time.monotonic() < self._next_refresh or self._display is None:
            return
        self._next_refresh = time.monotonic() + REFRESH_EVERY_S
        position = Position(run.valid_step, run.valid_steps)
        self._draw(self._display, f"{_epoch(run)} valid", position, _loss(run))

    def epoch_end(self, run: Run) -> None:
        self._scores = run.scores or self._scores
        self._pass_steps = run.step
        self._keep(run, _epoch(run), _history_numbers(run))

    def end(self, run: Run) -> None:
        if self._display is not None:
            self._end_display(run)
        self._earlier_skipped = self._skipped()
        self._run = None

    def _end_display(self, run: Run) -> None:
        if run.step > self._kept_step and run.row is not None:
            position = Position(run.step, run.epoch_steps)
            self._keep(
                run, f"{_epoch(run)} step {position}", [*_loss(run), *_training_metrics(run)]
            )
        if self._display is None:
            return
        is_signal = run.stopped in signal.Signals.__members__  # `fit` says it by itself
        try:
            if run.stopped is not None and not is_signal:
                self._display.note(
                    f"stopped after step {run.global_step}: {printable(run.stopped)}"
                )
            self._display.end()
        except (OSError, ValueError):
            self._give_up()
        self._display = None

    # Drawing.

    def _move(self, run: Run) -> None:
        """Draws the moving line, if it is time. After an epoch's line it has nothing to add."""
        if self._display is None or (run.epoch_over and self._kept_step == run.step):
            return
        now = time.monotonic()
        if now < self._next_refresh:
            return
        self._next_refresh = now + REFRESH_EVERY_S
        total = run.epoch_steps
        is_estimate = False
        if total is None and self._pass_steps is not None and run.step <= self._pass_steps:
            total = self._pass_steps  # most data that says no length has the same in each pass
            is_estimate = True
        # The most important first: a narrow terminal shows the beginning of the line.
        numbers = [*_loss(run), *self._moving_pace(run, total), *_training_metrics(run)]
        numbers += [*self._settings(run), *self._valid()]
        self._draw(self._display, _epoch(run), Position(run.step, total, is_estimate), numbers)

    def _draw(self, display: Display, head: str, position: Position, numbers: list[Number]) -> None:
        try:
            display.move(head, position, numbers)
        except (OSError, ValueError):
            self._give_up()

    def _keep(self, run: Run, head: str, scores: list[Number]) -> None:
        """Prints a line that stays."""
        self._kept_step = run.step
        if self._display is None:
            return
        numbers = [*scores, *self._settings(run), *self._epoch_pace(run)]
        try:
            self._display.keep(head, numbers)
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        """Shows nothing from here on: a terminal or pipe that is gone must not end a training."""
        display = self._display
        self._display = None
        if display is not None:
            display.abandon()

    # Numbers.

    def _valid(self) -> list[Number]:
        """The scores of the last evaluation."""
        numbers = []
        for name, score in self._scores.items():
            if isinstance(score, float):
                numbers.append(labelled(f"valid_{name}", four_digits(score)))
        return numbers

    def _settings(self, run: Run) -> list[Number]:
        """Learning rates, loss scale and skipped steps of the last row."""
        row = run.row
        if row is None:
            return []
        rates = row.lr if isinstance(row.lr, tuple) else (row.lr,)
        rates = tuple(dict.fromkeys(rates))
        texts = [f"{rate:.3g}" for rate in rates]
        if len(texts) > SHOWN_RATES:
            texts = [texts[0], "…", texts[-1]]
        numbers = [labelled("lr", " ".join(texts))]
        if row.scale != 1:
            numbers.append(labelled("scale", f"{row.scale:g}"))
        skipped = self._skipped()
        if skipped:
            # Beside numbers of one epoch: this one is of the whole run.
            numbers.append(labelled("skipped", f"{skipped} in all"))
        return numbers

    def _moving_pace(self, run: Run, epoch_steps: int | None) -> list[Number]:
        """The time that the rest of the run takes at this rate, and steps a second."""
        steps = run.step - self._first_step
        if steps <= 0 or not run.seconds:
            return []
        numbers = []
        if epoch_steps is not None:
            epochs_left = run.epochs - run.epoch
            steps_left = epochs_left * epoch_steps + epoch_steps - run.step
            seconds_left = round(steps_left * run.seconds / steps)
            numbers.append(labelled("eta", str(timedelta(seconds=seconds_left))))
        rate = _rate(steps / run.seconds)
        return [*numbers, Number("steps/s", rate, f"{rate} steps/s")]

    def _epoch_pace(self, run: Run) -> list[Number]:
        """The seconds that the epoch took, and in a table, which has room, steps a second."""
        steps = run.step - self._first_step
        if steps <= 0 or not run.seconds:
            return []
        seconds = f"{run.seconds:.1f} s"
        return [Number("steps/s", _rate(steps / run.seconds), ""), Number("time", seconds, seconds)]

    # What is remembered over a resume.

    def _skipped(self) -> int:
        """Steps that the whole run has skipped so far."""
        return self._earlier_skipped + (0 if self._run is None else self._run.skipped)

    def state_dict(self) -> dict[str, Any]:
        # Empty where nothing was skipped: a resumed run may leave the bar out then.
        skipped = self._skipped()
        return {"skipped": skipped} if skipped else {}

    def check_state(self, run: Run, saved: SavedValue) -> None:
        skipped = saved.optional_field("skipped")
        if skipped is not None:
            skipped.whole_number()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._earlier_skipped = state.get("skipped", 0)


def add_progress(
    callbacks: Sequence[Callback],
    progress: bool | str,
    *,
    file: TextIO | None = None,
    argument: str = "progress",
) -> list[Callback]:
    """The callbacks, with a ProgressBar behind them unless one of them shows the progress already.

    `progress` is True, False or "lines"; `file`: see ProgressBar.
    """
    if not isinstance(progress, bool) and progress != "lines":
        raise ValueError(f"{argument}: expected True, False or 'lines', got {progress!r}")
    shown_already = any(callback.shows_progress for callback in callbacks)
    if not progress or shown_already:
        return list(callbacks)
    style: Style = "auto" if progress is True else "lines"
    return [*callbacks, ProgressBar(style, file=file)]


def four_digits(value: float) -> str:
    """Four digits, zeros at the end too, so that a line does not change its length: "0.8520"."""
    return f"{value:#.4g}".removesuffix(".")


def _resume_note(run: Run) -> str:
    """Where a resumed run goes on; of one that has all its epochs, that nothing is left to do."""
    place = printable(run.resumed)
    if run.epoch_over and run.epoch >= run.epochs:
        return (
            f"{place} has {plural(run.epoch, 'epoch')} already, and fit was asked for "
            f"{run.epochs}: nothing is trained. To train further: {run.epoch + 1} epochs, or more"
        )
    epoch = run.epoch + run.epoch_over
    return f"goes on after step {run.position}, in epoch {epoch} of {run.epochs}, from {place}"


def _epoch(run: Run) -> str:
    return f"epoch {run.epoch}/{run.epochs}"


def _loss(run: Run) -> list[Number]:
    """The loss of the last step; nothing before the first."""
    return [] if run.row is None else [labelled("loss", four_digits(run.row.loss))]


def _training_metrics(run: Run) -> list[Number]:
    """The metrics on training data since the last entry of the history."""
    numbers = []
    for name in run.train_metrics:
        value = run.training.get(name)
        if isinstance(value, float):
            numbers.append(labelled(name, four_digits(value)))
    return numbers


def _rate(steps_per_second: float) -> str:
    if steps_per_second >= 1000:
        return f"{steps_per_second:,.0f}"
    return f"{steps_per_second:#.3g}".removesuffix(".")


def _history_numbers(run: Run) -> list[Number]:
    """The newest entry of the history: mean losses and scores that are one number each."""
    numbers = []
    for name, value in run.history[-1].items():
        if isinstance(value, float):
            numbers.append(labelled(name, four_digits(value)))
    return numbers
