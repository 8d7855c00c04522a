"""A progress bar on the terminal: one line that moves, and one line that stays per epoch.

Nothing is drawn when stderr is no terminal. The bar is rich's. Where the package rich is not
installed, only the lines that stay are printed.
"""

import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from halfstep.engine import Callback, Row, Run
from halfstep.utils.saved_state import SavedValue
from halfstep.utils.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

REFRESH_EVERY_S = 0.1  # ten times a second are as many as an eye can use
BAR_WIDTH = 20  # columns


class ProgressBar(Callback):
    """`epoch 2/10 ━━━━━╺━━ 450/938  loss 0.41  lr 0.01  skipped 1  812 steps/s  eta 0:01:10`.

    With loss scaling, `scale 65536` too. `skipped` counts the run's steps. The rate and `eta` are
    of training; evaluations come on top. Drawn at visits.
    """

    writes = True

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._plain_lines = False  # a terminal without rich
        self._skipped_steps = 0
        self._reset_epoch(first_step=0)
        self._row: Row | None = None
        self._scores: dict[str, float] = {}
        self._next_refresh = 0.0

    def _reset_epoch(self, first_step: int) -> None:
        self._first_step = first_step  # the step of the epoch from which run.seconds counts
        self._epoch_is_printed = False

    def begin(self, run: Run) -> None:
        self._reset_epoch(first_step=run.step)
        self._row = None
        self._scores = {}
        self._plain_lines = False
        if run.resumed is None:
            self._skipped_steps = 0
        # The file itself says it: FORCE_COLOR makes rich take any file for a terminal.
        if not sys.stderr.isatty():
            return
        try:
            self._start_bar()
        except ModuleNotFoundError:
            self._plain_lines = True

    def _start_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(stderr=True, highlight=False)
        if console.is_dumb_terminal:
            return
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(BAR_WIDTH),
            TextColumn("{task.fields[numbers]}", markup=False),
            console=console,
            auto_refresh=False,
            transient=True,
            # Only if stdout is this terminal too: a pipe gets its lines untouched.
            redirect_stdout=sys.stdout.isatty(),
        )
        self._progress.start()
        self._task = self._progress.add_task("", visible=False, total=None, numbers="")
        # A process that is killed must not leave a terminal without a cursor.
        console.show_cursor(True)

    def epoch_begin(self, run: Run) -> None:
        self._reset_epoch(first_step=0)

    def step(self, run: Run, row: Row) -> None:
        self._row = row
        self._skipped_steps += row.skipped

    def visit(self, run: Run) -> None:
        if self._progress is None or self._task is None:
            return
        self._scores = run.scores or self._scores
        now = time.monotonic()
        # The visit after the end of an epoch has nothing to add to the line that stays.
        if now < self._next_refresh or self._epoch_is_printed:
            return
        self._next_refresh = now + REFRESH_EVERY_S
        position = f"{run.step} steps"
        if run.epoch_steps is not None:
            position = f"{run.step}/{run.epoch_steps}"
        self._progress.update(
            self._task,
            description=f"epoch {run.epoch}/{run.epochs}",
            total=run.epoch_steps,
            completed=run.step,
            numbers="  ".join([position, *self._numbers(), *self._moving_pace(run)]),
            visible=True,
        )
        self._progress.refresh()

    def epoch_end(self, run: Run) -> None:
        if self._progress is None and not self._plain_lines:
            return
        self._scores = run.scores or self._scores
        parts = [f"epoch {run.epoch}/{run.epochs}", f"{run.step} steps"]
        parts += self._numbers()
        parts += self._epoch_pace(run)
        line = "  ".join(parts)
        self._epoch_is_printed = True
        if self._progress is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._hide_bar(self._progress)
            self._progress.console.print(line, markup=False, emoji=False)

    def end(self, run: Run) -> None:
        progress = self._progress
        if progress is not None:
            self._hide_bar(progress)
            self._progress = None
            self._task = None
            progress.stop()

    def _hide_bar(self, progress: "Progress") -> None:
        if self._task is not None:
            progress.update(self._task, visible=False)
        progress.refresh()

    def _numbers(self) -> list[str]:
        """Loss, learning rates, loss scale and skipped steps of the last row, then the scores."""
        parts = []
        row = self._row
        if row is not None:
            rates = row.lr if isinstance(row.lr, tuple) else (row.lr,)
            parts.append(f"loss {row.loss:.4g}")
            parts.append(f"lr {' '.join(f'{lr:.3g}' for lr in rates)}")
            if row.scale != 1:
                parts.append(f"scale {row.scale:g}")
            if self._skipped_steps:
                parts.append(f"skipped {self._skipped_steps}")
        for name, score in self._scores.items():
            if isinstance(score, float):
                parts.append(f"valid_{printable(name)} {score:.4g}")
        return parts

    def _moving_pace(self, run: Run) -> list[str]:
        """Steps a second, and the time that the rest of the run takes at this rate."""
        steps = run.step - self._first_step
        if not steps or not run.seconds:
            return []
        parts = [f"{steps / run.seconds:.3g} steps/s"]
        if run.epoch_steps is not None:
            epochs_left = run.epochs - run.epoch
            steps_left = epochs_left * run.epoch_steps + run.epoch_steps - run.step
            seconds_left = round(steps_left * run.seconds / steps)
            parts.append(f"eta {timedelta(seconds=seconds_left)}")
        return parts

    def _epoch_pace(self, run: Run) -> list[str]:
        """Steps a second, and the seconds that the epoch took."""
        steps = run.step - self._first_step
        if not steps or not run.seconds:
            return []
        return [f"{steps / run.seconds:.3g} steps/s", f"{run.seconds:.1f} s"]

    def state_dict(self) -> dict[str, Any]:
        # Empty where nothing was skipped: a resumed run may leave the bar out then.
        return {"skipped": self._skipped_steps} if self._skipped_steps else {}

    def check_state(self, run: Run, saved: SavedValue) -> None:
        skipped = saved.optional_field("skipped")
        if skipped is not None:
            skipped.whole_number()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped_steps = state.get("skipped", 0)
