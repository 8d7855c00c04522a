"""Where two runs part: the first step whose records differ, the first checkpoint, and by replay the tensors."""

import json
import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep import checkpoint
from halfstep.engine import Callback, Run
from halfstep.errors import Notice
from halfstep.experiment.builders__build import Builder, built
from halfstep.reproduce.replay_step import nearest, prints, run_to

LOG = "log.jsonl"
_CLOCKS = re.compile(r"time|.*seconds")  # fields of a row that no two runs share
_APART = re.compile(
    r"(writers|loop\.epochs)\b"
)  # what was logged where, and how far to go: they decide no step


@dataclass(frozen=True)
class Difference:
    """`step`: the first that differs, as far as was looked; None: none was found. `by` says how it was looked for."""

    step: int | None
    by: str
    names: tuple[str, ...] = ()
    """What differs there: fields of the record, or tensors of the state."""
    equal_until: int = 0
    """The last step known to be equal."""
    note: str = ""
    """Which run is longer, where one is: no difference by itself."""

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        if self.step is None:
            return f"no difference up to step {self.equal_until} ({self.by}){note}"
        shown = ", ".join(self.names[:8]) + (
            f" and {len(self.names) - 8} more" if len(self.names) > 8 else ""
        )
        return f"step {self.step} differs ({self.by}): {shown}; equal up to step {self.equal_until}{note}"


def diff(
    a: str | Path, b: str | Path, *, build: tuple[Builder, Builder] | None = None
) -> list[Difference]:
    """What the logs say, what the checkpoints say, and, with builders for both runs, what a replay of both says."""
    folders = Path(a), Path(b)
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"diff: expected the folder of a run, found nothing at {folder}"
            )
    found = [by for by in (_by_logs(*folders), _by_checkpoints(*folders)) if by is not None]
    if not found:
        raise ValueError(
            f"diff: {a} and {b} share neither a {LOG} nor a checkpoint of the same step that is whole"
        )
    if build is not None:
        found.append(_by_replay(folders, build, found))
    return found


def _by_logs(a: Path, b: Path) -> Difference | None:
    """By the rows of the metrics logs, times aside. Fingerprints, where recorded, see every bit of the state."""
    if not (a / LOG).is_file() or not (b / LOG).is_file():
        return None
    one, other = _rows(a / LOG), _rows(b / LOG)
    note = _longer(
        (a, b), *([step for step, kind in rows if kind == "step"] for rows in (one, other))
    )
    equal = 0
    for step, keys in groupby(sorted(one.keys() & other.keys()), key=itemgetter(0)):
        names = tuple(name for key in keys for name in _fields(one[key], other[key]))
        if names:
            return Difference(step, "by the logs", names, equal, note)
        equal = step
    return Difference(None, "by the logs", (), equal, note)


def _fields(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    return [name for name in a if name in b and not _CLOCKS.fullmatch(name) and a[name] != b[name]]


def _rows(path: Path) -> dict[tuple[int, str], dict[str, Any]]:
    """The rows of a log by step and kind. A last line without an end was being written when the run was killed."""
    lines, rows = path.read_bytes().split(b"\n"), {}
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line.decode()) if line.strip() else {}
        except ValueError:
            if number == len(lines):
                break
            row = None
        if not isinstance(row, dict):
            came = f"{line[:40]!r}. Take that line out to compare the others."
            raise ValueError(f"diff: {path}, line {number}: expected a JSON object, got {came}")
        if isinstance(row.get("global_step"), int):
            rows[row["global_step"], str(row.get("kind"))] = row
    return rows


def _longer(folders: tuple[Path, Path], a: Iterable[int], b: Iterable[int]) -> str:
    (less, short), (most, long) = sorted(
        zip((max(a, default=0), max(b, default=0)), folders, strict=True)
    )
    return f"{long} is recorded up to step {most}, {short} up to step {less}" if less < most else ""


def _by_checkpoints(a: Path, b: Path) -> Difference | None:
    """By every tensor and number of the checkpoints of the same step."""
    steps = [
        {checkpoint.step_of(path): path for path in checkpoint.listing(folder)} for folder in (a, b)
    ]
    note, equal = _longer((a, b), *steps), None
    for step in sorted(steps[0].keys() & steps[1].keys()):
        try:
            trees = [checkpoint.load(each[step]).tree for each in steps]
        except checkpoint.CheckpointError as error:
            warnings.warn(f"diff: step {step} is left out: {error}", Notice, stacklevel=3)
            continue
        names = [name for name in _differing("", *trees) if not _APART.match(name)]
        if names:
            names.sort(
                key=lambda name: name.startswith("rng")
            )  # named last: it follows from the rest
            return Difference(step, "by the checkpoints", tuple(names), equal or 0, note)
        equal = step
    return None if equal is None else Difference(None, "by the checkpoints", (), equal, note)


def _differing(path: str, a: Any, b: Any) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        only = [f"{path}{key} (in one only)" for key in sorted(map(str, a.keys() ^ b.keys()))]
        return only + [
            name for key in a if key in b for name in _differing(f"{path}{key}.", a[key], b[key])
        ]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [
            name
            for i, (x, y) in enumerate(zip(a, b, strict=True))
            for name in _differing(f"{path}{i}.", x, y)
        ]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bytes(a), _bytes(b))
    else:
        same = type(a) is type(b) and (a == b or (a != a and b != b))
    return [] if same else [path.removesuffix(".")]


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().reshape(-1).view(torch.uint8)


def _by_replay(
    folders: tuple[Path, Path], build: tuple[Builder, Builder], found: list[Difference]
) -> Difference:
    """Both runs again from their last equal checkpoint, step by step, comparing the fingerprint of every tensor."""
    equal = max((each.equal_until for each in found if each.by == "by the checkpoints"), default=0)
    ends = [each.step for each in found if each.step is not None]
    last = min(ends) if ends else max(each.equal_until for each in found)
    steps = [
        _prints_of(folder, each, equal, last) for folder, each in zip(folders, build, strict=True)
    ]
    for step in sorted(steps[0].keys() & steps[1].keys()):
        one, other = steps[0][step], steps[1][step]
        names = tuple(name for name in one if one[name] != other.get(name)) + tuple(
            n for n in other if n not in one
        )
        if names:
            return Difference(step, "by replay", names, equal)
        equal = step
    return Difference(None, "by replay", (), equal)


def _prints_of(folder: Path, build: Builder, start: int, last: int) -> dict[int, dict[str, int]]:
    watch = _Prints(last)
    run_to(built(build), folder, nearest(folder, start) if start else None, watch, last)
    return watch.found


class _Prints(Callback):
    """The fingerprints after every step up to the last."""

    def __init__(self, last_step: int) -> None:
        self.last_step, self.found = last_step, dict[int, dict[str, int]]()

    def next_stop(self, run: Run) -> int | None:
        return run.position + 1

    def visit(self, run: Run) -> None:
        self.found[run.position] = prints(run.model)
        if run.position >= self.last_step:
            run.stop("compared")
