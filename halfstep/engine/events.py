"""Callbacks: six events, what they may look at, and how they are called.

begin
  epoch_begin
    step  step  step …   every step's row, in order, at the host's visit
    visit                host and network stand at the same step: read weights, save checkpoints
  epoch_end              before the epoch's last visit, after its evaluation
end                      always, also after an error or a stop
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from halfstep.engine.run import Row, Run
from halfstep.utils.saved_state import SavedValue, same_kind

EVENTS = ("begin", "epoch_begin", "step", "visit", "epoch_end", "end")


class Callback:
    """Override what you need."""

    exact = False  # `step` reads weights, so every step is a visit unless sink= says otherwise
    last = False  # called after the others: it saves what they know
    writes = False  # leaves files or lines behind: left out when a run is repeated to look at it
    shows_progress = False  # prints where the run is, so that `fit` shows nothing by itself

    def begin(self, run: Run) -> None: ...

    def epoch_begin(self, run: Run) -> None: ...

    def step(self, run: Run, row: Row) -> None: ...

    def visit(self, run: Run) -> None: ...

    def epoch_end(self, run: Run) -> None: ...

    def end(self, run: Run) -> None: ...

    def valid_step(self, run: Run) -> None:
        """Before each batch of an evaluation, the host may be ahead of the device: to show it."""

    def next_stop(self, run: Run) -> int | None:
        """The next global step at which this callback needs a visit; None: at any visit."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What it must remember over a resume."""
        return {}

    def check_state(self, run: Run, saved: SavedValue) -> None:
        """ValueError for a saved state that `load_state_dict` cannot take. Changes nothing.

        Asked of every callback before any part of a checkpoint is loaded. Override it to check more
        than that values are of the kind that `state_dict` returns now.
        """
        if type(self).load_state_dict is not Callback.load_state_dict:
            same_kind(saved, self.state_dict())
        elif saved.entries():
            saved.refuse("no saved state")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__}: expected no saved state, got {sorted(state)}")


class Events:
    """The callbacks of a run, those marked `last` behind the others.

    Only methods that a callback overrides are called: the others cost nothing.
    """

    def __init__(self, run: Run, callbacks: Sequence[Callback]) -> None:
        self.run = run
        self.callbacks = sorted(callbacks, key=lambda callback: callback.last)
        called = (*EVENTS, "valid_step")
        self.methods = {event: self._overriding_methods(event) for event in called}
        self.next_stops = self._overriding_methods("next_stop")

    def call_until_error(self, event: str) -> None:
        """Calls up to the first that fails: what is refused here has not happened to the others."""
        for method in self.methods[event]:
            self._call(method)

    def call_all(self, *events: str) -> None:
        """Calls all of them, also when one fails, then raises the first error."""
        self._call_each((method,) for event in events for method in self.methods[event])

    def deliver_rows(self, rows: Iterable[Row]) -> None:
        """Hands every row to every callback, in order, then raises the first error."""
        self._call_each((method, row) for row in rows for method in self.methods["step"])

    def call_end(self) -> None:
        """Calls `end` of all of them, whatever they raise; an earlier error is the one raised.

        In reverse: what is marked `last` saves the run before others restore the best weights or
        close their files.
        """
        first_error: BaseException | None = None
        for method in reversed(self.methods["end"]):
            try:
                self._call(method)
            except BaseException as error:
                first_error = first_error or error
        if first_error is not None and self.run.error is None:
            raise first_error

    def _call_each(self, calls: Iterable[tuple[Any, ...]]) -> None:
        first_error: Exception | None = None
        for method, *arguments in calls:
            try:
                self._call(method, *arguments)
            except Exception as error:
                first_error = first_error or error
        if first_error is not None:
            raise first_error

    def _call(self, method: Callable[..., Any], *arguments: Any) -> None:
        try:
            method(self.run, *arguments)
        except Exception as error:
            owner = type(method.__self__).__name__  # type: ignore[attr-defined]
            error.add_note(
                f"raised by the callback {owner} in {method.__name__}, "
                f"at step {self.run.global_step}"
            )
            raise

    def _overriding_methods(self, event: str) -> list[Callable[..., Any]]:
        methods = []
        for callback in self.callbacks:
            if getattr(type(callback), event) is not getattr(Callback, event):
                methods.append(getattr(callback, event))
        return methods
