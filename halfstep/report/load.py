"""Finding the JSON behind a report: a comparison's compare.json, a run's result.json, or its log.jsonl."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from halfstep.report.load__values import number

_POINTS = 500
_ACCURACY = ("valid_acc", "valid_accuracy")


def read(folder: str | Path) -> dict[str, Any]:
    """The summary in a folder, or in the file that is named; one run becomes a comparison of one row."""
    path = Path(folder)
    found = path if path.is_file() else _first(path)
    if found.suffix == ".jsonl":
        return _alone(_from_log(found), found.parent) | _told(found.parent)
    try:
        value = json.loads(found.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"report: expected JSON in {found}, got {error}. Run the command that wrote it again."
        ) from None
    if found.name == "result.json" and isinstance(value, dict):
        return _alone(value, found.parent)
    return value if isinstance(value, dict) else {"halfstep_compare": type(value).__name__}


def _first(folder: Path) -> Path:
    names = ("compare.json", "result.json", "log.jsonl")
    for name in names:
        if (folder / name).is_file():
            return folder / name
    came = "no such folder" if not folder.exists() else "none of them"
    raise FileNotFoundError(
        f"report: expected compare.json (halfstep compare), result.json or log.jsonl (hs.JSONLLog) in {folder}, "
        f"found {came}. Name the folder that was given to --out, or the file itself."
    )


def _alone(result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """One run as a summary: its own row, nothing to compare with."""
    name = result.get("precision") or folder.resolve().name
    keys = (
        "ms_per_step",
        "s_per_epoch",
        "samples_per_s",
        "peak_memory",
        "loss",
        "acc",
        "skipped",
        "final_scale",
    )
    failed = int(result.get("status") == "failed")
    row = {
        "precision": name,
        "n": 1,
        "failed": failed,
        "verdict_kind": "reference",
        "verdict": "one run",
    }
    return {
        "halfstep_compare": 1,
        "alone": True,
        "title": folder.resolve().name,
        "runs": [{**result, "precision": name}],
        "rows": [row | {key: result.get(key) for key in keys}],
    }


def _told(folder: Path) -> dict[str, Any]:
    """What halfstep train wrote beside its log: the setup, the command, the date; of a builder only what it leaves."""
    try:
        found = json.loads((folder / "run.json").read_text("utf-8"))
        asked = dict(found["asked"]) if found["halfstep_train"] == 1 else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    if not asked:
        return {}
    names = (
        ("build", "epochs", "seed")
        if asked.get("build")
        else [name for name in asked if name != "device"]
    )
    spec = {
        name: asked.get(name) for name in names if not (name == "accumulate" and asked[name] == 1)
    }
    return {"spec": spec, **{name: found.get(name) for name in ("command", "date", "environment")}}


def _from_log(path: Path) -> dict[str, Any]:
    """A run's result from the lines of a JSONLLog; times are not in it."""
    lines = list(_lines(path))
    steps = [line for line in lines if line.get("kind") == "step"]
    if not lines:
        raise ValueError(
            f"report: expected the lines of hs.JSONLLog in {path}, got none. Train with that callback first."
        )
    losses = _losses(steps)
    epochs = [_epoch(line, losses) for line in lines if line.get("kind") == "evaluation"]
    taken = _evenly(steps)
    last = epochs[-1] if epochs else {}
    skipped = [line.get("global_step") for line in steps if line.get("skipped")]
    return {
        "status": "done",
        "epochs": epochs,
        "curve": {"step": [line.get("global_step") for line in taken]}
        | {name: [_one(line.get(name)) for line in taken] for name in ("loss", "scale", "lr")},
        "skipped_steps": skipped,
        "skipped": len(skipped),
        "loss": last.get("valid_loss", _one(steps[-1].get("loss")) if steps else None),
        "acc": last.get("valid_acc"),
        "final_scale": _one(steps[-1].get("scale")) if steps else None,
    }


def _lines(path: Path) -> Iterable[dict[str, Any]]:
    """Objects of the file; the last line may be half written, by a run that still goes on."""
    lines = path.read_bytes().splitlines(keepends=True)
    for i, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if i == len(lines) and not line.endswith(b"\n"):
                return
            raise ValueError(
                f"report: expected JSON in line {i} of {path}, got {error}. Cut that line out."
            ) from None
        if isinstance(value, dict):
            yield value


def _losses(steps: list[dict[str, Any]]) -> dict[Any, list[float]]:
    """The finite training losses of each epoch."""
    found: dict[Any, list[float]] = {}
    for step in steps:
        if (loss := number(step.get("loss"))) is not None:
            found.setdefault(step.get("epoch"), []).append(loss)
    return found


def _epoch(line: dict[str, Any], losses: dict[Any, list[float]]) -> dict[str, Any]:
    found = losses.get(line.get("epoch"), [])
    accuracy = next((line[name] for name in _ACCURACY if name in line), None)
    mean = sum(found) / len(found) if found else None
    return {
        "epoch": line.get("epoch"),
        "loss": mean,
        "valid_loss": line.get("valid_loss"),
        "valid_acc": accuracy,
    }


def _evenly(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    count = min(_POINTS, len(steps))
    return [steps[i * (len(steps) - 1) // max(1, count - 1)] for i in range(count)]


def _one(value: Any) -> float | None:
    """A number; the first of several parameter groups' rates."""
    return number(value[0] if isinstance(value, list) and value else value)
