"""Checkpoints with valid checksums and one wrong value: loaded, or refused with nothing touched."""

import copy
import io
import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import halfstep as hs
from halfstep import checkpoint
from halfstep.callbacks import (
    Checkpoint,
    CSVLog,
    EarlyStopping,
    History,
    JSONLLog,
    LRMonitor,
    ProgressLines,
    ReduceLROnPlateau,
    StepTimer,
    TimeMonitor,
)
from halfstep.engine import Callback, Row, Run
from halfstep.model import Model
from halfstep.utils import rng
from tests.support.mutated_trees import mutate
from tests.support.run_endings import _same_bits, leaves_by_path

SAVED_STEP = 5
ERRORS = (ValueError, OSError)  # CheckpointError is a ValueError; OSError of a log

# What a change of a part leads to, where that is what the run is refused for.
CONSEQUENCES = {
    "data": "expected rates for",  # other data means a new pass, for which a schedule is too short
    "writers": "Log: ",  # a log that the checkpoint does not know would start anew
}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(8, 3)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.dropout(self.norm(self.first(x)).relu())) + self.table
        return out


class Cell:
    """A training step of the user's own, with an optimizer that the model does not know."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.optimizer = torch.optim.RMSprop(net.parameters(), lr=0.01, momentum=0.9)
        self.calls = 0
        self.losses: list[float] = []

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.calls += 1
        self.losses.append(float(loss.detach()))
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {
            "net": copy.deepcopy(dict(self.net.state_dict())),
            "optimizer": copy.deepcopy(self.optimizer.state_dict()),
            "calls": self.calls,
            "losses": list(self.losses),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.calls = int(saved["calls"])
        self.losses = [float(loss) for loss in saved["losses"]]
        self.net.load_state_dict(saved["net"])
        self.optimizer.load_state_dict(saved["optimizer"])


class Counted(Callback):
    """A callback of the user's, which loads one entry after the other."""

    def __init__(self) -> None:
        self.steps = 0
        self.by_epoch: dict[int, int] = {}

    def step(self, run: Run, row: Row) -> None:
        self.steps += 1
        self.by_epoch[row.epoch] = self.by_epoch.get(row.epoch, 0) + 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "by_epoch": dict(self.by_epoch)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = int(state["steps"])
        self.by_epoch.clear()
        for epoch, count in state["by_epoch"].items():
            self.by_epoch[int(epoch)] = int(count)


def make_dataset() -> hs.data.Dataset:
    torch.manual_seed(7)
    columns = {"x": torch.randn(28, 6), "y": torch.randint(0, 3, (28,))}
    return hs.data.Dataset(columns).shuffle().batch(4)


def make_loader() -> DataLoader[Any]:
    torch.manual_seed(7)
    samples = TensorDataset(torch.randn(28, 6), torch.randint(0, 3, (28,)))
    return DataLoader(samples, 4, shuffle=True, generator=torch.Generator().manual_seed(3))


@dataclass
class Parts:
    """What a run is made of."""

    model: Model
    data: Any
    callbacks: list[Callback]
    options: dict[str, Any] = field(default_factory=dict)


def build_adam(folder: Path) -> Parts:
    net = Network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    schedule = hs.schedules.cosine(0.01, updates=14)
    model = Model(net, nn.CrossEntropyLoss(), optimizer, schedule=schedule)
    return Parts(model, make_dataset(), [History(), CSVLog(folder / "log.csv"), Counted()])


def build_momentum(folder: Path) -> Parts:
    net = Network()
    groups = [{"params": net.first.parameters(), "lr": 0.1}, {"params": net.last.parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    precision = hs.Precision("O2", scale=hs.DynamicScale(init=1024.0))
    model = Model(net, nn.CrossEntropyLoss(), optimizer, precision, accumulate=3)
    return Parts(model, make_dataset(), [LRMonitor(show=False), JSONLLog(folder / "log.jsonl")])


def build_kahan(folder: Path) -> Parts:
    net = Network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, eps=1e-4)
    precision = hs.Precision("fp16", rounding="kahan", scale=hs.FixedScale(value=64.0))
    model = Model(net, nn.CrossEntropyLoss(), optimizer, precision, ema=0.9, nonfinite="skip")
    timer = StepTimer(warmup=1, show=False)
    return Parts(model, make_loader(), [timer, JSONLLog(folder / "log.jsonl")])


def build_plateau(folder: Path) -> Parts:
    net = Network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = Model(net, nn.CrossEntropyLoss(), optimizer, metrics={"acc": hs.metrics.Accuracy()})
    callbacks = [
        ReduceLROnPlateau(patience=0),
        EarlyStopping(patience=9, restore_best=True),
        TimeMonitor(file=io.StringIO()),
        ProgressLines(file=io.StringIO()),
        CSVLog(folder / "log.csv"),
        JSONLLog(folder / "log.jsonl"),
    ]
    return Parts(
        model, make_dataset(), callbacks, {"valid": make_dataset(), "valid_every_steps": 2}
    )


def build_cell(folder: Path) -> Parts:
    net = Network()
    model = Model(net, nn.CrossEntropyLoss(), step=Cell(net))
    return Parts(model, make_dataset(), [Counted(), JSONLLog(folder / "log.jsonl")])


RUNS: dict[str, Callable[[Path], Parts]] = {
    "fp32, Adam, schedule, CSVLog": build_adam,
    "O2, SGD with momentum, inside a cycle": build_momentum,
    "fp16 with Kahan rounding and averages, DataLoader": build_kahan,
    "ReduceLROnPlateau, EarlyStopping": build_plateau,
    "a cell of the user's own": build_cell,
}


class Interrupted(Exception):
    """What ends the run that is saved."""


@cache
def saved_run(name: str) -> tuple[Any, Path]:
    """The tree of a run's checkpoint at step 5, and the folder with its logs, two steps longer."""
    folder = Path(mkdtemp())
    hs_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = RUNS[name](folder)

    def interrupt(run: Run, row: Row) -> None:
        if row.global_step == SAVED_STEP + 2:
            raise Interrupted

    saver = Checkpoint(folder / "run", every_steps=SAVED_STEP, on_error=False)
    callbacks = [*parts.callbacks, hs.Lambda(step=interrupt), saver]
    with pytest.raises(Interrupted):
        parts.model.fit(2, parts.data, callbacks=callbacks, sink=1, **parts.options)
    tree = checkpoint.load(folder / "run" / checkpoint.name_of(SAVED_STEP)).tree
    return tree, folder


def hs_seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def everything(parts: Parts, folder: Path) -> dict[str, Any]:
    """All that a refused resume must leave alone, leaf by leaf, and the logs."""
    model = parts.model
    step = model.step
    tree = {
        "step": step.state_dict(),
        "net": dict(model.net.state_dict()),
        "names": [id(p) for p in model.net.parameters()],
        "modes": [module.training for module in model.net.modules()],
        "rng": rng.save(),
        "callbacks": [callback.state_dict() for callback in parts.callbacks],
        "schedule": getattr(getattr(step, "learning_rates", None), "table", None),
        "tables": {k: v for k, v in vars(model._schedule_tables).items() if isinstance(v, int)},
        "groups": [dict(g, params=0) for g in getattr(model.optimizer, "param_groups", ())],
    }
    if isinstance(parts.data, DataLoader):
        tree["order"] = parts.data.generator.get_state()
    logs = {path.name: path.read_bytes() for path in folder.glob("log.*")}
    return {**leaves_by_path(tree), **logs}


def same_everything(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    names = sorted(before.keys() ^ after.keys())
    return names + [n for n in before.keys() & after.keys() if not _same_bits(before[n], after[n])]


def resume_mutated(name: str, seed: int, folder: Path) -> tuple[str, str]:
    """Resumes one mutated checkpoint: "loaded", "refused" or "wrong", and what happened."""
    tree, origin = saved_run(name)
    mutated, path, kind = mutate(tree, random.Random(f"{name} {seed}"))
    for log in origin.glob("log.*"):
        shutil.copy(log, folder)
    saved = checkpoint.save(folder / "mutated" / checkpoint.name_of(SAVED_STEP), mutated)
    outcome, message = resume_tree(name, saved, folder, path)
    return outcome, f"seed {seed}, {kind} of {'.'.join(map(str, path))}: {message}"


def resume_tree(
    name: str, saved: Path, folder: Path, path: tuple[str | int, ...] = ()
) -> tuple[str, str]:
    # A model that was trained before, so that it has a state to lose.
    hs_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parts = RUNS[name](folder)
        parts.model.fit(1, list(make_dataset())[:2])
    before = everything(parts, folder)
    runs: list[Run] = []
    watch = hs.Lambda(begin=runs.append)
    watch.writes = True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts.model.fit(
                2, parts.data, callbacks=[*parts.callbacks, watch], resume=saved, **parts.options
            )
    except ERRORS as error:
        begun = bool(runs) and runs[0].has_begun
        return judge_refusal(error, before, everything(parts, folder), path, begun=begun)
    except hs.NonFiniteError:  # a NaN among the weights
        return ("loaded" if runs else "wrong"), "NaN"
    except Exception as error:
        return "wrong", f"a raw error: {error!r}, {'in' if runs else 'before'} training"
    return "loaded", ""


def judge_refusal(
    error: Exception,
    before: dict[str, Any],
    after: dict[str, Any],
    path: tuple[str | int, ...],
    *,
    begun: bool,
) -> tuple[str, str]:
    """Refused before training, by name, with everything as it was."""
    words = [str(key) for key in path if isinstance(key, str)]
    words += [CONSEQUENCES[word] for word in words if word in CONSEQUENCES]
    if begun:
        return "wrong", f"loaded, and an error in training: {error!r}"
    changed = same_everything(before, after)
    if changed:
        return "wrong", f"refused, and changed {changed}: {error}"
    if not any(word in str(error) for word in words):
        return "wrong", f"refused without a name: {error}"
    return "refused", str(error)


@pytest.mark.parametrize("name", RUNS)
def test_an_unchanged_checkpoint_is_loaded(name: str, tmp_path: Path) -> None:
    tree, origin = saved_run(name)
    for log in origin.glob("log.*"):
        shutil.copy(log, tmp_path)
    saved = checkpoint.save(tmp_path / "same" / checkpoint.name_of(SAVED_STEP), tree)
    assert resume_tree(name, saved, tmp_path) == ("loaded", "")


def resume_all(name: str, seeds: range, folder: Path) -> Counter[str]:
    """How often a mutated checkpoint was loaded and refused; an error lists what went wrong."""
    counts: Counter[str] = Counter()
    wrong = []
    for seed in seeds:
        case = folder / str(seed)
        case.mkdir()
        outcome, message = resume_mutated(name, seed, case)
        counts[outcome] += 1
        if outcome == "wrong":
            wrong.append(message)
        shutil.rmtree(case)
    assert wrong == [], "\n".join(wrong)
    return counts


@pytest.mark.parametrize("name", RUNS)
def test_a_mutated_checkpoint_is_loaded_or_refused_with_nothing_touched(
    name: str, tmp_path: Path
) -> None:
    counts = resume_all(name, range(20), tmp_path)
    assert counts["refused"] >= 5, counts


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_thousand_mutated_checkpoints(name: str, tmp_path: Path) -> None:
    counts = resume_all(name, range(20, 220), tmp_path)
    assert counts.total() == 200
    assert counts["refused"] >= 80, counts
