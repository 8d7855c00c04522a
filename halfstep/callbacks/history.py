"""The run in memory, as columns; and functions as a callback."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch

from halfstep.engine import Callback, Row, Run

_COLUMNS = tuple(f.name for f in fields(Row))


class History(Callback):
    """Every step and every evaluation, as columns: `rows["loss"]` has one number per step, from the run's first.

    `epochs` has one entry per epoch end or evaluation: epoch, step, the mean training loss since the last, and
    `valid_…` for each score, None where there was no evaluation. Both go on over a resume; a new run
    starts new ones.
    """

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.rows: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
        self._entries: list[dict[str, Any]] = []

    def begin(self, run: Run) -> None:
        if run.resumed is None:
            self._reset()

    @property
    def epochs(self) -> dict[str, list[Any]]:
        names = dict.fromkeys(name for entry in self._entries for name in entry)
        return {name: [entry.get(name) for entry in self._entries] for name in names}

    def step(self, run: Run, row: Row) -> None:
        for name in _COLUMNS:
            self.rows[name].append(getattr(row, name))

    def visit(self, run: Run) -> None:
        if len(self._entries) != len(run.history):
            self._entries = [dict(entry) for entry in run.history]

    def state_dict(self) -> dict[str, Any]:
        columns = {
            name: torch.tensor(values, dtype=_dtype(values)) for name, values in self.rows.items()
        }
        return {"rows": columns, "entries": [dict(entry) for entry in self._entries]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.rows = {name: state["rows"][name].tolist() for name in _COLUMNS}
        self.rows["lr"] = [tuple(lr) if isinstance(lr, list) else lr for lr in self.rows["lr"]]
        self._entries = [dict(entry) for entry in state["entries"]]


def _dtype(values: list[Any]) -> torch.dtype:
    """Exact for Python's own: bool, 64-bit integers, float64."""
    kind = type(values[0]) if values else float
    return {bool: torch.bool, int: torch.int64}.get(kind, torch.float64)


class Lambda(Callback):
    """Functions instead of a class: each event's takes `run`, that of `step` takes `run, row`. They keep no state.

    `exact=True` when `step` reads weights: then every step is a visit.
    """

    def __init__(
        self, *, begin: Callable[[Run], object] | None = None, epoch_begin: Callable[[Run], object] | None = None,
        step: Callable[[Run, Row], object] | None = None, visit: Callable[[Run], object] | None = None,
        epoch_end: Callable[[Run], object] | None = None, end: Callable[[Run], object] | None = None,
        exact: bool = False,
    ) -> None:  # fmt: skip
        given = {
            "begin": begin, "epoch_begin": epoch_begin, "step": step, "visit": visit, "epoch_end": epoch_end, "end": end
        }  # fmt: skip
        self._calls: dict[str, Callable[..., object]] = {
            k: f for k, f in given.items() if f is not None
        }
        for name, call in self._calls.items():
            if not callable(call):
                raise TypeError(f"Lambda: expected {name} as a function, got {type(call).__name__}")
        if not self._calls:
            raise ValueError(f"Lambda: expected a function for one of {', '.join(given)}, got none")
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
        if event in self._calls:
            self._calls[event](*args)
