"""What a run has recorded of its steps, to be compared: rows of its log, states of checkpoints."""

import json
import math
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep import checkpoint
from halfstep.engine import Row, Run
from halfstep.engine.run import ROW_COLUMNS

LOG = "log.jsonl"

# Fields of a log's row that no two runs share.
CLOCK_FIELDS = re.compile(r"time|.*seconds")

# A row of a log by its global step and its kind ("step", "valid", …).
LogRows = dict[tuple[int, str], dict[str, Any]]


class RecordedSteps:
    """What the folder of a run says about its steps, as a check on a replay of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._rows: LogRows = {}
        if (folder / LOG).is_file():
            self._rows = read_log(folder / LOG)
        self._checkpoints = {checkpoint.step_of(path): path for path in checkpoint.listing(folder)}

    def differing_from_row(self, row: Row) -> list[str]:
        """The fields of the log's row of that step that are other than in `row`."""
        recorded = self._rows.get((row.global_step, "step"))
        if recorded is None:
            return []
        values = {**{name: getattr(row, name) for name in ROW_COLUMNS}, **row.extras}
        replayed = {name: _as_logged(value) for name, value in values.items()}
        if not row.fingerprint:  # it is computed only where the builder asks for it
            del replayed["fingerprint"]
        return differing_fields(recorded, replayed)

    def differing_from_state(self, run: Run) -> list[str]:
        """The names in the checkpoint of the run's position that the step has otherwise."""
        path = self._checkpoints.get(run.position)
        # Of data without a length nobody knows whether a state is from before the end of its pass.
        if path is None or run.epoch_steps is None:
            return []
        try:
            saved = checkpoint.load(path).tree
        except checkpoint.CheckpointError:
            return []
        if not isinstance(saved, dict) or "step" not in saved:
            return []
        return differing_leaves("step.", saved["step"], run.model.step.state_dict())


def read_log(path: Path) -> LogRows:
    """The rows of a JSON log. A last line that was being written at a kill is left out."""
    rows: LogRows = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        row: Any = {}
        if line.strip():
            try:
                row = json.loads(line.decode())
            except (ValueError, RecursionError):
                if number == len(lines):  # without a line end: it was being written at a kill
                    break
                row = None
        if not isinstance(row, dict):
            raise ValueError(
                f"diff: {path}, line {number}: expected a JSON object, got {line[:40]!r}. "
                "Take that line out to compare the others."
            )
        if isinstance(row.get("global_step"), int):
            rows[row["global_step"], str(row.get("kind"))] = row
    return rows


def differing_fields(row_a: dict[str, Any], row_b: dict[str, Any]) -> list[str]:
    """The fields that both rows have, with other values; clocks are left out."""
    shared = [name for name in row_a if name in row_b and not CLOCK_FIELDS.fullmatch(name)]
    return [name for name in shared if row_a[name] != row_b[name]]


def differing_leaves(prefix: str, a: Any, b: Any) -> list[str]:
    """Names of the leaves of two trees that differ in any bit. `prefix` ends with a dot."""
    if isinstance(a, dict) and isinstance(b, dict):
        names = [f"{prefix}{key} (in one only)" for key in sorted(map(str, a.keys() ^ b.keys()))]
        for key in a:
            if key in b:
                names += differing_leaves(f"{prefix}{key}.", a[key], b[key])
        return names
    if isinstance(a, list | tuple) and isinstance(b, list | tuple) and len(a) == len(b):
        names = []
        for i, (item_a, item_b) in enumerate(zip(a, b, strict=True)):
            names += differing_leaves(f"{prefix}{i}.", item_a, item_b)
        return names

    if isinstance(a, Tensor) and isinstance(b, Tensor):
        same_kind = a.shape == b.shape and a.dtype == b.dtype
        is_equal = same_kind and torch.equal(_as_bytes(a), _as_bytes(b))
    elif type(a) is type(b):
        both_are_nan = a != a and b != b
        is_equal = a == b or both_are_nan
    else:
        is_equal = False
    return [] if is_equal else [prefix.removesuffix(".")]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _as_logged(value: Any) -> Any:
    """A value of a row as a JSON log gives it back."""
    if isinstance(value, tuple):
        return [_as_logged(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    return value
