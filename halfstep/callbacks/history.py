"""The run in memory, as columns; and functions as a callback."""

import math
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch import Tensor

from halfstep.engine import Callback, Row, Run
from halfstep.engine.run import ROW_COLUMNS
from halfstep.utils.saved_state import SavedValue

COLUMNS = ROW_COLUMNS

# What steps of an earlier version have in a column that it did not know.
MISSING_VALUES = {
    field.name: math.nan if field.default is MISSING else field.default for field in fields(Row)
}


class History(Callback):
    """Every step and every evaluation, as columns.

    `rows["loss"]` has one number per step, from the run's first; parts of the loss and metrics on
    training data have columns of their own (of that batch alone). `epochs` has one entry per epoch
    end or evaluation: epoch, step, the mean training loss since the last entry, and `valid_…` for
    each score, None where there was no evaluation. Both go on over a resume; a new run starts new
    ones.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.rows: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        self._entries: list[dict[str, Any]] = []

    def begin(self, run: Run) -> None:
        if run.resumed is None:
            self._reset()

    @property
    def epochs(self) -> dict[str, list[Any]]:
        names = dict.fromkeys(name for entry in self._entries for name in entry)
        return {name: [entry.get(name) for entry in self._entries] for name in names}

    def step(self, run: Run, row: Row) -> None:
        steps = len(self.rows["global_step"])
        for name in COLUMNS:
            self.rows[name].append(getattr(row, name))
        for name, value in row.extras.items():
            self.rows.setdefault(name, [math.nan] * steps).append(value)
        if len(self.rows) > len(COLUMNS) + len(row.parts) + len(row.counts):
            for values in self.rows.values():  # a column that this step has not
                if len(values) == steps:
                    values.append(math.nan)

    def visit(self, run: Run) -> None:
        if len(self._entries) != len(run.history):
            self._entries = [dict(entry) for entry in run.history]

    def state_dict(self) -> dict[str, Any]:
        columns = {}
        for name, values in self.rows.items():
            columns[name] = torch.tensor(values, dtype=_exact_dtype(values))
        return {"rows": columns, "entries": [dict(entry) for entry in self._entries]}

    def check_state(self, run: Run, saved: SavedValue) -> None:
        rows = saved.field("rows")
        steps = rows.field("global_step").tensor()
        for column in rows.entries().values():
            tensor: Tensor = column.tensor()
            # The rates of several parameter groups are [steps, groups].
            if not 1 <= tensor.dim() <= 2 or len(tensor) != len(steps):
                column.refuse(f"a tensor with {steps.numel()} rows, as global_step has")
        for entry in saved.field("entries").items():
            entry.entries()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        steps = len(state["rows"]["global_step"])
        self.rows = {name: [MISSING_VALUES[name]] * steps for name in COLUMNS}
        for name, values in state["rows"].items():
            self.rows[name] = values.tolist()
        # The rates of several parameter groups are a tuple.
        self.rows["lr"] = [tuple(lr) if isinstance(lr, list) else lr for lr in self.rows["lr"]]
        self._entries = [dict(entry) for entry in state["entries"]]


def _exact_dtype(values: list[Any]) -> torch.dtype:
    """The dtype that holds Python's bool, int or float without rounding."""
    value_type = type(values[0]) if values else float
    return {bool: torch.bool, int: torch.int64}.get(value_type, torch.float64)


class Lambda(Callback):
    """Functions instead of a class: each takes `run`, that of `step` takes `run, row`.

    They keep no state. Set `exact=True` when `step` reads weights: then every step is a visit.
    """

    def __init__(
        self,
        *,
        begin: Callable[[Run], object] | None = None,
        epoch_begin: Callable[[Run], object] | None = None,
        step: Callable[[Run, Row], object] | None = None,
        visit: Callable[[Run], object] | None = None,
        epoch_end: Callable[[Run], object] | None = None,
        end: Callable[[Run], object] | None = None,
        exact: bool = False,
    ) -> None:
        events: dict[str, Callable[..., object] | None] = {
            "begin": begin,
            "epoch_begin": epoch_begin,
            "step": step,
            "visit": visit,
            "epoch_end": epoch_end,
            "end": end,
        }
        self._functions: dict[str, Callable[..., object]] = {}
        for event, function in events.items():
            if function is None:
                continue
            if not callable(function):
                raise TypeError(
                    f"Lambda: expected {event} as a function, got {type(function).__name__}"
                )
            self._functions[event] = function
        if not self._functions:
            raise ValueError(
                f"Lambda: expected a function for one of {', '.join(events)}, got none"
            )
        self.exact = exact

    def begin(self, run: Run) -> None:
        self._call("begin", run)

    def epoch_begin(self, run: Run) -> None:
        self._call("epoch_begin", run)

    def step(self, run: Run, row: Row) -> None:
        self._call("step", run, row)

    def visit(self, run: Run) -> None:
        self._call("visit", run)

    def epoch_end(self, run: Run) -> None:
        self._call("epoch_end", run)

    def end(self, run: Run) -> None:
        self._call("end", run)

    def _call(self, event: str, *args: Any) -> None:
        if event in self._functions:
            self._functions[event](*args)
