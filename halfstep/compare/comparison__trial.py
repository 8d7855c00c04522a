"""One run of a comparison: one precision, one seed. Its result is a plain dict, ready for JSON."""

import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from halfstep.callbacks import Checkpoint
from halfstep.checkpoint import CheckpointError
from halfstep.compare import verdict
from halfstep.compare.curves import Trace
from halfstep.engine import Callback
from halfstep.experiment import build as recipe
from halfstep.experiment.datasets import Material
from halfstep.experiment.machine__memory import Peak
from halfstep.experiment.output_folder import write_json
from halfstep.experiment.settings import Settings
from halfstep.model import Model
from halfstep.utils.user_code import sample

_SAVE_S = 60  # an epoch may be long
Result = dict[str, Any]


def trial(
    settings: Settings,
    material: Material,
    name: str,
    seed: int,
    folder: Path,
    callbacks: Sequence[Callback],
) -> Result:
    """Train, or go on where a checkpoint in `folder` stands; write result.json and remove the checkpoints.

    Whatever the network, the precision or the device raise is the run's result, and the comparison goes on. What the
    disk raises is not, for it would befall the other runs too.
    """
    steps = settings.epochs * material.batches(seed, settings.batch).size
    trace, peak = Trace(steps), Peak(settings.place)
    result = _empty(name, seed)
    try:
        model = recipe.model(settings, material, name, seed)
        _fit(settings, material, model, seed, [trace, *callbacks, _saver(folder)])
        result |= _scores(trace) | _looked(model, material, settings)
    except (OSError, CheckpointError):
        raise
    except Exception as error:
        result |= {"status": "failed", "error": _said(error)}
    result |= _account(trace, steps // settings.epochs, material.train.size) | _memory(peak)
    write_json(folder / "result.json", result)
    for path in folder.glob("step-*"):
        shutil.rmtree(path, ignore_errors=True)
    return result


def _fit(
    settings: Settings, material: Material, model: Model, seed: int, callbacks: list[Callback]
) -> None:
    model.fit(
        settings.epochs, material.batches(seed, settings.batch), valid=material.check_batches(settings.batch),
        callbacks=callbacks, sink=settings.sink, resume="auto",
    )  # fmt: skip


def _saver(folder: Path) -> Checkpoint:
    return Checkpoint(folder, every_epochs=1, every_seconds=_SAVE_S, keep=1, on_error=False)


def _empty(name: str, seed: int) -> Result:
    nothing = dict.fromkeys(("loss", "acc", "final_scale", "correct"))
    return {
        "precision": name, "seed": seed, "status": "done", "error": None, "epochs": [], **nothing, "dtypes": [],
        "choices": {},
    }  # fmt: skip


def _scores(trace: Trace) -> Result:
    """The scores after the last epoch; a run that ends without a finite loss has failed."""
    loss, acc = trace.history[-1]["valid_loss"], trace.history[-1]["valid_acc"]
    if not math.isfinite(loss):
        raise FloatingPointError(f"the test loss is {loss} after the last epoch")
    return {"loss": loss, "acc": acc}


def _looked(model: Model, material: Material, settings: Settings) -> Result:
    """Which test samples it gets right, the dtypes it really used, and the scale the next step would have."""
    batches = material.check_batches(settings.batch)
    outputs = model.predict(batches)
    batches.seek(0)
    labels = torch.cat([torch.as_tensor(batch[-1]).cpu() for batch in batches])
    report = model.report()
    dtypes = [
        {"module": module or "(network)", **seen._asdict()}
        for module, seen in report.modules.items()
    ]
    scaled = "NoScale" not in report.choices["loss scale"]
    return {
        "correct": verdict.pack(_right(outputs, labels)),
        "dtypes": dtypes,
        "choices": dict(report.choices),
        "final_scale": float(model.step.state.scale) if scaled else None,
    }


def _right(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    """As the metric counts: of equal scores the first class, and never a sample with a NaN among its scores."""
    scores = outputs.flatten(1)
    right: torch.Tensor = (scores.argmax(1) == labels) & ~scores.isnan().any(1)
    return right


def _account(trace: Trace, epoch_steps: int, epoch_samples: int) -> Result:
    """Epochs, counts and times, of a run that failed too. `epochs` holds those that were finished."""
    names = ("epoch", "loss", "valid_loss", "valid_acc")
    pairs = zip(trace.history, trace.seconds, strict=False)
    per_step = trace.step_seconds
    per_epoch = per_step * epoch_steps if per_step else None
    return {
        "epochs": [{name: entry[name] for name in names} | {"seconds": seconds} for entry, seconds in pairs],
        "curve": trace.curve | {"step": [int(step) for step in trace.curve["step"]]},
        "skipped_steps": trace.skipped, "steps": trace.steps, "updates": trace.updates, "samples": trace.samples,
        "skipped": len(trace.skipped),
        "ms_per_step": 1000 * per_step if per_step else None, "s_per_epoch": per_epoch,
        "samples_per_s": epoch_samples / per_epoch if per_epoch else None,
    }  # fmt: skip


def _memory(peak: Peak) -> Result:
    return {"peak_memory": peak.read(), "memory_kind": peak.kind}


def _said(error: Exception) -> str:
    place = sample(error)
    notes = [*getattr(error, "__notes__", []), *([place] if place else [])]
    return "\n".join([f"{type(error).__name__}: {error}", *notes])
