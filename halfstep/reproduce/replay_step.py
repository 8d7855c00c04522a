"""One step of a finished run again, bit for bit, with everything that it computed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep import checkpoint
from halfstep.checkpoint.health import read_health
from halfstep.engine import Callback, Row, Run
from halfstep.experiment.builders import Builder, RunParts, call_builder
from halfstep.reproduce.recorded import RecordedSteps


@dataclass
class Replayed:
    """What one step did.

    Keys of `inputs` and `outputs` are module names, those of `gradients` parameter names.
    `gradients` are as the backward pass made them: multiplied by the loss scale. `before` and
    `after` are 64-bit fingerprints of every tensor of the state.
    """

    step: int
    origin: str
    """The checkpoint that training started from, or "the beginning"."""
    row: Row | None = None
    batch: tuple[Any, ...] = ()
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    unreproduced: list[str] = field(default_factory=list)
    """What the run's own log or checkpoint has recorded of this step with other values: then this
    is not the step that the run made."""


def replay(build: Builder, folder: str | Path, step: int) -> Replayed:
    """Repeats global step `step` (from 1) of the run whose checkpoints are in `folder`."""
    if step < 1:
        raise ValueError(f"replay: expected a step of 1 or more, got {step}")
    parts = call_builder(build)
    folder = Path(folder)
    start = last_checkpoint_until(folder, step - 1)
    origin = "the beginning" if start is None else str(start)
    recorder = _StepRecorder(Replayed(step, origin), RecordedSteps(folder))
    train_until(parts, folder, start, recorder, step)
    if recorder.result.row is None:
        raise ValueError(
            f"replay: the run ended before step {step}. "
            "Name one of its steps, or build it with as many epochs as it had."
        )
    return recorder.result


def last_checkpoint_until(folder: Path, step: int) -> Path | None:
    """The newest undamaged checkpoint at or before a step; if there is one, with finite weights."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"replay: expected a folder of checkpoints, found nothing at {folder}"
        )
    newest = None
    for path in reversed(checkpoint.listing(folder)):
        checkpoint_step = checkpoint.step_of(path)
        if checkpoint_step is None or checkpoint_step > step:
            continue
        try:
            checkpoint.verify(path)
            health = read_health(path)
        except checkpoint.CheckpointError:
            continue
        if not health.nonfinite:
            return path
        newest = newest or path
    return newest


def train_until(
    parts: RunParts, folder: Path, start: Path | None, recorder: Callback, step: int
) -> Run:
    """Trains on from the checkpoint `start`; the recorder stops the run. Nothing is written.

    `step` is the last one that is needed: it tells which fit's number of epochs to use.
    """
    arguments = dict(parts.fit_arguments)
    arguments["callbacks"] = [*parts.callbacks, recorder]
    arguments["progress"] = False
    arguments["resume"] = start
    if "epochs" not in arguments:  # a schedule may depend on them, or have no rates for more
        arguments["epochs"] = _epochs_of_fit(folder, step)
    return parts.model.fit(data=parts.data, **arguments)


def _epochs_of_fit(folder: Path, step: int) -> int:
    """The number of epochs of the fit that made this step.

    The first checkpoint at or after the step knows it, else the last one before.
    """
    paths = {checkpoint.step_of(path): path for path in checkpoint.listing(folder)}
    nearest_first = sorted(paths, key=lambda number: (number < step, abs(number - step)))
    for number in nearest_first:
        epochs = _saved_epochs(paths[number])
        if epochs is not None:
            return epochs
    raise ValueError(
        f"build: the checkpoints in {folder} and the builder say no epochs. "
        'Return {"model": model, "data": data, "epochs": …} from it, with as many as the run had.'
    )


def _saved_epochs(path: Path) -> int | None:
    try:
        # Only one number of tree.json is needed, which is checked even so.
        tree = checkpoint.load(path, verify=False).tree
    except checkpoint.CheckpointError:
        return None
    if not isinstance(tree, dict):
        return None
    loop_state = tree.get("loop")
    return loop_state.get("epochs") if isinstance(loop_state, dict) else None


class _StepRecorder(Callback):
    """Records one step with hooks, then stops the run."""

    def __init__(self, result: Replayed, recorded: RecordedSteps) -> None:
        self.result = result
        self.recorded = recorded
        self._hook_handles: list[Any] = []

    def next_stop(self, run: Run) -> int | None:
        step = self.result.step
        return step - 1 if run.position < step - 1 else step

    def begin(self, run: Run) -> None:
        if run.position == self.result.step - 1:
            self._start_recording(run)

    def step(self, run: Run, row: Row) -> None:
        if row.global_step == self.result.step:
            self.result.row = row
            self.result.unreproduced += self.recorded.differing_from_row(row)
            self._remove_hooks()  # an evaluation may come before the visit

    def visit(self, run: Run) -> None:
        if run.position == self.result.step - 1:
            self._start_recording(run)
        elif run.position >= self.result.step:
            self.result.after = state_fingerprints(run.model)
            self.result.unreproduced += self.recorded.differing_from_state(run)
            run.stop("replayed")

    def end(self, run: Run) -> None:
        self._remove_hooks()

    def _start_recording(self, run: Run) -> None:
        net: nn.Module = run.net
        self.result.before = state_fingerprints(run.model)
        for name, module in net.named_modules():
            handle = module.register_forward_hook(self._forward_hook(name), with_kwargs=True)
            self._hook_handles.append(handle)
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                handle = parameter.register_hook(self._gradient_hook(name))
                self._hook_handles.append(handle)

    def _remove_hooks(self) -> None:
        for handle in self._hook_handles:
            handle.remove()
        self._hook_handles.clear()

    def _forward_hook(self, name: str) -> Callable[[nn.Module, Any, Any, Any], None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.result.inputs[name] = _copy_tensors((args, kwargs) if kwargs else args)
            self.result.outputs[name] = _copy_tensors(output)
            if not name:  # the network itself
                self.result.batch = _copy_tensors(args)

        return hook

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self.result.gradients[name] = _copy_tensors(gradient)

        return hook


def _copy_tensors(tree: Any) -> Any:
    """The same nest of values with a copy of every tensor."""

    def copy(leaf: Any) -> Any:
        return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf

    return tree_map(copy, tree)


def state_fingerprints(model: Any) -> dict[str, int]:
    """Fingerprints of all tensors of the state by name; none for a step of the user's own."""
    if not hasattr(model.step, "fingerprints"):
        return {}
    fingerprints: dict[str, Tensor] = model.step.fingerprints()
    if not fingerprints:
        return {}
    values = torch.stack(list(fingerprints.values())).tolist()  # one copy to the host
    return dict(zip(fingerprints, values, strict=True))
