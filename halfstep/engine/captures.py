"""What a model keeps captured: its training step, its evaluation, its predictions, and where its data went."""

from functools import partial
from typing import Any

import torch

from halfstep.data import Dataset
from halfstep.engine.evaluate import Labels
from halfstep.engine.feed import Feed
from halfstep.engine.sunk.evaluate import Outputs, Scores
from halfstep.engine.sunk.program import Program
from halfstep.engine.sunk.sink import check
from halfstep.engine.sunk.sunk import Sunk
from halfstep.engine.sunk.verify import Subject
from halfstep.metrics import Metrics
from halfstep.step import EvalStep, TrainStep

LONG = 40_000  # steps that are worth compiling kernels for before the first of them


class Captures:
    """Graphs kept from one fit, evaluation or prediction to the next. `wish`: True, False or "auto"."""

    def __init__(self, cell: EvalStep, wish: bool | str, verify: int) -> None:
        if wish not in (True, False, "auto"):
            raise ValueError(f"capture: expected True, False or 'auto', got {wish!r}")
        if not isinstance(verify, int) or verify < 0:
            raise ValueError(f"verify: expected a number of replays to check, or 0, got {verify!r}")
        self.cell, self.device, self.wish, self.verify = cell, cell.device, wish, verify
        self._sunk: Sunk | None = None
        self._scores: dict[int, Scores] = {}
        self._outputs: Outputs | None = None
        self._near: list[tuple[Any, Dataset]] = []  # data sets as given, and on the device

    def training(self, step: Any, feed: Feed, steps: int | None) -> Sunk | None:
        """The engine that sinks `step` over `feed` for about `steps` steps; None: it runs eagerly."""
        why = obstacle(step, self.device)
        if why and self.wish is True:
            raise ValueError(f"capture=True: this run cannot be captured: {why}")
        if why or not self.wish:
            return None
        if self._sunk is None or not self._sunk.feeds(feed):
            make = partial(Sunk.of, step, on_uncapturable="raise" if self.wish is True else "eager")
            check(Subject(step), feed, make, self.device, self.verify)
            self._sunk = make(feed)
        program = self._sunk.program
        long = steps is not None and steps >= LONG and step.options.polish == "auto"
        if long and isinstance(program, Program) and not program.polished:
            program.polish()
        return self._sunk

    def scores(self, cell: Any, metrics: Metrics, labels: Labels) -> Scores | None:
        if not self._on or not isinstance(cell, EvalStep):
            return None
        return self._scores.setdefault(id(metrics), Scores(cell, metrics, labels))

    def outputs(self) -> Outputs | None:
        if self._on and self._outputs is None:
            self._outputs = Outputs(self.cell.net, self.device)
        return self._outputs

    def feed(self, data: Any, *, named: bool) -> Feed:
        """Batches of `data`; a data set that fits is on the device from its first use on."""
        if not self._on or not isinstance(data, Dataset) or data.placement.kind != "host":
            return Feed(data, named=named)
        near = next((there for given, there in self._near if given is data.plan), None)
        if near is None:
            near = data.near(self.device)
            self._near = [*self._near[-3:], (data.plan, near)]
        return Feed(near, named=named)

    def describe(self, step: Any) -> str:
        """For report(): how a fit runs."""
        why = obstacle(step, self.device) or ("capture=False" if not self.wish else "")
        program = self._sunk.program if self._sunk else None
        if isinstance(program, Program) and program.why:
            why = program.why
        if why:
            return f"eager, step by step: {why}"
        if not isinstance(program, Program):
            return "sunk: captured as CUDA graphs when fit begins"
        graphs = program.graphs
        return f"sunk: {len(graphs)} CUDA graphs held, {graphs.captures} captured, {program.recaptures} recaptures"

    @property
    def _on(self) -> bool:
        return self.device.type == "cuda" and bool(self.wish)


def obstacle(step: Any, device: torch.device) -> str:
    """Why a step cannot be sunk; "" when it can."""
    if device.type != "cuda":
        return f"{device.type} has no graphs to capture"
    if not isinstance(step, TrainStep):
        return "the step is a cell of your own; hs.sink(cell, data) captures it"
    if not step.on_device:
        name = type(step.optimizer).__name__
        return f"{name} ({step.kind}) reads values on the host at every update; fused=True or capturable=True does not"
    hooks = step.optimizer._optimizer_step_pre_hooks or step.optimizer._optimizer_step_post_hooks
    return "the optimizer has step hooks, which a replay would not run" if hooks else ""
