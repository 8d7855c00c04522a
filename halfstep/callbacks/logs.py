"""Logs of the run in a file, a line per step and evaluation; after a resume, those of an uninterrupted run."""

import csv
import io
import json
import math
import time
from collections.abc import Sequence
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

from torch import Tensor

from halfstep.callbacks.logs__logfile import LogFile
from halfstep.callbacks.plateau import whole
from halfstep.engine import Callback, Row, Run

_FIELDS = tuple(f.name for f in fields(Row))
_VALUES = attrgetter(*_FIELDS)
_PLACE = ("epoch", "step", "global_step")
_JSON = json.JSONEncoder(
    ensure_ascii=False, allow_nan=False
)  # json.dumps would build one for every line


class _Log(Callback):
    """Which steps and evaluations become lines, and the file they go to; `_add` writes one."""

    writes = True

    def __init__(
        self, path: str | Path, *, every: int = 1, times: bool = False, overwrite: bool = False
    ) -> None:
        owner = type(self).__name__
        self.every, self.times = whole(owner, "every", every, 1), times
        self.file = LogFile(owner, path, overwrite=overwrite)

    def step(self, run: Run, row: Row) -> None:
        if row.global_step % self.every == 0:
            self._add(_of_step(row, times=self.times))

    def visit(self, run: Run) -> None:
        if run.scores is not None:
            self._add(_of_scores(run, times=self.times))
        self.file.flush()

    def _add(self, values: dict[str, Any]) -> None:
        raise NotImplementedError

    def end(self, run: Run) -> None:
        self.file.close()

    def state_dict(self) -> dict[str, Any]:
        return self.file.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.file.load_state_dict(state)


class CSVLog(_Log):
    """A table: every `every`-th step is a line, and every evaluation (`kind`) another, with the scores in `valid_…`.

    The columns are fixed at the start: `lr`, or `lr_0`, `lr_1`, … with several parameter groups. Numbers are written so
    that reading gives the same bits; inf and NaN as `inf`, `nan`; bools as 0 and 1. `times=True` adds the wall clock,
    which no resume repeats. A resumed run cuts the file back to its checkpoint; a new run refuses a file that is there,
    unless `overwrite=True`.
    """

    columns: Sequence[str] = ()

    def begin(self, run: Run) -> None:
        optimizer = getattr(
            run.model.step, "optimizer", None
        )  # a cell of the user's own has one lr in its records
        groups = 1 if optimizer is None else len(optimizer.param_groups)
        rates = ["lr"] if groups == 1 else [f"lr_{i}" for i in range(groups)]
        steps = [part for name in _FIELDS for part in (rates if name == "lr" else [name])]
        scores = dict.fromkeys(f"valid_{name}" for name in ("loss", *run.model.metrics))
        self.columns = ["kind", *steps, *scores, *(["time"] if self.times else [])]
        self.file.open(_line(self.columns), anew=_anew(run))

    def _add(self, values: dict[str, Any]) -> None:
        if isinstance(values.get("lr"), tuple) and "lr" not in self.columns:
            values |= {f"lr_{i}": rate for i, rate in enumerate(values.pop("lr"))}
        later = [name for name in values if name not in self.columns]
        if later:
            raise ValueError(
                f"CSVLog: the columns are fixed at the start of a run, {', '.join(later)} came later"
            )
        self.file.add(_line([_cell(values.get(name)) for name in self.columns]))


class JSONLLog(_Log):
    """An object a line: `{"kind": "step", …}` for every `every`-th step, `{"kind": "evaluation", …}` for evaluations.

    Strict JSON: inf and NaN are the strings "Infinity", "-Infinity", "NaN", which float() reads; `lr` is a list with
    several parameter groups. `times`, `overwrite` and resuming are CSVLog's.
    """

    def begin(self, run: Run) -> None:
        self.file.open(anew=_anew(run))

    def _add(self, values: dict[str, Any]) -> None:
        try:
            line = _JSON.encode(
                values
            )  # as it is: looking for NaN first would take four times as long
        except (ValueError, TypeError):
            line = _JSON.encode(_strict(values))
        self.file.add(line + "\n")


def _of_step(row: Row, *, times: bool) -> dict[str, Any]:
    values = {"kind": "step"} | dict(zip(_FIELDS, _VALUES(row), strict=True))
    return {**values, "time": time.time()} if times else values


def _of_scores(run: Run, *, times: bool) -> dict[str, Any]:
    place = {name: getattr(run, name) for name in _PLACE}
    scores = {f"valid_{name}": value for name, value in (run.scores or {}).items()}
    return {"kind": "evaluation", **place, **scores, **({"time": time.time()} if times else {})}


def _line(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    return json.dumps(_strict(value)) if isinstance(value, Tensor | list | tuple | dict) else value


def _strict(value: Any) -> Any:
    """As JSON has it: no bare NaN, tensors as lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _strict(each) for name, each in value.items()}
    if isinstance(value, Tensor):
        return _strict(value.tolist())
    return [_strict(each) for each in value] if isinstance(value, list | tuple) else value


def _anew(run: Run) -> bool:
    """resume= was asked for and there was nothing to go on from yet."""
    return run.resume is not None and run.resumed is None
