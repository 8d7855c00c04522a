"""The output folder of a run or comparison: locked by one process at a time.

A comparison's folder belongs to one specification for ever; files in it are complete or absent.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from halfstep.checkpoint import lock
from halfstep.utils.files import read_json
from halfstep.utils.text import printable

SUMMARY_FILE = "compare.json"
RUNS_FOLDER = "runs"
LOCK_FILE = ".lock"
REPORT_FILES = ("report.html", "report.md", "report.json")
FORMAT_VERSION = 1  # of compare.json

# Settings that may differ when a comparison goes on: more runs, another margin, and how often the
# host visits the device.
CHANGEABLE_SETTINGS = ("seeds", "precisions", "margin", "sink")

# Facts of the environment that decide bits or times. Another number of threads adds in another
# order.
FIXED_ENVIRONMENT = ("device", "torch", "threads")

MAX_NAMES_SHOWN = 3  # of files that are in the way


def lock_output_folder(out: Path) -> AbstractContextManager[None]:
    """Inside, no other process can use the folder; the lock ends with the block or the process."""
    request = lock.LockRequest("out", LOCK_FILE, "name another folder: --out")
    return lock.hold_lock(out, request)


def run_folder(out: Path, precision: str, seed: int) -> Path:
    """The folder of one run of a comparison."""
    return out / RUNS_FOLDER / f"{precision}-s{seed}"


def remove_comparison(out: Path) -> None:
    """Removes the files of a comparison, and nothing else."""
    if read_json(out / SUMMARY_FILE) is None:
        return
    shutil.rmtree(out / RUNS_FOLDER, ignore_errors=True)
    for name in (SUMMARY_FILE, *REPORT_FILES):
        (out / name).unlink(missing_ok=True)


def check_same_comparison(
    out: Path, spec: Mapping[str, Any], environment: Mapping[str, Any]
) -> None:
    """Refuses a folder of something else, or of a comparison with other settings.

    The error names every difference. An empty folder is fine.
    """
    before = read_json(out / SUMMARY_FILE)
    if before is None:
        others = sorted(
            path.name for path in out.iterdir() if path.name not in (LOCK_FILE, RUNS_FOLDER)
        )
        if others:
            names = ", ".join(map(printable, others[:MAX_NAMES_SHOWN]))
            raise ValueError(
                f"out: {out} holds other things ({names}). Name a folder of its own: --out"
            )
        return
    if not isinstance(before, dict) or before.get("halfstep_compare") != FORMAT_VERSION:
        raise ValueError(
            f"out: {out}/{SUMMARY_FILE} is not a comparison of this version. "
            "Name another folder: --out"
        )

    spec_changes = _compare_specs(before["spec"], spec)
    environment_changes = _list_changes(before["environment"], environment, FIXED_ENVIRONMENT)
    if not spec_changes and not environment_changes:
        return
    what = "another comparison" if spec_changes else "this comparison, begun otherwise"
    changes = "; ".join([*spec_changes, *environment_changes])
    advice = _how_to_go_on(before["environment"], environment, same_spec=not spec_changes)
    raise ValueError(f"out: {out} holds {what}: {changes}. {advice}")


def _compare_specs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Differences that a comparison cannot go on with, one sentence each."""
    fixed_settings = [name for name in new if name not in CHANGEABLE_SETTINGS]
    changes = _list_changes(old, new, fixed_settings)

    # More precisions and seeds are welcome. With fewer, finished runs would silently be left out.
    for name in ("precisions", "seeds"):
        dropped = [str(value) for value in old[name] if value not in new[name]]
        if dropped:
            changes.append(f"{name} had {', '.join(dropped)} too")

    old_reference = old["precisions"][0]
    new_reference = new["precisions"][0]
    if old_reference != new_reference:
        changes.append(f"the reference was {old_reference!r} and is {new_reference!r}")
    return changes


def _list_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], names: list[str] | tuple[str, ...]
) -> list[str]:
    return [
        f"{name} was {old.get(name)!r} and is {new[name]!r}"
        for name in names
        if new[name] != old.get(name)
    ]


def _how_to_go_on(old: Mapping[str, Any], new: Mapping[str, Any], *, same_spec: bool) -> str:
    """Advice for a folder that does not fit; `old` and `new` are the environments."""
    threads = old.get("threads")
    # OMP_NUM_THREADS gives no more threads than there are cores.
    can_be_set = isinstance(threads, int) and threads <= (os.cpu_count() or 1)
    if threads != new["threads"] and can_be_set:
        repeat = "Go on" if same_spec else "Repeat the command as it was"
        repeat = f"{repeat} with OMP_NUM_THREADS={threads} in front of it"
    elif same_spec:
        repeat = "Repeat it where it was begun"
    else:
        repeat = "Repeat the command as it was"
    return f"{repeat}, name another folder (--out), or start over (--fresh)."
