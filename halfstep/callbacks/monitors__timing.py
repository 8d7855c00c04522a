"""Times: of epochs, as MindSpore prints them, and of steps, as statistics without the warm-up."""

from dataclasses import dataclass
from typing import Any, Literal, TextIO

import numpy as np
import torch

from halfstep.callbacks.plateau import one_of, whole
from halfstep.engine import Callback, Row, Run

_LINES = {
    "mindspore": "epoch time: {:.3f} ms, per step time: {:.3f} ms",
    "seed003": "Epoch time: {:.3f}, per step time: {:.3f}",
}


class TimeMonitor(Callback):
    """`epoch time: 65047.685 ms, per step time: 41.644 ms` after each epoch.

    Training only: evaluations, callbacks and checkpoints are left out. An epoch that was interrupted and resumed counts
    as a whole. Style "seed003" is `Epoch time: 65047.685, per step time: 41.644`.
    """

    writes = True

    def __init__(
        self, *, style: Literal["mindspore", "seed003"] = "mindspore", file: TextIO | None = None
    ) -> None:
        self._line: str = one_of("TimeMonitor", "style", style, _LINES)
        self.file = file
        self._before = 0.0  # this epoch's seconds in the process that was interrupted
        self._spent = 0.0

    def begin(self, run: Run) -> None:
        if run.resumed is None:
            self._before = self._spent = 0.0

    def epoch_begin(self, run: Run) -> None:
        self._before = self._spent = 0.0

    def step(self, run: Run, row: Row) -> None:
        self._spent = self._before + run.seconds

    def epoch_end(self, run: Run) -> None:
        ms = 1000 * self._spent
        print(self._line.format(ms, ms / run.step), file=self.file, flush=True)

    def state_dict(self) -> dict[str, Any]:
        return {"spent": self._spent} if self._spent else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._before = self._spent = state.get("spent", 0.0)


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds per step, over `steps` steps after the warm-up. Steps of one visit share its mean."""

    steps: int
    mean: float
    median: float
    p10: float
    p90: float
    p99: float

    def __str__(self) -> str:
        spread = f"10% {self.p10:.3f}, 90% {self.p90:.3f}, 99% {self.p99:.3f}"
        return f"step time: median {self.median:.3f} ms, mean {self.mean:.3f}, {spread}, over {self.steps} steps"


class StepTimer(Callback):
    """Step times: `times()` whenever asked, and a line at the end. The first `warmup` steps of a process do not count.

    The clock is read at visits, so the steps of a visit share its mean. `exact=True` makes every step a visit, and the
    device is waited for at each. `every=n` also prints each n-th step's time as seed 003 does: `17.102 ms`.
    """

    writes = True

    def __init__(
        self,
        *,
        warmup: int = 10,
        every: int = 0,
        exact: bool = False,
        show: bool = True,
        file: TextIO | None = None,
    ) -> None:
        self.warmup, self.every = (
            whole("StepTimer", "warmup", warmup),
            whole("StepTimer", "every", every),
        )
        self.exact, self.show, self.file = exact, show, file
        self._ms: list[
            float
        ] = []  # one entry per visit: the mean of its steps, and how many they were
        self._counts: list[int] = []
        self._left, self._clock = warmup, 0.0
        self._rows: list[Row] = []

    def begin(self, run: Run) -> None:
        self._left, self._clock, self._rows = self.warmup, run.seconds, []
        if run.resumed is None:
            self._ms, self._counts = [], []

    def epoch_begin(self, run: Run) -> None:
        self._clock = 0.0  # run.seconds starts again

    def step(self, run: Run, row: Row) -> None:
        self._rows.append(row)

    def visit(self, run: Run) -> None:
        rows, self._rows = self._rows, []
        spent, self._clock = run.seconds - self._clock, run.seconds
        if not rows:
            return
        ms = 1000 * spent / len(rows)
        for row in rows:
            if self.every and row.global_step % self.every == 0:
                print(f"{ms} ms", file=self.file, flush=True)
        if self._left > 0:  # a visit with a warm-up step in it is warm-up
            self._left -= len(rows)
            return
        self._ms.append(ms)
        self._counts.append(len(rows))

    def end(self, run: Run) -> None:
        if self.show:
            times = self.times()
            print(
                times if times else "step time: no steps after the warm-up",
                file=self.file,
                flush=True,
            )

    def times(self) -> StepTimes | None:
        """The statistics so far; None while only the warm-up has been seen."""
        if not self._ms:
            return None
        ms, counts = np.array(self._ms), np.array(self._counts)
        order = np.argsort(ms, kind="stable")
        upto = np.cumsum(
            counts[order]
        )  # percentiles by nearest rank, each visit as often as it has steps

        def at(share: float) -> float:
            return float(ms[order][np.searchsorted(upto, share * upto[-1])])

        mean = float((ms * counts).sum() / upto[-1])
        return StepTimes(int(upto[-1]), mean, at(0.5), at(0.1), at(0.9), at(0.99))

    def state_dict(self) -> dict[str, Any]:
        if not self._ms:
            return {}
        return {
            "ms": torch.tensor(self._ms, dtype=torch.float64),
            "counts": torch.tensor(self._counts).long(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._ms = state["ms"].tolist() if state else []
        self._counts = state["counts"].tolist() if state else []
