"""Swapping values into a module's dictionaries and back: how a precision is put on a network without changing it."""

from typing import Any, NamedTuple

_ABSENT = object()


class Slot(NamedTuple):
    """One entry of a module's `_parameters`, `_buffers` or `__dict__`."""

    owner: dict[str, Any]
    key: str

    def get(self) -> Any:
        return self.owner[self.key]


class Swap:
    """Puts values into slots; `undo` puts back what was there, in reverse order, also after an exception."""

    def __init__(self) -> None:
        self._before: list[tuple[Slot, Any]] = []

    def put(self, slot: Slot, value: Any) -> None:
        self._before.append((slot, slot.owner.get(slot.key, _ABSENT)))
        slot.owner[slot.key] = value

    def undo(self) -> None:
        while self._before:
            slot, value = self._before.pop()
            if value is _ABSENT:
                slot.owner.pop(slot.key, None)
            else:
                slot.owner[slot.key] = value

    def __bool__(self) -> bool:
        return bool(self._before)
