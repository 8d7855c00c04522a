"""compile="auto" in a long run: is the time to compile paid back?

Decided once, at a fixed step, by the pace so far.
"""

import time
from typing import Any

from halfstep.engine.events import Callback
from halfstep.engine.run import Run
from halfstep.step import TrainStep

TIMING_STARTS_AT = 100  # steps: before them things are captured and tuned
TIMING_ENDS_AT = 200
MIN_STEPS = 2000  # of a run that is worth looking at


class AutoCompile(Callback):
    """Stops at two steps to take the time.

    `whole_step`: on a CPU all of the step may become one program, which begins with a pass.
    """

    def __init__(self, train_step: TrainStep, steps: int, *, whole_step: bool = False) -> None:
        self.train_step = train_step
        self.steps = steps
        on_cpu = train_step.device.type == "cpu"
        self.whole_step = whole_step and on_cpu and train_step.optimizer_kind != "host"
        self.waits_for_pass = False
        self.reason = ""
        self._started_at: float | None = None

    def next_stop(self, run: Run) -> int | None:
        if run.position < TIMING_STARTS_AT:
            return TIMING_STARTS_AT
        if run.position < TIMING_ENDS_AT:
            return TIMING_ENDS_AT
        return None

    def visit(self, run: Run) -> None:
        if run.position == TIMING_STARTS_AT:
            self._started_at = time.perf_counter()
        elif run.position == TIMING_ENDS_AT and self._started_at is not None:
            self._decide(run, time.perf_counter() - self._started_at)

    def epoch_end(self, run: Run) -> None:
        if self.waits_for_pass:
            self.waits_for_pass = False
            self.train_step.compiled(True, self.reason)

    def _decide(self, run: Run, seconds: float) -> None:
        # Only a step that could be compiled comes here, so the folder step/fast is there.
        from halfstep.step.compiled import leaves, pays

        seconds_per_step = seconds / (TIMING_ENDS_AT - TIMING_STARTS_AT)
        seconds_left = seconds_per_step * (self.steps - TIMING_ENDS_AT)
        leaf_modules = leaves(self.train_step.net)
        on, self.reason = pays(seconds_left, leaf_modules, self.train_step.device.type)
        self.waits_for_pass = on and self.whole_step and run.epoch < run.epochs
        if not self.waits_for_pass:
            self.train_step.compiled(on, self.reason)


def auto_compile_callbacks(
    step: Any, steps: int | None, *, whole_step: bool = False, has_checkpoint: bool = False
) -> list[Callback]:
    """The choice as a callback, where it is open and the run is long enough.

    A run with a Checkpoint continues bit for bit, which a compiled one does not: it is
    compiled only when that is asked for.
    """
    if not isinstance(step, TrainStep):
        return []
    if step.options.compile != "auto" or step.options.deterministic:
        return []
    if has_checkpoint:
        step.compiled(
            False,
            "a run with a Checkpoint goes on bit for bit, and compiled only to rounding; "
            "say compile=True",
        )
        return []
    if steps is None or steps < MIN_STEPS:
        return []
    return [AutoCompile(step, steps, whole_step=whole_step)]
