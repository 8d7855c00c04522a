"""A run that `halfstep train` made: what it was told, in run.json, from which every other command builds it again."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.experiment.builders import builder_of

if TYPE_CHECKING:
    from halfstep.compare import Settings
    from halfstep.experiment.builders__build import Built

RUN, LOG, WEIGHTS, VERSION = "run.json", "log.jsonl", "weights.safetensors", 1
_FREE = ("epochs", "device")  # may be others when a run goes on
_WAYS = "Repeat the command as it was, name another folder (--out), or start over (--fresh)"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """Everything that decides a run. With `build` only that, `epochs`, `seed` and `device` count."""

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

    def settings(self) -> "Settings":
        """The part that a comparison has too, checked."""
        from halfstep.compare import Settings

        shared = {f.name: getattr(self, f.name) for f in fields(Settings) if hasattr(self, f.name)}
        return Settings(precisions=(self.precision,), seeds=(self.seed,), **shared)

    def options(self) -> dict[str, Any]:
        return {"accumulate": self.accumulate, "clip_norm": self.clip_norm, "ema": self.ema}


def make(asked: Asked, *, training: bool = False) -> "Built":
    """Model, training data and the other arguments of fit, as new; with `training`, and notices about that."""
    from halfstep.experiment.build import seeded
    from halfstep.experiment.builders__build import built

    seeded(asked.seed)
    if asked.build is None:
        return _by_flags(asked, training)
    return built(builder_of(asked.build))


def _by_flags(asked: Asked, training: bool) -> "Built":
    from torch import nn

    from halfstep.experiment import build as recipe
    from halfstep.experiment.builders__build import Built
    from halfstep.experiment.datasets import material
    from halfstep.metrics import Accuracy
    from halfstep.model import Model

    settings = asked.settings()
    given = material(settings)
    recipe.check(settings, given)
    if training:
        recipe.note(settings, given)
    net, batches = (
        recipe.network(settings, given, asked.seed),
        given.batches(asked.seed, asked.batch),
    )
    model = Model(
        net, nn.CrossEntropyLoss(), _optimizer(settings, net), asked.precision,
        metrics={"acc": Accuracy()}, schedule=_rates(settings, batches.size, asked.accumulate), **asked.options(),
    )  # fmt: skip
    return Built(model, batches, {"valid": given.check_batches(asked.batch)})


def _optimizer(settings: "Settings", net: Any) -> Any:
    from torch.optim import SGD, Adam, AdamW

    momentum = {"momentum": 0.9} if settings.optimizer == "momentum" else {}
    maker: Any = {"adam": Adam, "adamw": AdamW}.get(settings.optimizer, SGD)
    return maker(net.parameters(), lr=settings.lr, **momentum)


def _rates(settings: "Settings", batches: int, accumulate: int) -> Any:
    """By updates: the tail of each pass is one too."""
    from halfstep import schedules

    if settings.schedule == "constant":
        return None
    return getattr(schedules, settings.schedule)(
        settings.lr, settings.epochs * -(-batches // max(accumulate, 1))
    )


# the folder


def write(folder: Path, asked: Asked, command: str) -> None:
    import time

    from halfstep.compare.comparison import environment
    from halfstep.experiment.output_folder import write_json
    from halfstep.experiment.settings import chosen

    around = {"date": time.strftime("%Y-%m-%d"), "environment": environment(chosen(asked.device))}
    write_json(
        folder / RUN,
        {"halfstep_train": VERSION, "command": command, **around, "asked": asdict(asked)},
    )


def read(run: Path) -> Asked | None:
    """What a run was told, by its folder, a checkpoint in it or its weights; None for a run of another making."""
    from halfstep.experiment.output_folder import read_json

    home = next((place for place in (run, run.parent) if (place / RUN).is_file()), None)
    if home is None:
        return None
    found = read_json(home / RUN)
    names = {f.name for f in fields(Asked)}
    asked = (
        found.get("asked")
        if isinstance(found, dict) and found.get("halfstep_train") == VERSION
        else None
    )
    if not isinstance(asked, dict) or not set(asked) <= names:
        raise ValueError(
            f"{home / RUN}: expected what this version of halfstep train writes. Give --build or --net."
        )
    return Asked(**asked)


def check(folder: Path, asked: Asked) -> None:
    """A run goes on as what it was; the difference is named otherwise."""
    before = read(folder)
    if before is None:
        return
    was, now = asdict(before), asdict(asked)
    said = {
        name: f"{name} was {was[name]!r} and is {now[name]!r}"
        for name in was
        if was[name] != now[name]
    }
    barring = [text for name, text in said.items() if name not in _FREE]
    allowed = [text for name, text in said.items() if name in _FREE]
    if barring:
        other = f" Allowed to differ: {'; '.join(allowed)}." if allowed else ""
        raise ValueError(
            f"--resume: {folder} holds another run: {'; '.join(barring)}. {_WAYS}.{other}"
        )


def clear(folder: Path) -> None:
    """Removes what a run wrote, and nothing else."""
    import shutil

    from halfstep import checkpoint

    for path in checkpoint.listing(folder):
        shutil.rmtree(path)
    for name in (RUN, LOG, WEIGHTS, "report.html", "report.md", "report.json"):
        (folder / name).unlink(missing_ok=True)


def built_by(run: Path, build: str | None, what: str) -> Callable[[], Any]:
    """How a run was built: by the builder given, else by its run.json."""
    asked = Asked(build=build) if build else read(run)
    if asked is None:
        raise ValueError(f"{what}: say how the run was built: --build package.module:function")
    if build:
        return builder_of(build)

    def again() -> dict[str, Any]:
        made = make(asked)
        arguments = {
            name: value for name, value in made.arguments.items() if name not in ("valid", "resume")
        }
        return {**arguments, "model": made.model, "data": made.data, "epochs": asked.epochs}

    return again


def load(model: Any, run: Path) -> str:
    """Put a run's newest weights, one checkpoint's, or a file's into a model; says which."""
    from halfstep import checkpoint

    if not run.exists():
        raise FileNotFoundError(
            f"expected a run, a checkpoint or a safetensors file, found nothing at {run}"
        )
    if run.is_file():
        model.load(run)
        return str(run)
    found = run if (run / "manifest.json").is_file() else checkpoint.latest(run)
    if found is not None:
        state = checkpoint.load(found).tree.get("step", {})
        model.load(_weights(model, state)) if "net" in state else model.step.load_state_dict(state)
        return str(found)
    if not (run / WEIGHTS).is_file():
        raise FileNotFoundError(f"expected checkpoints step-… or {WEIGHTS}, found neither in {run}")
    return load(model, run / WEIGHTS)


def _weights(model: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The weights that the run was evaluated by: with ema=, the averaged ones."""
    weights, averages = dict(state["net"]), state["state"]["ema"]
    params = model.step.params if averages else []
    if len(params) != len(averages):
        raise ValueError(
            f"expected {len(averages)} trained tensors, as the checkpoint averages, got {len(params)}"
        )
    names = {id(p): name for name, p in model.net.named_parameters()}
    return weights | {names[id(p)]: average for p, average in zip(params, averages, strict=True)}


def changed(asked: Asked, **given: Any) -> Asked:
    """With what was given on the command line instead."""
    return replace(asked, **{name: value for name, value in given.items() if value is not None})
