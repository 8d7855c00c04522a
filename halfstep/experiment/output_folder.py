"""The output folder of a run or comparison: locked by one process at a time.

A comparison's folder belongs to one specification for ever; files in it are complete or absent.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from halfstep.checkpoint import lock
from halfstep.experiment.saved_comparison import check_summary, read_result
from halfstep.experiment.settings import Settings
from halfstep.storage.url import hide_credentials, is_store_url
from halfstep.utils.files import read_json
from halfstep.utils.text import printable

SUMMARY_FILE = "compare.json"
RUNS_FOLDER = "runs"
RESULT_FILE = "result.json"
LOCK_FILE = ".lock"
REPORT_FILES = ("report.html", "report.md", "report.json")
FORMAT_VERSION = 1  # of compare.json

# Settings that may differ when a comparison goes on: more runs, another margin, and how often the
# host visits the device.
CHANGEABLE_SETTINGS = ("seeds", "precisions", "margin", "sink")

# Settings that earlier versions did not have, with their values then.
LATER_SETTINGS = {"ranks": 1, "exact": None, "logical": None}

# Facts of the environment that decide bits or times. Another number of threads adds in another
# order.
FIXED_ENVIRONMENT = ("device", "torch", "threads")

MAX_NAMES_SHOWN = 3  # of files that are in the way


def lock_output_folder(out: Path) -> AbstractContextManager[None]:
    """Inside, no other process can use the folder; the lock ends with the block or the process."""
    if is_store_url(out):
        raise ValueError(
            f"out: expected a folder of this machine, got {hide_credentials(str(out))}. "
            "halfstep train writes to a store, a comparison does not."
        )
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


class OtherComparisonError(ValueError):
    """The folder holds a comparison that this one cannot go on with; the message names all changes.

    The rest is for whoever offers the ways to go on.
    """

    def __init__(
        self,
        problem: str,
        advice: str,
        *,
        command: str,
        same_spec: bool,
        same_machine: bool,
        threads: int | None,
    ) -> None:
        super().__init__(f"out: {problem}. {advice}")
        self.problem = problem
        """The folder, and everything that differs."""
        self.command = command
        """The command that began it, as it was typed."""
        self.same_spec = same_spec
        self.same_machine = same_machine
        """Device and torch are those of before; the number of threads may differ."""
        self.threads = threads
        """The number of threads of before, where it differs and can be set here; else None."""


def check_same_comparison(
    out: Path, spec: Mapping[str, Any], environment: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The summary of the comparison that the folder holds; None for an empty folder.

    Refuses a folder of something else, and one of a comparison with other settings than the seeds,
    the precisions and the margin. The error names every difference.
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
        return None
    if not isinstance(before, dict) or before.get("halfstep_compare") != FORMAT_VERSION:
        raise ValueError(
            f"out: {out}/{SUMMARY_FILE} is not a comparison of this version. "
            "Name another folder: --out"
        )
    check_summary(out / SUMMARY_FILE, before)

    fixed_settings = [name for name in spec if name not in CHANGEABLE_SETTINGS]
    spec_changes = _list_changes({**LATER_SETTINGS, **before["spec"]}, spec, fixed_settings)
    environment_changes = _list_changes(before["environment"], environment, FIXED_ENVIRONMENT)
    if not spec_changes and not environment_changes:
        return before

    what = "another comparison" if spec_changes else "this comparison, begun otherwise"
    changes = "; ".join([*spec_changes, *environment_changes])
    threads = _threads_to_set(before["environment"], environment)
    advice = _how_to_go_on(threads, same_spec=not spec_changes)
    raise OtherComparisonError(
        f"{out} holds {what}: {changes}",
        advice,
        command=str(before.get("command", "")),
        same_spec=not spec_changes,
        same_machine=not _list_changes(before["environment"], environment, ("device", "torch")),
        threads=threads,
    )


def finished_runs_beside(
    out: Path, before: Mapping[str, Any], settings: Settings, image_count: int
) -> list[dict[str, Any]]:
    """Results of the folder's precisions and seeds that `settings` do not ask for.

    `image_count`: of the test images.
    """
    requested = set(settings.precision_seed_pairs)
    results = []
    for seed in before["spec"]["seeds"]:
        for precision in before["spec"]["precisions"]:
            if (precision, seed) in requested:
                continue
            result = read_result(run_folder(out, precision, seed) / RESULT_FILE, image_count)
            if result is not None and (result["precision"], result["seed"]) == (precision, seed):
                results.append(result)
    return results


def precisions_and_seeds(out: Path) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    """Those of the comparison that the folder holds; None where it holds none that can be read."""
    try:
        spec = read_json(out / SUMMARY_FILE)["spec"]
        return tuple(map(str, spec["precisions"])), tuple(map(int, spec["seeds"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _list_changes(
    old: Mapping[str, Any], new: Mapping[str, Any], names: Sequence[str]
) -> list[str]:
    return [
        f"{name} was {old.get(name)!r} and is {new[name]!r}"
        for name in names
        if new[name] != old.get(name)
    ]


def _threads_to_set(old: Mapping[str, Any], new: Mapping[str, Any]) -> int | None:
    """The number of threads of before, where it is another one and OMP_NUM_THREADS can give it.

    It gives no more threads than there are cores.
    """
    threads = old.get("threads")
    if threads == new["threads"] or not isinstance(threads, int):
        return None
    return threads if threads <= (os.cpu_count() or 1) else None


def _how_to_go_on(threads: int | None, *, same_spec: bool) -> str:
    """Advice for a folder that does not fit."""
    if threads is not None:
        repeat = "Go on" if same_spec else "Repeat the command as it was"
        repeat = f"{repeat} with OMP_NUM_THREADS={threads} in front of it"
    elif same_spec:
        repeat = "Repeat it where it was begun"
    else:
        repeat = "Repeat the command as it was"
    return f"{repeat}, name another folder (--out), or start over (--fresh)."
