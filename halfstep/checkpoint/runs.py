"""The checkpoints of a run: folders named by their step under one root."""

import os
import re
import time
import warnings
from collections.abc import Collection
from pathlib import Path

from halfstep.checkpoint import disk as atomic
from halfstep.checkpoint.store import read_manifest, verify
from halfstep.errors import CheckpointError, Notice, checkpoint_error

_STIR_S = 0.05  # file systems keep times in ticks of up to 10 ms
_NAME = re.compile(r"step-([0-9]{9,})")


def name_of(step: int) -> str:
    """The name of a step's checkpoint; the names of steps below 10^9 sort as the steps do."""
    if type(step) is not int or step < 0:
        raise ValueError(
            f"expected a step of 0 or more, got {step!r}. Count steps from the start of the run."
        )
    return f"step-{step:09d}"


def step_of(path: str | Path) -> int:
    """The step in a checkpoint's name, a ValueError for any other name."""
    name = Path(path).name
    match = _NAME.fullmatch(name)
    if match is None or name_of(int(match[1])) != name:
        raise ValueError(
            f"expected a name such as {name_of(123)}, got {name!r}. Use name_of(step) to make one."
        )
    return int(match[1])


def listing(root: str | Path) -> list[Path]:
    """The folders under `root` that are named as checkpoints are, by step, whole or not; none without a root."""
    root = Path(root)
    try:
        found = [path for path in root.iterdir() if _is_named(path) and path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        came, advice = error.strerror or str(error), "Name the folder of the run."
        raise checkpoint_error(root, "a folder of checkpoints", came, advice) from error
    return sorted(found, key=step_of)


def latest(root: str | Path) -> Path | None:
    """The newest checkpoint that is whole, checksums included; None without one. Broken ones are passed over, and one
    Notice names them."""
    while True:
        found, broken, lost = _search(root)
        if found or not (
            lost or _is_stirring(root)
        ):  # pruned meanwhile: newer ones are there by now
            break
    if broken:
        reasons = "\n  ".join(broken)
        went = f"{found} is used instead" if found else "no whole one is left"
        warnings.warn(f"{len(broken)} broken, {went}:\n  {reasons}", Notice, stacklevel=2)
    return found


def prune(root: str | Path, keep: int, protect: Collection[Path] = ()) -> list[Path]:
    """Removes the checkpoints older than the newest `keep` that are complete by size, the oldest first, except those
    in `protect`; returns the removed. Broken ones are not counted, so the newest whole one always stays."""
    if type(keep) is not int or keep < 1:
        raise ValueError(
            f"expected keep of 1 or more, got {keep!r}. The newest checkpoint is never removed."
        )
    paths, kept = listing(root), 0
    safe = {os.path.realpath(path) for path in protect}
    for at in reversed(range(len(paths))):
        kept += _is_complete(paths[at])
        if kept == keep:
            gone = [path for path in paths[:at] if os.path.realpath(path) not in safe]
            for path in gone:
                atomic.remove(path)
            return gone
    return []


def _search(root: str | Path) -> tuple[Path | None, list[str], bool]:
    broken, lost = [], False
    for path in reversed(listing(root)):
        try:
            verify(path)
        except CheckpointError as error:
            if os.path.lexists(path):
                broken.append(str(error))
            else:
                lost = True
            continue
        return path, broken, lost
    return None, broken, lost


def _is_stirring(root: str | Path) -> bool:
    """Whether the folder has just changed: a listing made meanwhile may have seen neither the old name nor the new."""
    try:
        return abs(time.time() - os.stat(root).st_mtime) < _STIR_S
    except OSError:
        return False


def _is_named(path: Path) -> bool:
    match = _NAME.fullmatch(path.name)
    return match is not None and name_of(int(match[1])) == path.name


def _is_complete(path: Path) -> bool:
    try:
        read_manifest(path)
    except CheckpointError:
        return False
    return True
