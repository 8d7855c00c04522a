"""Calling the callbacks: who overrides an event, in which order, and what happens when one of them fails."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from halfstep.engine.events__callback import Callback
from halfstep.engine.run import Run
from halfstep.engine.run__rows import Row

_EVENTS = ("begin", "epoch_begin", "step", "visit", "epoch_end", "end")


class Events:
    """The callbacks of a run, those marked `last` behind the others."""

    def __init__(self, run: Run, callbacks: Sequence[Callback]) -> None:
        self.run, self.callbacks = run, sorted(callbacks, key=lambda c: c.last)
        self.calls = {event: _overriding(self.callbacks, event) for event in _EVENTS}
        self.stops = _overriding(self.callbacks, "next_stop")

    def first(self, event: str) -> None:
        """Up to the first that fails: what is refused here has not happened to the others."""
        for call in self.calls[event]:
            self._one(call)

    def every(self, *events: str) -> None:
        """To all of them, also when one fails: what happened once comes to everybody. The first error is seen."""
        self._all((call,) for event in events for call in self.calls[event])

    def rows(self, rows: Iterable[Row]) -> None:
        """Every row to everybody, in order; the first error is seen."""
        self._all((call, row) for row in rows for call in self.calls["step"])

    def end(self) -> None:
        """To all of them, whatever they raise; an error before this one is the one that is seen.

        In reverse: what is marked `last` saves the run before others put back best weights or close their files.
        """
        failed: BaseException | None = None
        for call in reversed(self.calls["end"]):
            try:
                self._one(call)
            except BaseException as error:
                failed = failed or error
        if failed is not None and self.run.error is None:
            raise failed

    def _all(self, calls: Iterable[tuple[Any, ...]]) -> None:
        failed: Exception | None = None
        for call, *args in calls:
            try:
                self._one(call, *args)
            except Exception as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def _one(self, call: Callable[..., Any], *args: Any) -> None:
        try:
            call(self.run, *args)
        except Exception as error:
            owner = type(call.__self__).__name__  # type: ignore[attr-defined]
            error.add_note(
                f"raised by the callback {owner} in {call.__name__}, at step {self.run.global_step}"
            )
            raise


def _overriding(callbacks: Sequence[Callback], event: str) -> list[Callable[..., Any]]:
    """The bound methods of those that override an event: the others cost nothing."""
    return [
        getattr(c, event)
        for c in callbacks
        if getattr(type(c), event) is not getattr(Callback, event)
    ]
