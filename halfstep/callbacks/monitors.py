"""Lines about the run: losses as the seeds print them, progress by samples, learning rates."""

import math
import time
from typing import Any, Literal, TextIO

import numpy as np
import torch

from halfstep.callbacks.plateau import one_of, whole
from halfstep.engine import Callback, Row, Run
from halfstep.errors import NonFiniteError


def _single(value: float) -> Any:
    with np.errstate(over="ignore"):
        return np.float32(value)


def _exact(value: float) -> Any:
    """The digits that tell a loss from its neighbours: nine at most in float32, where all 17 would show the cast."""
    single = _single(value)
    return single if float(single) == value else value


# The separator, and the digits of the loss: MindSpore prints a float64, seed 002's version a float32.
_STYLES: dict[str, tuple[str, Any]] = {
    "plain": ("step: ", _exact),
    "mindspore": ("step: ", float),
    "seed002": ("step: ", _single),
    "seed003": ("step ", float),
}


class LossMonitor(Callback):
    """`epoch: 1 step: 20, loss is 0.53` at every `every`-th step of the run, each step's own loss, sunk or not.

    A loss that is inf or NaN is a NonFiniteError, printed step or not. A step that the loss scale skipped is no error:
    its line says so. In an update cycle the cycle's end decides. Styles: "plain" has every digit that the loss has in
    its own dtype, so that equal lines are equal losses; "mindspore" the 17 of a float64; "seed002" those of a float32;
    "seed003" is "mindspore" without a colon (`step 20`).
    """

    writes = True

    def __init__(
        self, every: int = 1, *, style: Literal["plain", "mindspore", "seed002", "seed003"] = "plain",
        file: TextIO | None = None,
    ) -> None:  # fmt: skip
        self.every = whole("LossMonitor", "every", every, 1)
        self._word, self._digits = one_of("LossMonitor", "style", style, _STYLES)
        self.file = file

    def step(self, run: Run, row: Row) -> None:
        if row.updated and not (math.isfinite(row.loss) and math.isfinite(row.cycle_loss)):
            raise NonFiniteError(self._trouble(row))
        if row.global_step % self.every == 0:
            skipped = f"skipped at scale {row.scale:g}, " if row.skipped else ""
            place = f"epoch: {row.epoch} {self._word}{row.step}"
            print(
                f"{place}, {skipped}loss is {self._digits(row.loss)!s}", file=self.file, flush=True
            )

    def _trouble(self, row: Row) -> str:
        what = (
            f"the loss is {row.loss}"
            if not math.isfinite(row.loss)
            else f"its cycle's loss is {row.cycle_loss}"
        )
        return (
            f"epoch {row.epoch} step {row.step} (step {row.global_step} of the run): {what}, and the weights moved. "
            "Go on from a checkpoint before it with a lower learning rate or clip_norm=; with loss scaling, or "
            "nonfinite='skip', such steps are dropped."
        )


class ProgressLines(Callback):
    """`loss: 2.314975  [   64/60000]` at an epoch's first step and every `every` steps after it.

    The count is of samples, with the line's batch; `start=0` leaves that out, as in seed 001. `total` is the
    samples of an epoch; where neither it nor the data says, it is `?` until one epoch has been seen. `accuracy` names a
    score: then the lines around it are printed too, the head, `Accuracy: 41.1%, Avg loss: 2.160750`, the total time.
    """

    writes = True

    def __init__(
        self, every: int = 100, *, total: int | None = None, start: Literal[0, 1] = 1, accuracy: str | None = None,
        file: TextIO | None = None,
    ) -> None:  # fmt: skip
        self.every = whole("ProgressLines", "every", every, 1)
        self.total = None if total is None else whole("ProgressLines", "total", total, 1)
        if start not in (0, 1):
            raise ValueError(
                f"ProgressLines: expected start=1 to count the line's batch or 0 not to, got {start!r}"
            )
        self.start, self.accuracy, self.file = start, accuracy, file
        self._seen, self._before, self._began = 0, 0.0, time.perf_counter()
        self._total = self.total  # as given, or as the first epoch had it

    def begin(self, run: Run) -> None:
        self._began = time.perf_counter()
        if run.resumed is None:
            self.load_state_dict({})
        if self.accuracy is not None and self.accuracy not in run.model.metrics:
            names = ", ".join(map(repr, run.model.metrics)) or "none"
            raise ValueError(
                f"ProgressLines: expected accuracy= one of the metrics ({names}), got {self.accuracy!r}"
            )

    def epoch_begin(self, run: Run) -> None:
        if self.accuracy is not None:
            self._print(f"Epoch {run.epoch}\n{'-' * 31}")

    def step(self, run: Run, row: Row) -> None:
        before = self._seen if row.step > 1 else 0
        self._seen = before + row.samples
        if (row.step - 1) % self.every == 0:
            current = self._seen if self.start else before
            known = self._total or run.epoch_samples
            total = "?" if known is None else known
            self._print(f"loss: {row.loss:>7f}  [{current:>5d}/{total:>5}]")

    def epoch_end(self, run: Run) -> None:
        self._total = self._total or self._seen

    def visit(self, run: Run) -> None:
        if self.accuracy is not None and run.scores is not None:
            accuracy, loss = 100 * run.scores[self.accuracy], run.scores["loss"]
            self._print(f"Test Error:\nAccuracy: {accuracy:>0.1f}%, Avg loss: {loss:>8f}\n")

    def end(self, run: Run) -> None:
        if self.accuracy is not None and run.error is None:
            self._print(f"Total execution time = {self._spent():.3f} sec")

    def _spent(self) -> float:
        return self._before + time.perf_counter() - self._began

    def _print(self, text: str) -> None:
        print(text, file=self.file, flush=True)

    def state_dict(self) -> dict[str, Any]:
        return (
            {"seen": self._seen, "total": self._total, "spent": self._spent()} if self._seen else {}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state = state or {"seen": 0, "total": None, "spent": 0.0}
        self._seen, self._before = state["seen"], state["spent"]
        self._total = self.total or state["total"]


class LRMonitor(Callback):
    """The learning rate that each step used: `steps` and `rates` keep every `every`-th, one per group where several.

    With `show`, a line each: `epoch: 1 step: 100, lr is 0.1`.
    """

    writes = True

    def __init__(self, every: int = 1, *, show: bool = True, file: TextIO | None = None) -> None:
        self.every, self.show, self.file = whole("LRMonitor", "every", every, 1), show, file
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
            each = row.lr if isinstance(row.lr, tuple) else (row.lr,)
            numbers = ", ".join(map(str, each))
            print(
                f"epoch: {row.epoch} step: {row.step}, lr is {numbers}", file=self.file, flush=True
            )

    def state_dict(self) -> dict[str, Any]:
        rates = torch.tensor(self.rates, dtype=torch.float64)  # exact: they are Python floats
        return {"steps": torch.tensor(self.steps, dtype=torch.int64), "rates": rates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"].tolist()
        self.rates = [tuple(r) if isinstance(r, list) else r for r in state["rates"].tolist()]
