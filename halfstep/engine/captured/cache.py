"""What a model keeps captured: its training step, its evaluation, its predictions, and where its data went."""

from functools import partial
from typing import Any

from halfstep.data import Dataset
from halfstep.engine.captured.eval_runner import Outputs, Scores
from halfstep.engine.captured.programs import StepProgram
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.sink import check
from halfstep.engine.captured.uncapturable import why_not_capturable
from halfstep.engine.captured.verify import VerifiedStep
from halfstep.engine.evaluate import Labels
from halfstep.engine.feed import Feed
from halfstep.metrics import Metrics
from halfstep.step import EvalStep

LONG = 40_000  # steps that are worth compiling kernels for before the first of them


class ModelCaptures:
    """Graphs kept from one fit, evaluation or prediction to the next. `wish`: True, False or "auto"."""

    def __init__(self, cell: EvalStep, wish: bool | str, verify: int) -> None:
        if wish not in (True, False, "auto"):
            raise ValueError(f"capture: expected True, False or 'auto', got {wish!r}")
        if not isinstance(verify, int) or verify < 0:
            raise ValueError(f"verify: expected a number of replays to check, or 0, got {verify!r}")
        self.cell, self.device, self.mode, self.verify = cell, cell.device, wish, verify
        self._sunk: CapturedRunner | None = None
        self._scores: Scores | None = None
        self._outputs: Outputs | None = None
        self._near: list[
            tuple[Any, list[int], Dataset]
        ] = []  # plans as given, their versions, and on the device

    def training_runner(self, step: Any, feed: Feed, steps: int | None) -> CapturedRunner | None:
        """The engine that sinks `step` over `feed` for about `steps` steps; None: it runs eagerly."""
        why = why_not_capturable(step, self.device)
        if why and self.mode is True:
            raise ValueError(f"capture=True: this run cannot be captured: {why}")
        if why or not self.mode:
            return None
        mine = self._sunk.program if self._sunk else None
        if (
            self._sunk is None
            or not isinstance(mine, StepProgram)
            or mine.step is not step
            or not self._sunk.feeds(feed)
        ):
            make = partial(
                CapturedRunner.of, step, on_uncapturable="raise" if self.mode is True else "eager"
            )
            check(VerifiedStep(step), feed, make, self.device, self.verify)
            self._sunk = make(feed)
        program = self._sunk.program
        long = steps is not None and steps >= LONG and step.options.polish == "auto"
        if long and isinstance(program, StepProgram) and not program.polished:
            program.polish()
        return self._sunk

    def eval_runner(self, cell: Any, metrics: Metrics, labels: Labels) -> Scores | None:
        if not self._on or not isinstance(cell, EvalStep):
            return None
        held = self._scores
        if held is None or (held.cell, held.metrics, held.labels) != (cell, metrics, labels):
            held = self._scores = Scores(cell, metrics, labels)
        return held

    def predict_runner(self) -> Outputs | None:
        if self._on and self._outputs is None:
            self._outputs = Outputs(self.cell.net, self.device)
        return self._outputs

    def make_feed(self, data: Any, *, named: bool) -> Feed:
        """Batches of `data`; a data set that fits is on the device from its first use on."""
        if not self._on or not isinstance(data, Dataset) or data.placement.kind != "host":
            return Feed(data, named=named)
        now = data.plan.versions  # written to in place: the copy on the device is out of date
        near = next(
            (there for given, then, there in self._near if given is data.plan and then == now), None
        )
        if near is None:
            near = data.near(self.device)
            self._near = [
                *(each for each in self._near[-3:] if each[0] is not data.plan),
                (data.plan, now, near),
            ]
        return Feed(near, named=named)

    def describe(self, step: Any) -> str:
        """For report(): how a fit runs."""
        why = why_not_capturable(step, self.device) or ("capture=False" if not self.mode else "")
        program = self._sunk.program if self._sunk else None
        if isinstance(program, StepProgram) and program.why:
            why = program.why
        if why:
            return f"eager, step by step: {why}"
        if not isinstance(program, StepProgram):
            how = (
                "captured as CUDA graphs"
                if self.device.type == "cuda"
                else "compiled as one program"
            )
            return f"sunk: {how} when fit begins"
        graphs = program.graphs
        if graphs.compile_body is not None:
            return f"sunk: programs of the whole step: {len(graphs)} held, {graphs.captures} made"
        return f"sunk: {len(graphs)} CUDA graphs held, {graphs.captures} captured, {program.recaptures} recaptures"

    @property
    def _on(self) -> bool:
        return self.device.type == "cuda" and bool(self.mode)
