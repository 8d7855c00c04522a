"""A run of `halfstep train`: its settings, its folder, and how far it is.

The settings are saved in run.json, from which every other command builds the same run again.

torch is imported inside functions only: the command line imports this module for its help.
"""

import contextlib
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.experiment.builders import RunParts, call_builder, import_builder
from halfstep.experiment.run_seal import (
    is_sealed,
    make_seal,
    reasons_to_distrust,
    untrusted_error,
)
from halfstep.utils.files import read_json, write_json

if TYPE_CHECKING:
    from halfstep.data import TableEncoding
    from halfstep.experiment.settings import Settings
    from halfstep.utils.saved_state import SavedValue

# Files in the folder of a run.
RUN_FILE = "run.json"
LOG_FILE = "log.jsonl"
WEIGHTS_FILE = "weights.safetensors"
REPORT_FILES = ("report.html", "report.md", "report.json")
FORMAT_VERSION = 1  # of run.json

CHANGEABLE_SETTINGS = ("epochs", "device", "ranks")  # may differ when a run goes on


# Settings, and the run that they describe


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """Everything that decides a run. With `build`, only a few of them count."""

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
    size: str | None = None
    test_share: float | None = None
    split_seed: int | None = None
    skip_damaged: bool | None = None
    class_weights: str | None = None
    target: str | None = None
    task: str | None = None
    drop: str | None = None
    device: str = "auto"
    limit_batches: float | None = None
    ranks: int = 1
    exact: str | None = None
    logical: int | None = None

    def comparison_settings(self) -> "Settings":
        """The settings that a comparison has too, checked."""
        from halfstep.experiment.settings import Settings

        shared = {f.name: getattr(self, f.name) for f in fields(Settings) if hasattr(self, f.name)}
        return Settings(precisions=(self.precision,), seeds=(self.seed,), **shared)


def build_run(
    train_settings: TrainSettings,
    *,
    training: bool = False,
    split: bool = True,
    facts: dict[str, Any] | None = None,
) -> RunParts:
    """Builds the run: a new model, its training data and the other arguments of `fit`.

    `training`: also give the notices that concern training, and decode its images now. Without
    `split`, data that nobody has split is evaluated as a whole. `facts`: what its run.json says of
    the data.
    """
    from halfstep.utils.rng import seed_everything

    seed_everything(train_settings.seed)
    if train_settings.build is not None:
        parts = call_builder(import_builder(train_settings.build))
    else:
        parts = _build_from_settings(
            train_settings, training=training, split=split, facts=facts or {}
        )
    if train_settings.limit_batches is not None:
        parts.fit_arguments["limit_batches"] = train_settings.limit_batches
    return parts


def _build_from_settings(
    train_settings: TrainSettings, *, training: bool, split: bool, facts: dict[str, Any]
) -> RunParts:
    from halfstep.engine.limits import BatchLimit
    from halfstep.experiment.build import build_model, check_one_batch, warn_about_large_batch
    from halfstep.experiment.datasets import load_train_test_data
    from halfstep.experiment.rank_agreement import join_ranks, refused_together

    settings = train_settings.comparison_settings()
    if training:
        with refused_together(join_ranks(settings.torch_device), "reading the data"):
            data = load_train_test_data(settings, training=True, split=split)
    else:
        data = load_train_test_data(settings, split=split, encoding=table_encoding(facts))
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
        limit=BatchLimit.of(train_settings.limit_batches),
    )
    train_batches = data.train_batches(train_settings.seed, train_settings.batch)
    return RunParts(
        model,
        train_batches,
        {"valid": data.test_batches(train_settings.batch)},
        chosen=data.chosen,
        facts=data.facts,
        encoding=data.encoding,
    )


def table_encoding(facts: dict[str, Any]) -> "TableEncoding | None":
    """How the table of a run is encoded, by what its run.json says; None for other data."""
    from halfstep.data import TableEncoding

    if "table" not in facts:
        return None
    return TableEncoding.from_json(facts["table"], RUN_FILE)


def run_builder(run: Path, build: str | None, what: str, *, trust: bool) -> Callable[[], Any]:
    """A function that builds a run again: by the builder `build`, else by its run.json.

    `what` is the command that an error message names. `trust`: see read_own_run_file.
    """
    if build:
        return import_builder(build)
    train_settings = read_own_run_file(run, trust=trust, command=what)
    if train_settings is None:
        raise ValueError(f"{what}: say how the run was built: --build package.module:function")

    def build_again() -> dict[str, Any]:
        parts = build_run(train_settings, facts=read_data_facts(run))
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


def write_run_file(
    folder: Path, train_settings: TrainSettings, command: str, facts: dict[str, Any] | None = None
) -> None:
    """Writes run.json. `facts`: what is noted of the data."""
    from halfstep.experiment.machine import describe_environment
    from halfstep.experiment.settings import resolve_device

    content = {
        "halfstep_train": FORMAT_VERSION,
        "command": command,
        "date": time.strftime("%Y-%m-%d"),
        "environment": describe_environment(resolve_device(train_settings.device)),
        "asked": asdict(train_settings),
        "seal": make_seal(asdict(train_settings)),
    }
    if facts:
        content["data"] = facts
    write_json(folder / RUN_FILE, content)


def read_run_file(run: Path) -> TrainSettings | None:
    """The settings of a run, by its folder, a checkpoint in it or its weights: to be shown.

    None for a run that `halfstep train` did not write.
    """
    path = _run_file(run)
    return None if path is None else TrainSettings(**_read_run_content(path)["asked"])


def read_data_facts(run: Path) -> dict[str, Any]:
    """What the run.json of a run notes of its data; empty where it notes nothing."""
    path = _run_file(run)
    facts = None if path is None else _read_run_content(path).get("data")
    return facts if isinstance(facts, dict) else {}


def read_own_run_file(
    run: Path, *, trust: bool, command: str, replaced: Collection[str] = ()
) -> TrainSettings | None:
    """The same, to build the run by: what the settings name is imported, opened or fetched.

    Refused where they are not known to be this user's, unless the user says to `trust` them.
    `replaced`: the settings that the command line replaces.
    """
    path = _run_file(run)
    if path is None:
        return None
    content = _read_run_content(path)
    settings = TrainSettings(**content["asked"])
    reasons = reasons_to_distrust(asdict(settings), replaced)
    if reasons and not trust and not is_sealed(content["asked"], content.get("seal")):
        raise untrusted_error(command, path, reasons)
    return settings


def _run_file(run: Path) -> Path | None:
    for folder in (run, run.parent):
        if (folder / RUN_FILE).is_file():
            return folder / RUN_FILE
    return None


def _read_run_content(path: Path) -> dict[str, Any]:
    """The content of a run.json whose settings, "asked", have the names and types they must."""
    content = read_json(path)
    is_this_version = isinstance(content, dict) and content.get("halfstep_train") == FORMAT_VERSION
    saved = content.get("asked") if is_this_version else None
    known_names = {f.name for f in fields(TrainSettings)}
    if not isinstance(saved, dict) or not set(saved) <= known_names or not _are_plain(saved):
        raise ValueError(
            f"{path}: expected what this version of halfstep train writes. Give --build or --net."
        )
    return dict(content)


def _are_plain(settings: dict[str, Any]) -> bool:
    """Whether every setting has a type that a command line can give it."""
    texts = (
        "build",
        "net",
        "data",
        "path",
        "precision",
        "optimizer",
        "schedule",
        "size",
        "class_weights",
        "target",
        "task",
        "drop",
        "device",
        "exact",
    )
    defaults = asdict(TrainSettings())
    for name, value in settings.items():
        expected: Any = str if name in texts else int | float
        may_be_none = defaults[name] is None
        if not isinstance(value, expected) and not (value is None and may_be_none):
            return False
    return True


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


def check_same_data(folder: Path, facts: dict[str, Any]) -> None:
    """Refuses to go on with data that is not what it was; names the difference."""
    before = read_data_facts(folder)
    words = {
        "classes": "its classes",
        "train": "the number of training samples",
        "test": "the number of test samples",
        "test_files": "which files are test data",
        "table": "the training rows",
    }
    changed = [words.get(name, name) for name in before if before[name] != facts.get(name)]
    if changed:
        raise ValueError(
            f"--resume: the data has changed since the run in {folder} began: "
            f"{', '.join(changed)}. Put it back as it was, name another folder (--out), "
            "or start over (--fresh)."
        )


def remove_run(folder: Path) -> None:
    """Removes the files of a run, and nothing else."""
    from halfstep import checkpoint

    for path in checkpoint.listing(folder):
        shutil.rmtree(path)
    for name in (RUN_FILE, LOG_FILE, WEIGHTS_FILE, *REPORT_FILES):
        (folder / name).unlink(missing_ok=True)


def remove_later(folder: Path, step: int) -> None:
    """Removes the checkpoints of later steps, the newest first, and the weights of the end."""
    from halfstep import checkpoint
    from halfstep.checkpoint.disk import remove_folder

    for path in reversed(checkpoint.listing(folder)):
        if checkpoint.step_of(path) > step:
            (folder / WEIGHTS_FILE).unlink(missing_ok=True)
            remove_folder(path)


# Weights


def load_weights(model: Any, run: Path) -> str:
    """Loads weights into a model: a run's newest, a checkpoint's or a file's. Returns the path."""
    from halfstep import checkpoint
    from halfstep.utils.saved_state import SavedValue

    if not run.exists():
        raise FileNotFoundError(
            f"expected a run, a checkpoint or a file of weights, found nothing at {run}"
        )
    if run.is_file():
        model.load(run)
        return str(run)

    path = checkpoint.choose(run)
    if path is not None:
        step_state = SavedValue(checkpoint.load(path).tree, str(path)).field("step")
        if "net" in step_state.entries():
            model.load(_evaluated_weights(model, step_state))
        else:
            model.step.load_state_dict(step_state.value)  # of a step that the user wrote
        return str(path)

    if not (run / WEIGHTS_FILE).is_file():
        raise FileNotFoundError(
            f"expected checkpoints step-… or {WEIGHTS_FILE}, found neither in {run}"
        )
    return load_weights(model, run / WEIGHTS_FILE)


def _evaluated_weights(model: Any, step_state: "SavedValue") -> dict[str, Any]:
    """The weights that the run was evaluated with: with ema=, the averaged ones."""
    weights = {name: value.value for name, value in step_state.field("net").entries().items()}
    averages = [average.tensor() for average in step_state.field("state").field("ema").items()]
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


# Around fit


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
