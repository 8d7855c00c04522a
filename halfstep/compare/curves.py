"""What a run leaves for the report: a thinned curve, its skipped steps, its times without the warm-up."""

import math
import statistics
from typing import Any

import torch

from halfstep.engine import Callback, Row, Run

POINTS = 500
WARM_UP = 10  # steps of a process that do not count: first calls of kernels, captures


class Trace(Callback):
    """Keeps every n-th step, n as small as 500 points allow. Goes on over a resume with all it knew."""

    def __init__(self, steps: int) -> None:
        self.every = max(1, math.ceil(steps / POINTS))
        self.curve: dict[str, list[float]] = {"step": [], "loss": [], "scale": [], "lr": []}
        self.skipped: list[int] = []
        self.history: list[dict[str, Any]] = []
        self.steps = self.updates = self.samples = 0
        self.seconds: list[float] = []  # by epoch, training alone
        self.rates: list[float] = []  # seconds per step of an epoch's steady part
        self._before = self._spent = (
            0.0  # this epoch's seconds: in the process that was interrupted, and in all
        )
        self._start, self._mark = 0, (0.0, 0)

    def begin(self, run: Run) -> None:
        self.history = run.history  # the run's own: it grows with it, and is there when it fails
        self._before, self._start, self._mark = self._spent, run.position, (0.0, run.step)

    def next_stop(self, run: Run) -> int | None:
        warm = self._start + WARM_UP  # a visit there: the clock is read at visits
        return warm if run.position < warm else None

    def epoch_begin(self, run: Run) -> None:
        self._before, self._mark = 0.0, (0.0, 0)

    def step(self, run: Run, row: Row) -> None:
        self._spent = self._before + run.seconds
        self.steps, self.updates, self.samples = (
            self.steps + 1,
            self.updates + row.updated,
            self.samples + row.samples,
        )
        if row.skipped:
            self.skipped.append(row.global_step)
        if (row.global_step - 1) % self.every == 0:
            rate = row.lr[0] if isinstance(row.lr, tuple) else row.lr
            for name, value in zip(
                self.curve, (row.global_step, row.loss, row.scale, rate), strict=True
            ):
                self.curve[name].append(value)

    def visit(self, run: Run) -> None:
        if run.position <= self._start + WARM_UP:
            self._mark = (run.seconds, run.step)

    def epoch_end(self, run: Run) -> None:
        seconds, step = self._mark
        if run.position > self._start + WARM_UP:
            self.rates.append((run.seconds - seconds) / (run.step - step))
        self.seconds.append(self._spent)

    @property
    def step_seconds(self) -> float | None:
        """The median over epochs, without the first where there are more: on CUDA the first short batch is captured
        at its end. Of a run that was all warm-up, the mean of it."""
        if self.rates:
            return statistics.median(self.rates[1:] or self.rates)
        return sum(self.seconds) / self.steps if self.steps and self.seconds else None

    def state_dict(self) -> dict[str, Any]:
        columns = {
            name: torch.tensor(values, dtype=torch.float64) for name, values in self.curve.items()
        }
        numbers = {name: getattr(self, name) for name in ("steps", "updates", "samples")}
        lists = {name: list(getattr(self, name)) for name in ("skipped", "seconds", "rates")}
        return {**columns, **numbers, **lists, "spent": self._spent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.curve = {name: state[name].tolist() for name in self.curve}
        self.steps, self.updates, self.samples = state["steps"], state["updates"], state["samples"]
        self.skipped, self.seconds, self.rates = (
            list(state[name]) for name in ("skipped", "seconds", "rates")
        )
        self._spent = state["spent"]
