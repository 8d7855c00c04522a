"""What runs leave behind, leaf by leaf, disturbed or not; and runs in this process."""

import json
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep import checkpoint
from halfstep.callbacks.checkpoint import Checkpoint
from halfstep.callbacks.history import History
from halfstep.callbacks.logs import JSONLLog
from halfstep.engine import Callback, Row, Run
from halfstep.model import Model
from tests.support.killed_run import build_model, fork_server, train_data, valid_data

Case = dict[str, Any]
_endings: dict[str, dict[str, Any]] = {}


def leaves_by_path(tree: Any, name: str = "") -> dict[str, Any]:
    """By path; an empty dict or list is a leaf."""
    if isinstance(tree, dict | list | tuple) and tree:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {
            k: v for key, inner in items for k, v in leaves_by_path(inner, f"{name}.{key}").items()
        }
    return {name: tree}


def run_ending(folder: Path, log: str = "log.jsonl") -> dict[str, Any]:
    """All that a run leaves: its last checkpoint, the names of all checkpoints, and the log.

    The checkpoint has weights, optimizer, averages, scale, counters, random states, the position in
    the data, history, and the state of callbacks.
    """
    root = folder / "run"
    last = checkpoint.latest(root)
    assert last is not None
    checkpoint_names = [path.name for path in checkpoint.listing(root)]
    return {
        **leaves_by_path(checkpoint.load(last).tree),
        "kept": checkpoint_names,
        "log": (folder / log).read_bytes().decode(),
    }


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names of the leaves that are not bit for bit the same."""
    return sorted(a.keys() ^ b.keys()) + sorted(
        name for name in a.keys() & b.keys() if not _same_bits(a[name], b[name])
    )


def _same_bits(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        bits = a.dtype == b.dtype and a.shape == b.shape
        return bits and torch.equal(
            a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
        )
    return type(a) is type(b) and (a == b or (a != a and b != b))


def undisturbed_ending(case: Case) -> dict[str, Any]:
    """The ending of a case to which nothing happens, in a process of its own."""
    key = json.dumps(case, sort_keys=True)
    if key not in _endings:
        with tempfile.TemporaryDirectory() as folder:
            assert fork_server()(Path(folder), **case) == 0
            _endings[key] = run_ending(Path(folder))
    return _endings[key]


# runs in this process


class Snapshots(Callback):
    """The run's state when it begins, at a step, and at its end; and every row after step 5."""

    last = True

    def __init__(self, at: int = -1) -> None:
        self.at_step = at
        self.trees: dict[str, Any] = {}
        self.rows: list[str] = []

    def step(self, run: Run, row: Row) -> None:
        if row.global_step > 5:
            self.rows.append(str(row))

    def begin(self, run: Run) -> None:
        self.trees["begin"] = run.model.snapshot()

    def next_stop(self, run: Run) -> int | None:
        return self.at_step

    def visit(self, run: Run) -> None:
        if run.position == self.at_step:
            self.trees["at"] = deepcopy(run.model.snapshot())

    def end(self, run: Run) -> None:
        self.trees["end"] = run.model.snapshot()


def train_model(
    folder: Path,
    *callbacks: Callback,
    resume: Any = None,
    model: Model | None = None,
    epochs: int = 2,
    **options: Any,
) -> Run:
    """The usual run without what changes from test to test."""
    settings = {"valid": valid_data(), "valid_every_steps": 3, **options}
    data = settings.pop("data", None) or train_data()
    return (model or build_model()).fit(
        epochs, data, callbacks=list(callbacks), resume=resume, **settings
    )


class RaisesAt(Callback):
    """Raises at one event, once it is at a step."""

    def __init__(self, event: str, at: int) -> None:
        self.event = event
        self.at_step = at

    def raise_at(self, event: str, at: int) -> None:
        if event == self.event and at >= self.at_step:
            raise LookupError("a mistake")

    def begin(self, run: Run) -> None:
        self.raise_at("begin", run.global_step)

    def epoch_begin(self, run: Run) -> None:
        self.raise_at("epoch_begin", run.global_step)

    def step(self, run: Run, row: Row) -> None:
        self.raise_at("step", row.global_step)

    def visit(self, run: Run) -> None:
        self.raise_at("visit", run.global_step)

    def epoch_end(self, run: Run) -> None:
        self.raise_at("epoch_end", run.global_step)


def train_and_log(folder: Path, *more: Callback, **options: Any) -> dict[str, Any]:
    """The end of a run with a log and a checkpoint at each epoch's end."""
    snapshots = Snapshots()
    log = JSONLLog(folder / "log", overwrite=True)
    saver = options.pop("saver", None) or Checkpoint(folder / "run", best="acc")
    train_model(folder, *more, History(), log, saver, snapshots, resume="auto", **options)
    return {**leaves_by_path(snapshots.trees["end"]), "log": (folder / "log").read_text()}
