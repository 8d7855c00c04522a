"""compile="auto": in a long run, whether compiling is paid back, decided once, at a fixed step, by the pace so far."""

import time
from typing import Any

from halfstep.engine.events__callback import Callback
from halfstep.engine.run import Run
from halfstep.step import TrainStep
from halfstep.step.fast.compiled_forward import compiling_pays as pays
from halfstep.step.fast.compiled_forward import count_leaf_modules as leaves

FROM, AT = (
    100,
    200,
)  # the steps between which the pace is taken: before them things are captured and tuned
LEAST = 2000  # steps of a run that is worth looking at


class AutoCompile(Callback):
    """Stops at two steps to take the time. `whole`: on a CPU all of the step may become one program, which begins with
    a pass."""

    def __init__(self, step: TrainStep, steps: int, *, whole: bool = False) -> None:
        self.trained, self.steps = step, steps
        self.whole = whole and step.device.type == "cpu" and step.optimizer_kind != "host"
        self.later, self.why = False, ""
        self._began: float | None = None

    def next_stop(self, run: Run) -> int | None:
        return None if run.position >= AT else FROM if run.position < FROM else AT

    def visit(self, run: Run) -> None:
        if run.position == FROM:
            self._began = time.perf_counter()
        elif run.position == AT and self._began is not None:
            left = (time.perf_counter() - self._began) / (AT - FROM) * (self.steps - AT)
            on, self.why = pays(left, leaves(self.trained.net), self.trained.device.type)
            self.later = on and self.whole and run.epoch < run.epochs
            if not self.later:
                self.trained.compiled(on, self.why)

    def epoch_end(self, run: Run) -> None:
        if self.later:
            self.later = False
            self.trained.compiled(True, self.why)


def chooser(
    step: Any, steps: int | None, *, whole: bool = False, saved: bool = False
) -> list[Callback]:
    """The choice as a callback, where it is open and the run long enough to look. A run that is `saved` goes on bit for
    bit, which a compiled one does not: it is compiled only when that is asked for."""
    open_still = (
        isinstance(step, TrainStep)
        and step.options.compile == "auto"
        and not step.options.deterministic
    )
    if open_still and saved:
        step.compiled(
            False,
            "a run with a Checkpoint goes on bit for bit, and compiled only to rounding; say compile=True",
        )
    long = steps is not None and steps >= LEAST
    return (
        [AutoCompile(step, steps, whole=whole)]
        if open_still and not saved and long and steps is not None
        else []
    )
