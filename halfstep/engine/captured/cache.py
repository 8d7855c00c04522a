"""What a Model keeps from one call to the next: graphs of its steps, and its data on the device."""

from functools import partial
from typing import Any, NamedTuple

from halfstep.data import Dataset
from halfstep.data.pipeline.plan import Plan
from halfstep.engine.captured.eval_runner import EvalRunner, PredictRunner
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.sink import check_verify, verify_replays
from halfstep.engine.captured.step_program import StepProgram
from halfstep.engine.captured.uncapturable import OnUncapturable, why_not_capturable
from halfstep.engine.captured.verify import VerifiedStep
from halfstep.engine.evaluate import Labels
from halfstep.engine.feed import Feed
from halfstep.metrics import Metrics
from halfstep.step import EvalStep
from halfstep.utils.checks import expect

# For so many steps, kernels are compiled before the first of them.
LONG_RUN_STEPS = 40_000

# Data sets that are remembered on the device.
MAX_DEVICE_DATASETS = 4


class DeviceDataset(NamedTuple):
    """A data set of the user's, and where it is on the device."""

    plan: Plan  # as it was on the host
    versions: list[int]  # of its tensors: they count writes in place
    dataset: Dataset


class ModelCaptures:
    """The captured runs of a Model: training, evaluation, prediction. Each method gives one.

    They give None where that part runs eagerly. `mode` is the Model's `capture`: True, False or
    "auto".
    """

    def __init__(self, eval_step: EvalStep, mode: bool | str, verify: int) -> None:
        expect(mode in (True, False, "auto"), "capture", "True, False or 'auto'", mode)
        check_verify(verify)
        self.eval_step = eval_step
        self.device = eval_step.device
        self.mode = mode
        self.verify = verify
        self._runs_graphs = self.device.type == "cuda" and bool(mode)
        self._runner: CapturedRunner | None = None
        self._scores: dict[str, EvalRunner] = {}  # by the name of the data set
        self._outputs: PredictRunner | None = None
        self._device_datasets: list[DeviceDataset] = []

    def training_runner(self, step: Any, feed: Feed, steps: int | None) -> CapturedRunner | None:
        """The runner that captures `step` over `feed`, for about `steps` steps."""
        reason = why_not_capturable(step, self.device)
        if reason and self.mode is True:
            raise ValueError(f"capture=True: this run cannot be captured: {reason}")
        if reason or not self.mode:
            return None

        # The graphs of the last fit serve again if step and data are the same.
        runner = self._runner
        program = self._step_program()
        is_same_step = program is not None and program.step is step
        if runner is None or not is_same_step or not runner.switch_feed(feed):
            runner = self._make_runner(step, feed)
            self._runner = runner

        program = self._step_program()
        is_long_run = steps is not None and steps >= LONG_RUN_STEPS
        wants_polish = is_long_run and step.options.polish == "auto"
        if wants_polish and program is not None and not program.polished:
            program.polish()
        return runner

    def eval_runner(
        self, eval_step: Any, metrics: Metrics, labels: Labels | None, *, set_name: str = ""
    ) -> EvalRunner | None:
        """The evaluation of a step by these metrics; each data set keeps graphs of its own."""
        if not self._runs_graphs or not isinstance(eval_step, EvalStep):
            return None
        scores = self._scores.get(set_name)
        parts = (eval_step, metrics, labels)
        if scores is None or (scores.eval_step, scores.metrics, scores.labels) != parts:
            scores = EvalRunner(eval_step, metrics, labels)
            self._scores[set_name] = scores
        return scores

    def predict_runner(self) -> PredictRunner | None:
        """The predictions of the network."""
        if self._runs_graphs and self._outputs is None:
            self._outputs = PredictRunner(self.eval_step.net, self.device)
        return self._outputs

    def make_feed(self, data: Any, *, named: bool) -> Feed:
        """Batches of `data`. A data set that fits is on the device from its first use on."""
        if not self._runs_graphs or not isinstance(data, Dataset):
            return Feed(data, named=named)
        if data.placement.kind != "host":
            return Feed(data, named=named)
        return Feed(self._on_device(data), named=named)

    def describe(self, step: Any) -> str:
        """How a fit runs, for report()."""
        program = self._step_program()
        reason = why_not_capturable(step, self.device)
        if not reason and not self.mode:
            reason = "capture=False"
        if program is not None and program.refusal_reason:
            reason = program.refusal_reason
        if reason:
            return f"eager, step by step: {reason}"

        if program is None:
            how = "compiled as one program"
            if self.device.type == "cuda":
                how = "captured as CUDA graphs"
            return f"sunk: {how} when fit begins"
        graphs = program.graphs
        if graphs.compile_body is not None:
            return f"sunk: programs of the whole step: {len(graphs)} held, {graphs.captures} made"
        return (
            f"sunk: {len(graphs)} CUDA graphs held, {graphs.captures} captured, "
            f"{program.recaptures} recaptures"
        )

    def _step_program(self) -> StepProgram | None:
        """The program of the last fit that was captured."""
        if self._runner is None or not isinstance(self._runner.program, StepProgram):
            return None
        return self._runner.program

    def _make_runner(self, step: Any, feed: Feed) -> CapturedRunner:
        on_uncapturable: OnUncapturable = "raise" if self.mode is True else "eager"
        make_runner = partial(CapturedRunner.for_step, step, on_uncapturable=on_uncapturable)
        if self.verify:
            verified_step = VerifiedStep(step)
            verify_replays(verified_step, feed, make_runner, self.device, replays=self.verify)
        return make_runner(feed)

    def _on_device(self, data: Dataset) -> Dataset:
        """A copy of a data set on the device: the one from before if nothing was written since."""
        versions = data.plan.column_versions
        for entry in self._device_datasets:
            if entry.plan is data.plan and entry.versions == versions:
                return entry.dataset
        dataset = data.to_device_if_unplaced(self.device)
        newest = self._device_datasets[-(MAX_DEVICE_DATASETS - 1) :]
        others = [entry for entry in newest if entry.plan is not data.plan]
        self._device_datasets = [*others, DeviceDataset(data.plan, versions, dataset)]
        return dataset
