"""compile="auto": in a long run, whether compiling is paid back, decided once, at a fixed step, by the pace so far."""

import time
from typing import Any

from halfstep.engine.callback import Callback
from halfstep.engine.run import Run
from halfstep.engine.sunk.refusal import obstacle
from halfstep.step import TrainStep
from halfstep.step.compiled import leaves, pays

FROM, AT = 100, 200  # the steps between which the pace is taken: before them things are captured and tuned
LEAST = 2000  # steps of a run that is worth looking at


class Compiling(Callback):
    """Stops at two steps to take the time; a resumed run does what the first decided."""

    def __init__(self, step: TrainStep, steps: int) -> None:
        self.trained, self.steps = step, steps
        self.decided, self.why = False, ""
        self._began: float | None = None

    def next_stop(self, run: Run) -> int | None:
        return None if run.position >= AT else FROM if run.position < FROM else AT

    def visit(self, run: Run) -> None:
        if run.position == FROM:
            self._began = time.perf_counter()
        elif run.position == AT and not self.decided and self._began is not None:
            left = (time.perf_counter() - self._began) / (AT - FROM) * (self.steps - AT)
            on, self.why = pays(left, leaves(self.trained.net), self.trained.device.type)
            self.decided = self.trained.compiled(on, self.why) or not on
            whole = self.trained.device.type == "cpu" and not obstacle(self.trained, self.trained.device)
            self.trained.compiled.whole = whole and run.epoch < run.epochs  # from the next pass on, all of the step

    def state_dict(self) -> dict[str, Any]:
        return {"on": self.trained.compiled.on, "why": self.why} if self.decided else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.decided, self.why = bool(state), state.get("why", "")
        if state.get("on"):
            self.trained.compiled(True, self.why)


def chooser(step: Any, steps: int | None) -> list[Callback]:
    """The choice as a callback, where it is open and the run long enough to look."""
    open_still = isinstance(step, TrainStep) and step.options.compile == "auto" and not step.options.deterministic
    return [Compiling(step, steps)] if open_still and steps is not None and steps >= LEAST else []
