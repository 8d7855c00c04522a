"""Where two runs part: the first step whose records differ, the first checkpoint, and by replay the tensors."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep import checkpoint
from halfstep.again.build import Builder, built
from halfstep.again.rerun import nearest, prints, run_to
from halfstep.engine import Callback, Run

LOG = "log.jsonl"
_IGNORED = ("rng", "history", "losses")  # compared, but named last: they follow from the rest


@dataclass(frozen=True)
class Difference:
    """`step`: the first that differs, as far as was looked; None: none was found. `by` says how it was looked for."""

    step: int | None
    by: str
    names: tuple[str, ...] = ()
    """What differs there: fields of the record, or tensors of the state."""
    equal_until: int = 0
    """The last step known to be equal."""

    def __str__(self) -> str:
        if self.step is None:
            return f"no difference up to step {self.equal_until} ({self.by})"
        shown = ", ".join(self.names[:8]) + (f" and {len(self.names) - 8} more" if len(self.names) > 8 else "")
        return f"step {self.step} differs ({self.by}): {shown}; equal up to step {self.equal_until}"


def diff(a: str | Path, b: str | Path, *, build: tuple[Builder, Builder] | None = None) -> list[Difference]:
    """What the logs say, what the checkpoints say, and, with builders for both runs, what a replay of both says."""
    folders = Path(a), Path(b)
    for folder in folders:
        if not folder.is_dir():
            raise FileNotFoundError(f"diff: expected the folder of a run, found nothing at {folder}")
    found = [by for by in (_by_logs(*folders), _by_checkpoints(*folders)) if by is not None]
    if not found:
        raise ValueError(f"diff: {a} and {b} share neither a {LOG} nor a checkpoint of the same step")
    if build is not None:
        found.append(_by_replay(folders, build, found))
    return found


def _by_logs(a: Path, b: Path) -> Difference | None:
    """By the rows of the metrics logs, times aside. Fingerprints, where recorded, see every bit of the state."""
    if not (a / LOG).is_file() or not (b / LOG).is_file():
        return None
    rows = [{row["global_step"]: row for row in _lines(folder / LOG) if "global_step" in row} for folder in (a, b)]
    equal = 0
    for step in sorted(rows[0].keys() & rows[1].keys()):
        one, other = rows[0][step], rows[1][step]
        names = tuple(k for k in one if k in other and not k.endswith("seconds") and one[k] != other[k])
        if names:
            return Difference(step, "by the logs", names, equal)
        equal = step
    return Difference(None, "by the logs", (), equal)


def _lines(path: Path) -> list[dict[str, Any]]:
    with path.open() as file:
        return [json.loads(line) for line in file if line.strip()]


def _by_checkpoints(a: Path, b: Path) -> Difference | None:
    """By every tensor and number of the checkpoints of the same step."""
    steps = [{checkpoint.step_of(path): path for path in checkpoint.listing(folder)} for folder in (a, b)]
    common = sorted(step for step in steps[0].keys() & steps[1].keys() if step is not None)
    equal = 0
    for step in common:
        trees = [checkpoint.load(each[step]).tree for each in steps]
        names = sorted(_differing("", *trees), key=lambda name: name.split(".")[0] in _IGNORED)
        if names:
            return Difference(step, "by the checkpoints", tuple(names), equal)
        equal = step
    return Difference(None, "by the checkpoints", (), equal) if common else None


def _differing(path: str, a: Any, b: Any) -> list[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        only = [f"{path}{key} (in one only)" for key in sorted(map(str, a.keys() ^ b.keys()))]
        return only + [name for key in a if key in b for name in _differing(f"{path}{key}.", a[key], b[key])]
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        return [name for i, (x, y) in enumerate(zip(a, b, strict=True)) for name in _differing(f"{path}{i}.", x, y)]
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same = (
            a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(torch.uint8) if a.dim() else a, _as(a, b))
        )
    else:
        same = type(a) is type(b) and (a == b or (a != a and b != b))
    return [] if same else [path.removesuffix(".")]


def _as(a: Tensor, b: Tensor) -> Tensor:
    return b.view(torch.uint8) if a.dim() else b


def _by_replay(folders: tuple[Path, Path], build: tuple[Builder, Builder], found: list[Difference]) -> Difference:
    """Both runs again from their last equal checkpoint, step by step, comparing the fingerprint of every tensor."""
    equal = max((each.equal_until for each in found if each.by == "by the checkpoints"), default=0)
    ends = [each.step for each in found if each.step is not None]
    last = min(ends) if ends else max(each.equal_until for each in found)
    steps = [_prints_of(folder, each, equal, last) for folder, each in zip(folders, build, strict=True)]
    for step in sorted(steps[0].keys() & steps[1].keys()):
        one, other = steps[0][step], steps[1][step]
        names = tuple(name for name in one if one[name] != other.get(name)) + tuple(n for n in other if n not in one)
        if names:
            return Difference(step, "by replay", names, equal)
        equal = step
    return Difference(None, "by replay", (), equal)


def _prints_of(folder: Path, build: Builder, start: int, last: int) -> dict[int, dict[str, int]]:
    watch = _Prints(last)
    run_to(built(build), nearest(folder, start) if start else None, watch)
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
