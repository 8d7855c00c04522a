"""Lines about the run: losses, progress by samples, learning rates, times of epochs and steps."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TextIO, TypeAlias

import numpy as np
import torch

from halfstep.engine import Callback, Row, Run
from halfstep.errors import NonFiniteError
from halfstep.utils.checks import expect, one_of, whole_number
from halfstep.utils.saved_state import SavedValue


def _as_float32(value: float) -> Any:
    with np.errstate(over="ignore"):
        return np.float32(value)


def _shortest(value: float) -> Any:
    """As a float32 if it is one: 9 digits at most tell it from its neighbours, instead of 17."""
    single = _as_float32(value)
    return single if float(single) == value else value


class LossStyle(NamedTuple):
    """The word before the step, and the number whose digits are printed as the loss."""

    step_word: str
    as_printed: Callable[[float], Any]


# MindSpore prints a float64, some of its versions a float32.
LOSS_STYLES = {
    "plain": LossStyle("step: ", _shortest),
    "mindspore": LossStyle("step: ", float),
    "mindspore-float32": LossStyle("step: ", _as_float32),
    "mindspore-1.0": LossStyle("step ", float),
}

EPOCH_TIME_LINES = {
    "mindspore": "epoch time: {:.3f} ms, per step time: {:.3f} ms",
    "mindspore-1.0": "Epoch time: {:.3f}, per step time: {:.3f}",
}

FORMER_STYLES = {"seed002": "mindspore-float32", "seed003": "mindspore-1.0"}
LossStyleName: TypeAlias = Literal["plain", "mindspore", "mindspore-float32", "mindspore-1.0"]
TimeStyleName: TypeAlias = Literal["mindspore", "mindspore-1.0"]


class LossMonitor(Callback):
    """`epoch: 1 step: 20, loss is 0.53` at every `every`-th step of the run: that step's own loss.

    A loss that is inf or NaN is a NonFiniteError, whether the step is printed or not. A step that
    the loss scale skipped is no error: its line says so. In an update cycle the end of the cycle
    decides. Styles: "plain" has every digit that the loss has in its own dtype, so that equal lines
    are equal losses; "mindspore" has the 17 digits of a float64; "mindspore-float32" those of a
    float32; "mindspore-1.0" is "mindspore" without a colon (`step 20`).
    """

    writes = True
    shows_progress = True

    def __init__(
        self,
        every: int = 1,
        *,
        style: LossStyleName = "plain",
        file: TextIO | None = None,
    ) -> None:
        self.every = whole_number("LossMonitor: every", every, minimum=1)
        style_name = FORMER_STYLES.get(style, style)
        one_of("LossMonitor: style", style_name, LOSS_STYLES)
        self._style = LOSS_STYLES[style_name]
        self.file = file

    def step(self, run: Run, row: Row) -> None:
        if row.updated and not (math.isfinite(row.loss) and math.isfinite(row.cycle_loss)):
            raise _nonfinite_loss(row)
        if row.global_step % self.every:
            return
        skipped = f"skipped at scale {row.scale:g}, " if row.skipped else ""
        loss = self._style.as_printed(row.loss)
        print(
            f"epoch: {row.epoch} {self._style.step_word}{row.step}, {skipped}loss is {loss!s}",
            file=self.file,
            flush=True,
        )


def _nonfinite_loss(row: Row) -> NonFiniteError:
    what = f"the loss is {row.loss}"
    if math.isfinite(row.loss):
        what = f"its cycle's loss is {row.cycle_loss}"
    return NonFiniteError(
        f"epoch {row.epoch} step {row.step} (step {row.global_step} of the run): {what}, and the "
        "weights moved. Go on from a checkpoint before it with a lower learning rate or "
        "clip_norm=; with loss scaling, or nonfinite='skip', such steps are dropped."
    )


class ProgressLines(Callback):
    """`loss: 2.314975  [   64/60000]` at an epoch's first step and every `every` steps after it.

    The count is of samples, with the line's batch; `start=0` leaves that batch out, as PyTorch's
    tutorial does. `total` is the number of samples in an epoch; where neither it nor the data says,
    it is `?` until one epoch has ended. `accuracy` names a score: then the lines around it are
    printed too: the head, `Accuracy: 41.1%, Avg loss: 2.160750`, the total time.
    """

    writes = True
    shows_progress = True

    def __init__(
        self,
        every: int = 100,
        *,
        total: int | None = None,
        start: Literal[0, 1] = 1,
        accuracy: str | None = None,
        file: TextIO | None = None,
    ) -> None:
        self.every = whole_number("ProgressLines: every", every, minimum=1)
        if total is not None:
            total = whole_number("ProgressLines: total", total, minimum=1)
        expect(
            start in (0, 1),
            "ProgressLines: start",
            "1 to count the line's batch or 0 not to",
            start,
        )
        self.total = total
        self.start = start
        self.accuracy = accuracy
        self.file = file
        self._epoch_samples = total  # as given, or as the first epoch had them
        self._samples_seen = 0  # in this epoch
        self._earlier_seconds = 0.0  # spent before this process, if resumed
        self._start_time = time.perf_counter()

    def begin(self, run: Run) -> None:
        self._start_time = time.perf_counter()
        if run.resumed is None:
            self.load_state_dict({})
        if self.accuracy is not None and self.accuracy not in run.model.metrics:
            names = ", ".join(map(repr, run.model.metrics)) or "none"
            raise ValueError(
                f"ProgressLines: expected accuracy= one of the metrics ({names}), "
                f"got {self.accuracy!r}"
            )

    def epoch_begin(self, run: Run) -> None:
        if self.accuracy is not None:
            self._print(f"Epoch {run.epoch}\n{'-' * 31}")

    def step(self, run: Run, row: Row) -> None:
        samples_before = self._samples_seen if row.step > 1 else 0
        self._samples_seen = samples_before + row.samples
        if (row.step - 1) % self.every == 0:
            current = self._samples_seen if self.start else samples_before
            total = self._epoch_samples or run.epoch_samples
            shown_total = "?" if total is None else total
            self._print(f"loss: {row.loss:>7f}  [{current:>5d}/{shown_total:>5}]")

    def epoch_end(self, run: Run) -> None:
        if not self._epoch_samples:
            self._epoch_samples = self._samples_seen

    def visit(self, run: Run) -> None:
        if self.accuracy is not None and run.scores is not None:
            percent = 100 * run.scores[self.accuracy]
            loss = run.scores["loss"]
            self._print(f"Test Error:\nAccuracy: {percent:>0.1f}%, Avg loss: {loss:>8f}\n")

    def end(self, run: Run) -> None:
        if self.accuracy is not None and run.error is None:
            self._print(f"Total execution time = {self._total_seconds():.3f} sec")

    def _total_seconds(self) -> float:
        return self._earlier_seconds + time.perf_counter() - self._start_time

    def _print(self, text: str) -> None:
        print(text, file=self.file, flush=True)

    def state_dict(self) -> dict[str, Any]:
        if not self._samples_seen:
            return {}
        return {
            "seen": self._samples_seen,
            "total": self._epoch_samples,
            "spent": self._total_seconds(),
        }

    def check_state(self, run: Run, saved: SavedValue) -> None:
        if not saved.entries():
            return
        saved.field("seen").whole_number()
        saved.field("spent").number(finite=True)
        total = saved.field("total")
        if total.value is not None:
            total.whole_number()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there; with an empty state, starts anew."""
        self._samples_seen = state["seen"] if state else 0
        self._earlier_seconds = state["spent"] if state else 0.0
        self._epoch_samples = self.total
        if state and not self.total:
            self._epoch_samples = state["total"]


class LRMonitor(Callback):
    """The learning rate that each step used: `steps` and `rates` keep every `every`-th of them.

    With several parameter groups, a rate is a tuple. With `show`, a line each:
    `epoch: 1 step: 100, lr is 0.1`.
    """

    writes = True

    def __init__(self, every: int = 1, *, show: bool = True, file: TextIO | None = None) -> None:
        self.every = whole_number("LRMonitor: every", every, minimum=1)
        self.show = show
        self.file = file
        self._reset()

    def _reset(self) -> None:
        self.steps: list[int] = []
        self.rates: list[float | tuple[float, ...]] = []

    def begin(self, run: Run) -> None:
        if run.resumed is None:
            self._reset()

    def step(self, run: Run, row: Row) -> None:
        if row.global_step % self.every:
            return
        self.steps.append(row.global_step)
        self.rates.append(row.lr)
        if self.show:
            rates = row.lr if isinstance(row.lr, tuple) else (row.lr,)
            numbers = ", ".join(map(str, rates))
            print(
                f"epoch: {row.epoch} step: {row.step}, lr is {numbers}",
                file=self.file,
                flush=True,
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "steps": torch.tensor(self.steps, dtype=torch.int64),
            "rates": torch.tensor(self.rates, dtype=torch.float64),  # exact: Python floats
        }

    def check_state(self, run: Run, saved: SavedValue) -> None:
        steps = saved.field("steps").tensor(torch.int64)
        rates = saved.field("rates").tensor(torch.float64)
        if steps.dim() != 1:
            saved.field("steps").refuse("a vector")
        if rates.dim() not in (1, 2) or len(rates) != len(steps):
            saved.field("rates").refuse(f"rates of {len(steps)} steps")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"].tolist()
        self.rates = []
        for rate in state["rates"].tolist():
            self.rates.append(tuple(rate) if isinstance(rate, list) else rate)


class TimeMonitor(Callback):
    """`epoch time: 65047.685 ms, per step time: 41.644 ms` after each epoch.

    Training only: evaluations, callbacks and checkpoints are left out. An epoch that was
    interrupted and resumed counts with both its parts. Style "mindspore-1.0" is
    `Epoch time: 65047.685, per step time: 41.644`.
    """

    writes = True

    def __init__(self, *, style: TimeStyleName = "mindspore", file: TextIO | None = None) -> None:
        style_name = FORMER_STYLES.get(style, style)
        one_of("TimeMonitor: style", style_name, EPOCH_TIME_LINES)
        self._line = EPOCH_TIME_LINES[style_name]
        self.file = file
        self._reset()

    def _reset(self) -> None:
        self._earlier_seconds = 0.0  # of this epoch, in the process that was interrupted
        self._epoch_seconds = 0.0

    def begin(self, run: Run) -> None:
        if run.resumed is None:
            self._reset()

    def epoch_begin(self, run: Run) -> None:
        self._reset()

    def step(self, run: Run, row: Row) -> None:
        self._epoch_seconds = self._earlier_seconds + run.seconds

    def epoch_end(self, run: Run) -> None:
        ms = 1000 * self._epoch_seconds
        print(self._line.format(ms, ms / run.step), file=self.file, flush=True)

    def state_dict(self) -> dict[str, Any]:
        return {"spent": self._epoch_seconds} if self._epoch_seconds else {}

    def check_state(self, run: Run, saved: SavedValue) -> None:
        spent = saved.optional_field("spent")
        if spent is not None:
            spent.number(finite=True)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._earlier_seconds = state.get("spent", 0.0)
        self._epoch_seconds = self._earlier_seconds


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds per step, over `steps` steps after the warm-up.

    Steps between two visits of the host share their mean.
    """

    steps: int
    mean: float
    median: float
    p10: float
    p90: float
    p99: float

    def __str__(self) -> str:
        return (
            f"step time: median {self.median:.3f} ms, mean {self.mean:.3f}, "
            f"10% {self.p10:.3f}, 90% {self.p90:.3f}, 99% {self.p99:.3f}, over {self.steps} steps"
        )


class StepTimer(Callback):
    """Step times: `times()` at any moment, and a line at the end of the run.

    The first `warmup` steps of a process do not count. The clock is read at visits, so the steps of
    a visit share its mean. `exact=True` makes every step a visit, and waits for the device at each.
    `every=n` also prints each n-th step's time: `17.102 ms`.
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
        self.warmup = whole_number("StepTimer: warmup", warmup, minimum=0)
        self.every = whole_number("StepTimer: every", every, minimum=0)
        self.exact = exact
        self.show = show
        self.file = file
        # One entry per visit: the mean time of its steps, and their number.
        self._visit_ms: list[float] = []
        self._visit_steps: list[int] = []
        self._warmup_steps_left = self.warmup
        self._clock = 0.0  # run.seconds at the last visit
        self._rows: list[Row] = []  # of the steps since the last visit

    def begin(self, run: Run) -> None:
        self._warmup_steps_left = self.warmup
        self._clock = run.seconds
        self._rows = []
        if run.resumed is None:
            self._visit_ms = []
            self._visit_steps = []

    def epoch_begin(self, run: Run) -> None:
        self._clock = 0.0  # run.seconds starts again

    def step(self, run: Run, row: Row) -> None:
        self._rows.append(row)

    def visit(self, run: Run) -> None:
        rows = self._rows
        seconds = run.seconds - self._clock
        self._rows = []
        self._clock = run.seconds
        if not rows:
            return

        ms_per_step = 1000 * seconds / len(rows)
        for row in rows:
            if self.every and row.global_step % self.every == 0:
                print(f"{ms_per_step} ms", file=self.file, flush=True)

        # A visit with a warm-up step in it is warm-up.
        if self._warmup_steps_left > 0:
            self._warmup_steps_left -= len(rows)
            return
        self._visit_ms.append(ms_per_step)
        self._visit_steps.append(len(rows))

    def end(self, run: Run) -> None:
        if self.show:
            times = self.times() or "step time: no steps after the warm-up"
            print(times, file=self.file, flush=True)

    def times(self) -> StepTimes | None:
        """The statistics so far; None while only the warm-up has been seen."""
        if not self._visit_ms:
            return None
        ms = np.array(self._visit_ms)
        steps = np.array(self._visit_steps)
        order = np.argsort(ms, kind="stable")
        sorted_ms = ms[order]
        steps_up_to = np.cumsum(steps[order])
        step_count = steps_up_to[-1]

        # Percentiles by nearest rank, with each visit as often as it has steps.
        def percentile(share: float) -> float:
            return float(sorted_ms[np.searchsorted(steps_up_to, share * step_count)])

        return StepTimes(
            steps=int(step_count),
            mean=float((ms * steps).sum() / step_count),
            median=percentile(0.5),
            p10=percentile(0.1),
            p90=percentile(0.9),
            p99=percentile(0.99),
        )

    def state_dict(self) -> dict[str, Any]:
        if not self._visit_ms:
            return {}
        return {
            "ms": torch.tensor(self._visit_ms, dtype=torch.float64),
            "counts": torch.tensor(self._visit_steps, dtype=torch.int64),
        }

    def check_state(self, run: Run, saved: SavedValue) -> None:
        if not saved.entries():
            return
        times = saved.field("ms").tensor(torch.float64)
        if times.dim() != 1:
            saved.field("ms").refuse("a vector")
        saved.field("counts").tensor(torch.int64, times.shape)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._visit_ms = state["ms"].tolist() if state else []
        self._visit_steps = state["counts"].tolist() if state else []
