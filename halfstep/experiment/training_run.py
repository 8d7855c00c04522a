"""A run of `halfstep train`: its settings, its folder, and how far it is.

The settings are saved in run.json, from which every other command builds the same run again.

torch is imported inside functions only: the command line imports this module for its help.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.experiment.builders import RunParts, call_builder, import_builder
from halfstep.utils.files import read_json, write_json

if TYPE_CHECKING:
    from halfstep.experiment.settings import Settings

# Files in the folder of a run.
RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
WEIGHTS_FILE = "weights.safetensors"
REPORT_FILES = ("report.html", "report.md", "report.json")
FORMAT_VERSION = 1  # of run.json

CHANGEABLE_SETTINGS = ("epochs", "device")  # may differ when a run goes on


# Settings, and the run that they describe


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Everything that decides a run. With `build`, only that, `epochs`, `seed`, `device` count."""

    build: str | None = None
    net: str = "mlp"
    data: str = "sample"
    path: str | None = None
    precision: str = "fp32"
    epochs: int = 4
    batch: int = 64
    optimizer: str = "momentum"
    lr: float | None = None
    schedule: str = "linear"
    accumulate: int = 1
    clip_norm: float | None = None
    ema: float | None = None
    seed: int = 0
    samples: int | None = None
    test_samples: int | None = None
    device: str = "auto"

    def comparison_settings(self) -> "Settings":
        """The settings that a comparison has too, checked."""
        from halfstep.experiment.settings import Settings

        shared = {f.name: getattr(self, f.name) for f in fields(Settings) if hasattr(self, f.name)}
        return Settings(precisions=(self.precision,), seeds=(self.seed,), **shared)


def build_run(train_settings: TrainSettings, *, training: bool = False) -> RunParts:
    """Builds the run: a new model, its training data and the other arguments of `fit`.

    `training`: also give the notices that concern training.
    """
    from halfstep.experiment.build import seed_everything

    seed_everything(train_settings.seed)
    if train_settings.build is not None:
        return call_builder(import_builder(train_settings.build))
    return _build_from_settings(train_settings, training=training)


def _build_from_settings(train_settings: TrainSettings, *, training: bool) -> RunParts:
    from halfstep.experiment.build import build_model, check_one_batch, warn_about_large_batch
    from halfstep.experiment.datasets import load_train_test_data

    settings = train_settings.comparison_settings()
    data = load_train_test_data(settings)
    check_one_batch(settings, data)
    if training:
        warn_about_large_batch(settings, data)
    model = build_model(
        settings,
        data,
        train_settings.precision,
        train_settings.seed,
        accumulate=train_settings.accumulate,
        clip_norm=train_settings.clip_norm,
        ema=train_settings.ema,
    )
    train_batches = data.train_batches(train_settings.seed, train_settings.batch)
    return RunParts(model, train_batches, {"valid": data.test_batches(train_settings.batch)})


def run_builder(run: Path, build: str | None, what: str) -> Callable[[], Any]:
    """A function that builds a run again: by the builder `build`, else by its run.json.

    `what` is the command that an error message names.
    """
    if build:
        return import_builder(build)
    train_settings = read_run_file(run)
    if train_settings is None:
        raise ValueError(f"{what}: say how the run was built: --build package.module:function")

    def build_again() -> dict[str, Any]:
        parts = build_run(train_settings)
        arguments = dict(parts.fit_arguments)
        arguments.pop("valid", None)
        arguments.pop("resume", None)
        return {
            **arguments,
            "model": parts.model,
            "data": parts.data,
            "epochs": train_settings.epochs,
        }

    return build_again


def with_overrides(train_settings: TrainSettings, **overrides: Any) -> TrainSettings:
    """The settings with those of the command line instead; None means not set there."""
    return replace(
        train_settings, **{name: value for name, value in overrides.items() if value is not None}
    )


# The folder


def write_run_file(folder: Path, train_settings: TrainSettings, command: str) -> None:
    """Writes run.json."""
    from halfstep.experiment.machine import describe_environment
    from halfstep.experiment.settings import resolve_device

    content = {
        "halfstep_train": FORMAT_VERSION,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "environment": describe_environment(resolve_device(train_settings.device)),
        "asked": asdict(train_settings),
    }
    write_json(folder / RUN_FILE, content)


def read_run_file(run: Path) -> TrainSettings | None:
    """The settings of a run, by its folder, a checkpoint in it or its weights.

    None for a run that `halfstep train` did not write.
    """
    if (run / RUN_FILE).is_file():
        path = run / RUN_FILE
    elif (run.parent / RUN_FILE).is_file():
        path = run.parent / RUN_FILE
    else:
        return None

    content = read_json(path)
    is_this_version = isinstance(content, dict) and content.get("halfstep_train") == FORMAT_VERSION
    saved = content.get("asked") if is_this_version else None
    known_names = {f.name for f in fields(TrainSettings)}
    if not isinstance(saved, dict) or not set(saved) <= known_names:
        raise ValueError(
            f"{path}: expected what this version of halfstep train writes. Give --build or --net."
        )
    return TrainSettings(**saved)


def check_same_run(folder: Path, train_settings: TrainSettings) -> None:
    """Refuses to go on with other settings than the run in the folder has; names the difference."""
    before = read_run_file(folder)
    if before is None:
        return
    old = asdict(before)
    new = asdict(train_settings)
    forbidden: list[str] = []
    allowed: list[str] = []
    for name in old:
        if old[name] == new[name]:
            continue
        change = f"{name} was {old[name]!r} and is {new[name]!r}"
        if name in CHANGEABLE_SETTINGS:
            allowed.append(change)
        else:
            forbidden.append(change)
    if not forbidden:
        return

    remark = f" Allowed to differ: {'; '.join(allowed)}." if allowed else ""
    raise ValueError(
        f"--resume: {folder} holds another run: {'; '.join(forbidden)}. "
        "Repeat the command as it was, name another folder (--out), or start over (--fresh)."
        f"{remark}"
    )


def remove_run(folder: Path) -> None:
    """Removes the files of a run, and nothing else."""
    from halfstep import checkpoint

    for path in checkpoint.listing(folder):
        shutil.rmtree(path)
    for name in (RUN_FILE, LOG_FILE, WEIGHTS_FILE, *REPORT_FILES):
        (folder / name).unlink(missing_ok=True)


# Weights


def load_weights(model: Any, run: Path) -> str:
    """Loads weights into a model: a run's newest, a checkpoint's or a file's. Returns the path."""
    from halfstep import checkpoint

    if not run.exists():
        raise FileNotFoundError(
            f"expected a run, a checkpoint or a safetensors file, found nothing at {run}"
        )
    if run.is_file():
        model.load(run)
        return str(run)

    path = checkpoint.choose(run)
    if path is not None:
        step_state = checkpoint.load(path).tree.get("step", {})
        if "net" in step_state:
            model.load(_evaluated_weights(model, step_state))
        else:
            model.step.load_state_dict(step_state)  # of a step that the user wrote
        return str(path)

    if not (run / WEIGHTS_FILE).is_file():
        raise FileNotFoundError(
            f"expected checkpoints step-… or {WEIGHTS_FILE}, found neither in {run}"
        )
    return load_weights(model, run / WEIGHTS_FILE)


def _evaluated_weights(model: Any, step_state: dict[str, Any]) -> dict[str, Any]:
    """The weights that the run was evaluated with: with ema=, the averaged ones."""
    weights = dict(step_state["net"])
    averages = step_state["state"]["ema"]
    if not averages:
        return weights
    params = model.step.params
    if len(params) != len(averages):
        raise ValueError(
            f"expected {len(averages)} trained tensors, as the checkpoint averages, "
            f"got {len(params)}"
        )
    names = {id(p): name for name, p in model.net.named_parameters()}
    for p, average in zip(params, averages, strict=True):
        weights[names[id(p)]] = average
    return weights


# Progress: finished runs, interrupted runs


@dataclass(frozen=True)
class FinishedRun:
    """A run that has all the epochs that are requested."""

    checkpoint: Path
    epochs: int
    steps: int
    history: list[dict[str, Any]]

    def summary(self, out: Path) -> dict[str, Any]:
        """What `halfstep train --json` prints for it."""
        return {
            "out": str(out),
            "resumed": str(self.checkpoint),
            "steps": self.steps,
            "history": self.history,
        }


def finished_run(folder: Path, epochs: int) -> FinishedRun | None:
    """The run in the folder, if it has `epochs` or more and its weights are written, else None.

    A run that was stopped inside a later epoch is refused.
    """
    newest, loop_state = _newest_checkpoint(folder)
    if newest is None or loop_state is None:
        return None
    epochs_done = loop_state["epoch"]
    if not loop_state["epoch_over"] or loop_state["pending"]:
        epochs_done -= 1
    if epochs_done >= epochs and (folder / WEIGHTS_FILE).is_file():
        return FinishedRun(newest, epochs_done, loop_state["global_step"], loop_state["history"])
    refuse_fewer_epochs(folder, epochs)
    return None


def refuse_fewer_epochs(folder: Path, epochs: int) -> None:
    """Refuses a run that is beyond `epochs`: no step would be made, and its weights are others."""
    _, loop_state = _newest_checkpoint(folder)
    if loop_state is not None and loop_state["epoch"] > epochs:
        epoch = loop_state["epoch"]
        raise ValueError(
            f"--epochs: {folder} is in epoch {epoch} already, "
            f"after step {loop_state['global_step']}, and {epochs} are asked for. "
            f"Go on with --epochs {epoch} or more."
        )


def _newest_checkpoint(folder: Path) -> tuple[Path | None, Any]:
    """A run's newest checkpoint, or the one that is named, and the loop's state in it.

    The state is None where the checkpoint has none; `fit` will refuse it.
    """
    from halfstep import checkpoint

    newest = checkpoint.choose(folder)
    if newest is None:
        return None, None
    return newest, checkpoint.load(newest).tree.get("loop")


@contextlib.contextmanager
def silence_signal_message() -> Iterator[None]:
    """Inside, `fit` prints nothing about a signal: the command itself says how to go on."""
    from halfstep.engine import signals

    before = signals.QUIET
    signals.QUIET = True
    try:
        yield
    finally:
        signals.QUIET = before


class WeightRescue:
    """Saves the weights of a finished run whose last checkpoint could not be written."""

    def __init__(self) -> None:
        self.run: Any = None

    def begin(self, run: Any) -> None:
        """The event of a callback: remembers the run."""
        self.run = run

    def rescue(self, model: Any, path: Path, error: Exception) -> None:
        """Saves the weights if all steps were made and the disk has space; adds a note then."""
        run = self.run
        if run is None or run.epoch != run.epochs or not run.epoch_over:
            return
        with contextlib.suppress(OSError, ValueError):
            model.save(path)
            error.add_note(f"Training is done, and its weights are in {path}.")
