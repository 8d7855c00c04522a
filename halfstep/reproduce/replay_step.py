"""One step of a finished run once more, bit for bit, with everything it computed in the caller's hands."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep import checkpoint
from halfstep.engine import Callback, Row, Run
from halfstep.experiment.builders__build import Builder, Built, built


@dataclass
class Replayed:
    """What one step did. Keys of `inputs` and `outputs` are module names, of `gradients` parameter names.

    `before` and `after` are 64-bit fingerprints of every tensor of the state; `gradients` are as the backward pass made
    them, scaled by the loss scale.
    """

    step: int
    origin: str
    """The checkpoint it started from, or "the beginning"."""
    row: Row | None = None
    batch: tuple[Any, ...] = ()
    inputs: dict[str, Any] = field(default_factory=dict)
    outputs: dict[str, Any] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)


def replay(build: Builder, folder: str | Path, step: int) -> Replayed:
    """Repeat global step `step` (from 1) of the run whose checkpoints are in `folder`."""
    if step < 1:
        raise ValueError(f"replay: expected a step of 1 or more, got {step}")
    again = built(build)
    folder = Path(folder)
    start = nearest(folder, step - 1)
    watch = _Watch(Replayed(step, str(start) if start else "the beginning"))
    run_to(again, folder, start, watch, step)
    if watch.result.row is None:
        advice = "Name one of its steps, or build it with as many epochs as it had."
        raise ValueError(f"replay: the run ended before step {step}. {advice}")
    return watch.result


def nearest(folder: Path, step: int) -> Path | None:
    """The newest whole checkpoint at or before a step."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"replay: expected a folder of checkpoints, found nothing at {folder}"
        )
    for path in reversed(checkpoint.listing(folder)):
        number = checkpoint.step_of(path)
        if number is not None and number <= step:
            try:
                checkpoint.verify(path)
            except checkpoint.CheckpointError:
                continue
            return path
    return None


def run_to(again: Built, folder: Path, start: Path | None, watch: Callback, step: int) -> Run:
    """Train on from a checkpoint, with a callback that says to stop at `step`; nothing is written."""
    arguments = {**again.arguments, "callbacks": [*again.callbacks, watch], "resume": start}
    if "epochs" not in arguments:  # a schedule may depend on them, or have no rates for more
        arguments["epochs"] = _epochs(folder, step)
    return again.model.fit(data=again.data, **arguments)


def _epochs(folder: Path, step: int) -> int:
    """Of the fit that made this step: the first checkpoint from it on knows, else the last before it."""
    steps = {checkpoint.step_of(path): path for path in checkpoint.listing(folder)}
    for number in sorted(steps, key=lambda each: (each < step, abs(each - step))):
        found = _saved_epochs(steps[number])
        if found is not None:
            return found
    advice = (
        'Return {"model": model, "data": data, "epochs": …} from it, with as many as the run had.'
    )
    raise ValueError(f"build: the checkpoints in {folder} and the builder say no epochs. {advice}")


def _saved_epochs(path: Path) -> int | None:
    try:
        tree = checkpoint.load(
            path, verify=False
        ).tree  # one number of tree.json, which is checked even so
    except checkpoint.CheckpointError:
        return None
    loop = tree.get("loop") if isinstance(tree, dict) else None
    return loop.get("epochs") if isinstance(loop, dict) else None


class _Watch(Callback):
    """Stands still before the step, listens during it, and ends the run after it."""

    def __init__(self, result: Replayed) -> None:
        self.result = result
        self._handles: list[Any] = []

    def next_stop(self, run: Run) -> int | None:
        return self.result.step - 1 if run.position < self.result.step - 1 else self.result.step

    def begin(self, run: Run) -> None:
        if run.position == self.result.step - 1:
            self._listen(run)

    def step(self, run: Run, row: Row) -> None:
        if row.global_step == self.result.step:
            self.result.row = row
            self._hush()  # an evaluation may come before the visit

    def visit(self, run: Run) -> None:
        if run.position == self.result.step - 1:
            self._listen(run)
        elif run.position >= self.result.step:
            self.result.after = prints(run.model)
            run.stop("replayed")

    def end(self, run: Run) -> None:
        self._hush()

    def _hush(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _listen(self, run: Run) -> None:
        net: nn.Module = run.net
        self.result.before = prints(run.model)
        for name, module in net.named_modules():
            self._handles.append(module.register_forward_hook(self._heard(name), with_kwargs=True))
        for name, parameter in net.named_parameters():
            if parameter.requires_grad:
                self._handles.append(parameter.register_hook(self._gradient(name)))

    def _heard(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            self.result.inputs[name] = kept((args, kwargs) if kwargs else args)
            self.result.outputs[name] = kept(output)
            if not name:
                self.result.batch = kept(args)

        return hook

    def _gradient(self, name: str) -> Any:
        def hook(gradient: Tensor) -> None:
            self.result.gradients[name] = kept(gradient)

        return hook


def kept(value: Any) -> Any:
    """A copy of every tensor in it, as it is now."""
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, value)


def prints(model: Any) -> dict[str, int]:
    """Fingerprints of the whole state by name, on the host."""
    found = getattr(model.step, "fingerprints", None)
    if found is None:
        return {}
    each: dict[str, Tensor] = found()
    return dict(zip(each, torch.stack(list(each.values())).tolist(), strict=True)) if each else {}
