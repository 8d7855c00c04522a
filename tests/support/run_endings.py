"""What runs left behind, leaf by leaf, and what they leave when nothing happens to them; runs in this process."""

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
from tests.support.killed_run import build, forked, train_data, valid_data

Case = dict[str, Any]
_known: dict[str, dict[str, Any]] = {}


def leaves(tree: Any, name: str = "") -> dict[str, Any]:
    """By path; an empty dict or list is a leaf."""
    if isinstance(tree, dict | list | tuple) and tree:
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, inner in items for k, v in leaves(inner, f"{name}.{key}").items()}
    return {name: tree}


def ending(folder: Path) -> dict[str, Any]:
    """All that a run leaves: its last checkpoint (weights, optimizer, averages, scale, counters, random states, place
    in the data, history, what callbacks know), the names of those kept, and the log."""
    root = folder / "run"
    last = checkpoint.latest(root)
    assert last is not None
    kept = [path.name for path in checkpoint.listing(root)]
    return {
        **leaves(checkpoint.load(last).tree),
        "kept": kept,
        "log": (folder / "log.jsonl").read_text(),
    }


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """The names of the leaves that are not bit for bit the same."""
    return sorted(a.keys() ^ b.keys()) + sorted(
        name for name in a.keys() & b.keys() if not _same(a[name], b[name])
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        bits = a.dtype == b.dtype and a.shape == b.shape
        return bits and torch.equal(
            a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
        )
    return type(a) is type(b) and (a == b or (a != a and b != b))


def undisturbed(case: Case) -> dict[str, Any]:
    """The ending of a case to which nothing happens, in a process of its own."""
    key = json.dumps(case, sort_keys=True)
    if key not in _known:
        with tempfile.TemporaryDirectory() as folder:
            assert forked()(Path(folder), **case) == 0
            _known[key] = ending(Path(folder))
    return _known[key]


# runs in this process


class Snap(Callback):
    """The run's snapshots: when it begins, at a step, and at its end; and every row from there on."""

    last = True

    def __init__(self, at: int = -1) -> None:
        self.at, self.taken, self.rows = at, {}, []

    def step(self, run: Run, row: Row) -> None:
        if row.global_step > 5:
            self.rows.append(str(row))

    def begin(self, run: Run) -> None:
        self.taken["begin"] = run.model.snapshot()

    def next_stop(self, run: Run) -> int | None:
        return self.at

    def visit(self, run: Run) -> None:
        if run.position == self.at:
            self.taken["at"] = deepcopy(run.model.snapshot())

    def end(self, run: Run) -> None:
        self.taken["end"] = run.model.snapshot()


def fit(
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
    return (model or build()).fit(
        epochs, data, callbacks=list(callbacks), resume=resume, **settings
    )


class Fails(Callback):
    """Raises at one event, once it is at a step."""

    def __init__(self, event: str, at: int) -> None:
        self.event, self.at = event, at

    def check(self, event: str, at: int) -> None:
        if event == self.event and at >= self.at:
            raise LookupError("a mistake")

    def begin(self, run: Run) -> None:
        self.check("begin", run.global_step)

    def epoch_begin(self, run: Run) -> None:
        self.check("epoch_begin", run.global_step)

    def step(self, run: Run, row: Row) -> None:
        self.check("step", row.global_step)

    def visit(self, run: Run) -> None:
        self.check("visit", run.global_step)

    def epoch_end(self, run: Run) -> None:
        self.check("epoch_end", run.global_step)


def logged(folder: Path, *more: Callback, **options: Any) -> dict[str, Any]:
    """The end of a run with a log and a checkpoint at each epoch's end."""
    snap, log = Snap(), JSONLLog(folder / "log", overwrite=True)
    saver = options.pop("saver", None) or Checkpoint(folder / "run", best="acc")
    fit(folder, *more, History(), log, saver, snap, resume="auto", **options)
    return {**leaves(snap.taken["end"]), "log": (folder / "log").read_text()}
