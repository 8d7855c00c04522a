"""The folder of a comparison: one process at a time, one spec for ever, every file whole or not there."""

import contextlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from halfstep.checkpoint import lock

SUMMARY, LOCK, VERSION = "compare.json", ".lock", 1
# what may be asked anew of a folder: more runs, another margin, or how often the host looks in
_FREE = ("seeds", "precisions", "margin", "sink")
_ENVIRONMENT = ("device", "torch", "threads")


def write_json(path: Path, value: Any) -> None:
    """Strict JSON, on the disk and whole before it has its name; NaN and inf become null."""
    text = json.dumps(_strict(value), indent=1, allow_nan=False)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """What `write_json` wrote; None when there is no such file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(
            f"{path}: expected JSON, found something else ({error}). Remove it, or name another folder."
        ) from None


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _strict(each) for name, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, list | tuple) else value


def held(out: Path) -> AbstractContextManager[None]:
    """The folder is this process's until the block ends, or the process does, however it ends."""
    return lock.hold_lock(out, lock.LockRequest("out", LOCK, "name another folder: --out"))


def check(out: Path, spec: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
    """Refuses a folder of something else, or of a comparison that asked for something else, naming the difference."""
    before = read_json(out / SUMMARY)
    if before is None:
        others = sorted(path.name for path in out.iterdir() if path.name not in (LOCK, "runs"))
        if others:
            raise ValueError(
                f"out: {out} holds other things ({', '.join(others[:3])}). Name a folder of its own: --out"
            )
        return
    if not isinstance(before, dict) or before.get("halfstep_compare") != VERSION:
        raise ValueError(
            f"out: {out}/{SUMMARY} is not a comparison of this version. Name another folder: --out"
        )
    asked, around = _asked(before["spec"], spec), _around(before["environment"], environment)
    if asked or around:
        what = "another comparison" if asked else "this comparison, begun otherwise"
        ways = _ways(before, environment, asked=bool(asked))
        raise ValueError(f"out: {out} holds {what}: {'; '.join([*asked, *around])}. {ways}")


def _asked(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    changed = [name for name in new if name not in _FREE and new[name] != old.get(name)]
    said = [f"{name} was {old.get(name)!r} and is {new[name]!r}" for name in changed]
    said += _dropped("precisions", old, new) + _dropped("seeds", old, new)
    if old["precisions"][0] != new["precisions"][0]:
        said.append(f"the reference was {old['precisions'][0]!r} and is {new['precisions'][0]!r}")
    return said


def _around(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Another number of threads adds in another order: other bits, and other times."""
    return [
        f"{name} was {then.get(name)!r} and is {now[name]!r}"
        for name in _ENVIRONMENT
        if now[name] != then.get(name)
    ]


def _ways(before: Mapping[str, Any], now: Mapping[str, Any], *, asked: bool) -> str:
    """What to do about it. Threads can be had again, up to the number of cores, where OMP_NUM_THREADS ends."""
    then = before["environment"].get("threads")
    first = "Repeat the command as it was" if asked else "Repeat it where it was begun"
    if then != now["threads"] and isinstance(then, int) and then <= (os.cpu_count() or 1):
        first = f"{'Repeat the command as it was' if asked else 'Go on'} with OMP_NUM_THREADS={then} in front of it"
    return f"{first}, name another folder (--out), or start over (--fresh)."


def _dropped(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """More of them may be asked for, not fewer: finished runs would be left out without a word."""
    gone: Sequence[Any] = [value for value in old[name] if value not in new[name]]
    return [f"{name} had {', '.join(map(str, gone))} too"] if gone else []


def clear(out: Path) -> None:
    """Removes a comparison's own files, and nothing else."""
    if read_json(out / SUMMARY) is None:
        return
    shutil.rmtree(out / "runs", ignore_errors=True)
    for name in (SUMMARY, "report.html", "report.md", "report.json"):
        with contextlib.suppress(FileNotFoundError):
            (out / name).unlink()


def run_folder(out: Path, name: str, seed: int) -> Path:
    return out / "runs" / f"{name}-s{seed}"
