"""A progress bar on the terminal: one line that moves, one line kept per epoch; nothing when stderr is no terminal."""

import sys
import time
from datetime import timedelta
from typing import Any

from halfstep.engine import Callback, Row, Run

_EVERY_S = 0.1  # ten refreshes a second are as many as an eye can use
_WIDTH = 20


class ProgressBar(Callback):
    """`epoch 2/10 ━━━━━─── 450/938  loss 0.41  lr 0.01  scale 65536  skipped 1  812 steps/s  eta 0:01:10`.

    `skipped` counts the run's steps. The rate and `eta` are of training; evaluations come on top. Drawn at visits.
    """

    writes = True

    def __init__(self) -> None:
        self._live: Any = None
        self._row: Row | None = None
        self._skipped = 0
        self._scores: dict[str, float] = {}
        self._from = 0  # the step of the epoch from which run.seconds counts
        self._next, self._kept = 0.0, False

    def begin(self, run: Run) -> None:
        self._from, self._row, self._scores, self._kept = run.step, None, {}, False
        if run.resumed is None:
            self._skipped = 0
        if (
            not sys.stderr.isatty()
        ):  # asked directly: FORCE_COLOR makes rich take any file for a terminal
            return
        from rich.console import Console
        from rich.live import Live

        console = Console(stderr=True, highlight=False)
        if console.is_dumb_terminal:
            return
        # stdout goes through the console only if it is this terminal too: a pipe gets its lines untouched
        self._live = Live(
            console=console, auto_refresh=False, transient=True, redirect_stdout=sys.stdout.isatty()
        )
        self._live.start()
        console.show_cursor(True)  # a process that is killed must not leave a terminal without one

    def epoch_begin(self, run: Run) -> None:
        self._from, self._kept = 0, False

    def step(self, run: Run, row: Row) -> None:
        self._row = row
        self._skipped += row.skipped

    def visit(self, run: Run) -> None:
        if self._live is None:
            return
        self._scores = run.scores or self._scores
        now = time.monotonic()
        if now >= self._next and not self._kept:
            self._next = now + _EVERY_S
            self._live.update(self._text(run, over=False), refresh=True)

    def epoch_end(self, run: Run) -> None:
        if self._live is not None:
            self._scores = run.scores or self._scores
            self._live.update("", refresh=True)
            self._live.console.print(self._text(run, over=True))
            self._kept = True  # the visit that follows has nothing to add

    def end(self, run: Run) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.update("")
            live.stop()

    def _text(self, run: Run, *, over: bool) -> Any:
        from rich.text import Text

        scores = [
            f"valid_{name} {value:.4g}"
            for name, value in self._scores.items()
            if isinstance(value, float)
        ]
        parts = [
            f"epoch {run.epoch}/{run.epochs} {self._bar(run, over=over)}",
            *self._numbers(),
            *scores,
        ]
        text = "  ".join([*parts, *self._pace(run, over=over)])
        return (
            Text(text) if over else Text(text, no_wrap=True, overflow="ellipsis")
        )  # what stays is never cut

    def _bar(self, run: Run, *, over: bool) -> str:
        if over or run.epoch_steps is None:
            return f" {run.step} steps"
        full, empty = ("━", "─") if "utf" in self._live.console.encoding.lower() else ("#", "-")
        done = _WIDTH * run.step // run.epoch_steps
        return f"{full * done}{empty * (_WIDTH - done)} {run.step}/{run.epoch_steps}"

    def _numbers(self) -> list[str]:
        row = self._row
        if row is None:
            return []
        rates = row.lr if isinstance(row.lr, tuple) else (row.lr,)
        parts = [f"loss {row.loss:.4g}", f"lr {' '.join(f'{lr:.3g}' for lr in rates)}"]
        parts += [f"scale {row.scale:g}"] if row.scale != 1 else []
        return parts + ([f"skipped {self._skipped}"] if self._skipped else [])

    def _pace(self, run: Run, *, over: bool) -> list[str]:
        steps = run.step - self._from
        if not steps or not run.seconds:
            return []
        parts = [f"{steps / run.seconds:.3g} steps/s"]
        if over:
            return [*parts, f"{run.seconds:.1f} s"]
        if run.epoch_steps is None:
            return parts
        left = (run.epochs - run.epoch) * run.epoch_steps + run.epoch_steps - run.step
        return [*parts, f"eta {timedelta(seconds=round(left * run.seconds / steps))}"]

    def state_dict(self) -> dict[str, Any]:
        return (
            {"skipped": self._skipped} if self._skipped else {}
        )  # a bar may come and go; its count is missed

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped = state.get("skipped", 0)
