"""Reads the JSON of a report: compare.json of a comparison, or result.json or log.jsonl of a run.

A run is returned as a comparison with a single row, so that both are shown in the same way.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from halfstep.report.report_data import finite_or_none

JsonObject = dict[str, Any]

# In this order: the first that exists is read.
FILE_NAMES = ("compare.json", "result.json", "log.jsonl")

# Numbers of a run's result that a row of the table shows.
ROW_NUMBERS = (
    "ms_per_step",
    "s_per_epoch",
    "samples_per_s",
    "peak_memory",
    "loss",
    "acc",
    "skipped",
    "final_scale",
)

# Points of a curve that are taken from a log; a chart shows 100 of them at most.
MAX_CURVE_POINTS = 500

# Names under which users log the accuracy; the first that is present counts.
ACCURACY_NAMES = ("valid_acc", "valid_accuracy")


def read(folder: str | Path) -> JsonObject:
    """The summary in a folder, or in the file that is named. One run becomes a single row."""
    path = Path(folder)
    if not path.is_file():
        path = _find_file(path)
    if path.suffix == ".jsonl":
        return _single_run_summary(_result_from_log(path), path.parent) | _run_settings(path.parent)

    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"report: expected JSON in {path}, got {error}. Run the command that wrote it again."
        ) from None
    if not isinstance(value, dict):
        # Not a summary; whoever shows it refuses it by this entry.
        return {"halfstep_compare": type(value).__name__}
    if path.name == "result.json":
        return _single_run_summary(value, path.parent)
    return value


def _find_file(folder: Path) -> Path:
    for name in FILE_NAMES:
        if (folder / name).is_file():
            return folder / name
    problem = "none of them" if folder.exists() else "no such folder"
    raise FileNotFoundError(
        "report: expected compare.json (halfstep compare), result.json or log.jsonl (hs.JSONLLog) "
        f"in {folder}, found {problem}. Name the folder that was given to --out, or the file "
        "itself."
    )


def _single_run_summary(result: JsonObject, folder: Path) -> JsonObject:
    """A summary of one run: its own row, with nothing to compare it with."""
    folder_name = folder.resolve().name
    precision = result.get("precision") or folder_name
    row: JsonObject = {
        "precision": precision,
        "n": 1,
        "failed": int(result.get("status") == "failed"),
        "verdict_kind": "reference",
        "verdict": "one run",
    }
    for name in ROW_NUMBERS:
        row[name] = result.get(name)
    return {
        "halfstep_compare": 1,
        "alone": True,
        "title": folder_name,
        "runs": [{**result, "precision": precision}],
        "rows": [row],
    }


def _run_settings(folder: Path) -> JsonObject:
    """Setup, command and date from the run.json that halfstep train writes beside its log.

    Empty where that file is missing, damaged or of another version: the log alone makes a report.
    """
    try:
        run = json.loads((folder / "run.json").read_text("utf-8"))
        settings = dict(run["asked"]) if run["halfstep_train"] == 1 else {}
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return {}
    if not settings:
        return {}

    if settings.get("build"):
        # A builder makes network, data and optimizer by itself: the other settings had no effect.
        spec = {name: settings.get(name) for name in ("build", "epochs", "seed")}
    else:
        spec = {name: value for name, value in settings.items() if name != "device"}
        if spec.get("accumulate") == 1:
            del spec["accumulate"]
    return {
        "spec": spec,
        "command": run.get("command"),
        "date": run.get("date"),
        "environment": run.get("environment"),
    }


def _result_from_log(path: Path) -> JsonObject:
    """A run's result from the lines of a JSONLLog. Times and memory are not in a log."""
    lines = list(_log_lines(path))
    if not lines:
        raise ValueError(
            f"report: expected the lines of hs.JSONLLog in {path}, got none. Train with that "
            "callback first."
        )
    steps = [line for line in lines if line.get("kind") == "step"]
    skipped_steps = [step.get("global_step") for step in steps if step.get("skipped")]

    # The curve: evenly spaced steps.
    points = _evenly_spaced(steps, MAX_CURVE_POINTS)
    curve: JsonObject = {"step": [point.get("global_step") for point in points]}
    for name in ("loss", "scale", "lr"):
        curve[name] = [_first_number(point.get(name)) for point in points]

    # The epochs: what was measured after each, beside the mean of its training losses.
    losses = _losses_by_epoch(steps)
    epochs = []
    for line in lines:
        if line.get("kind") == "evaluation":
            epochs.append(_epoch_from_log(line, losses.get(line.get("epoch"), [])))

    # The end: the last evaluation, or the loss of the last step where there was none.
    final_loss = _first_number(steps[-1].get("loss")) if steps else None
    final_accuracy = None
    if epochs:
        final_loss = epochs[-1]["valid_loss"]
        final_accuracy = epochs[-1]["valid_acc"]
    return {
        "status": "done",
        "epochs": epochs,
        "curve": curve,
        "skipped_steps": skipped_steps,
        "skipped": len(skipped_steps),
        "loss": final_loss,
        "acc": final_accuracy,
        "final_scale": _first_number(steps[-1].get("scale")) if steps else None,
    }


def _log_lines(path: Path) -> Iterator[JsonObject]:
    """The objects of a log, line by line. A run that still goes on may have half a last line."""
    lines = path.read_bytes().splitlines(keepends=True)
    for line_number, line in enumerate(lines, 1):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            if line_number == len(lines) and not line.endswith(b"\n"):
                return
            raise ValueError(
                f"report: expected JSON in line {line_number} of {path}, got {error}. "
                "Cut that line out."
            ) from None
        if isinstance(value, dict):
            _check_position(value, line_number, path)
            yield value


def _check_position(line: JsonObject, line_number: int, path: Path) -> None:
    """Refuses a line whose place in the run is no number: it belongs to no epoch and no step."""
    for name in ("epoch", "step", "global_step"):
        value = line.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ValueError(
                f"report: expected a whole number as {name} in line {line_number} of {path}, got "
                f"{json.dumps(value)[:40]}. Cut that line out."
            )


def _losses_by_epoch(steps: Sequence[JsonObject]) -> dict[Any, list[float]]:
    """The finite training losses of each epoch."""
    losses: dict[Any, list[float]] = {}
    for step in steps:
        loss = finite_or_none(step.get("loss"))
        if loss is not None:
            losses.setdefault(step.get("epoch"), []).append(loss)
    return losses


def _epoch_from_log(evaluation: JsonObject, train_losses: Sequence[float]) -> JsonObject:
    accuracies = [evaluation[name] for name in ACCURACY_NAMES if name in evaluation]
    mean_loss = sum(train_losses) / len(train_losses) if train_losses else None
    return {
        "epoch": evaluation.get("epoch"),
        "loss": mean_loss,
        "valid_loss": evaluation.get("valid_loss"),
        "valid_acc": accuracies[0] if accuracies else None,
    }


def _evenly_spaced(steps: Sequence[JsonObject], limit: int) -> list[JsonObject]:
    """At most `limit` of the steps, the first and the last among them."""
    count = min(limit, len(steps))
    last = len(steps) - 1
    return [steps[i * last // max(1, count - 1)] for i in range(count)]


def _first_number(value: Any) -> float | None:
    """A finite number or None. Learning rates come as a list, one for each parameter group."""
    if isinstance(value, list) and value:
        value = value[0]
    return finite_or_none(value)
