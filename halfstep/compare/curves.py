"""What a run leaves for the report: thinned curves, skipped steps, times without the warm-up."""

import math
import statistics
from typing import Any

import torch

from halfstep.engine import Callback, Row, Run
from halfstep.utils.saved_state import SavedValue

MAX_POINTS = 500  # of a curve
WARM_UP_STEPS = 10  # of a process, whose time does not count: first calls of kernels, captures


class RunCurves(Callback):
    """Records every n-th step of a run, n as small as 500 points allow; survives a resume."""

    def __init__(self, total_steps: int) -> None:
        self.every_steps = max(1, math.ceil(total_steps / MAX_POINTS))
        self.curve: dict[str, list[float]] = {"step": [], "loss": [], "scale": [], "lr": []}
        self.skipped_steps: list[int] = []
        self.history: list[dict[str, Any]] = []
        self.steps = 0
        self.updates = 0
        self.samples = 0
        self.epoch_seconds: list[float] = []  # training alone, without evaluation
        self.steady_step_seconds: list[float] = []  # by epoch, without the warm-up

        # Seconds of the open epoch: in the process that was interrupted, and in all.
        self._seconds_before_resume = 0.0
        self._seconds_so_far = 0.0

        # The position in the run where this process began, and the clock and step of the epoch
        # where the warm-up ended.
        self._first_position = 0
        self._warm_seconds = 0.0
        self._warm_step = 0

    def begin(self, run: Run) -> None:
        self.history = run.history  # the run's own list: it grows, and is there when a run fails
        self._seconds_before_resume = self._seconds_so_far
        self._first_position = run.position
        self._warm_seconds = 0.0
        self._warm_step = run.step

    def next_stop(self, run: Run) -> int | None:
        # The clock is read at visits, so there has to be one at the end of the warm-up.
        warm_up_end = self._first_position + WARM_UP_STEPS
        return warm_up_end if run.position < warm_up_end else None

    def epoch_begin(self, run: Run) -> None:
        self._seconds_before_resume = 0.0
        self._warm_seconds = 0.0
        self._warm_step = 0

    def step(self, run: Run, row: Row) -> None:
        self._seconds_so_far = self._seconds_before_resume + run.seconds
        self.steps += 1
        self.updates += row.updated
        self.samples += row.samples
        if row.skipped:
            self.skipped_steps.append(row.global_step)
        if (row.global_step - 1) % self.every_steps == 0:
            self.curve["step"].append(row.global_step)
            self.curve["loss"].append(row.loss)
            self.curve["scale"].append(row.scale)
            self.curve["lr"].append(row.lr[0] if isinstance(row.lr, tuple) else row.lr)

    def visit(self, run: Run) -> None:
        if run.position <= self._first_position + WARM_UP_STEPS:
            self._warm_seconds = run.seconds
            self._warm_step = run.step

    def epoch_end(self, run: Run) -> None:
        if run.position > self._first_position + WARM_UP_STEPS:
            seconds = run.seconds - self._warm_seconds
            steps = run.step - self._warm_step
            self.steady_step_seconds.append(seconds / steps)
        self.epoch_seconds.append(self._seconds_so_far)

    @property
    def step_seconds(self) -> float | None:
        """The time of a step: the median over epochs; of a run that was all warm-up, the mean.

        Without the first epoch where there are more: on CUDA its short last batch is captured.
        """
        if self.steady_step_seconds:
            later_epochs = self.steady_step_seconds[1:]
            return statistics.median(later_epochs or self.steady_step_seconds)
        if self.steps and self.epoch_seconds:
            return sum(self.epoch_seconds) / self.steps
        return None

    def state_dict(self) -> dict[str, Any]:
        columns = {
            name: torch.tensor(values, dtype=torch.float64) for name, values in self.curve.items()
        }
        return {
            **columns,
            "steps": self.steps,
            "updates": self.updates,
            "samples": self.samples,
            "skipped": list(self.skipped_steps),
            "seconds": list(self.epoch_seconds),
            "rates": list(self.steady_step_seconds),
            "spent": self._seconds_so_far,
        }

    def check_state(self, run: Run, saved: SavedValue) -> None:
        points = saved.field("step").tensor(torch.float64)
        for name in self.curve:
            saved.field(name).tensor(torch.float64, (points.numel(),))
        for name in ("steps", "updates", "samples"):
            saved.field(name).whole_number()
        for step in saved.field("skipped").items():
            step.whole_number()
        for name in ("seconds", "rates"):
            for item in saved.field(name).items():
                item.number(finite=True)
        saved.field("spent").number(finite=True)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.curve = {name: state[name].tolist() for name in self.curve}
        self.steps = state["steps"]
        self.updates = state["updates"]
        self.samples = state["samples"]
        self.skipped_steps = list(state["skipped"])
        self.epoch_seconds = list(state["seconds"])
        self.steady_step_seconds = list(state["rates"])
        self._seconds_so_far = state["spent"]


# A checkpoint keeps the state of a callback under the name of its class. Interrupted comparisons of
# earlier versions have it as "Trace".
RunCurves.__name__ = "Trace"
