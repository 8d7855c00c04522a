"""Whole numbers from users: Python's and numpy's integers, and nothing that would be cut."""

from operator import index
from typing import Any


def whole(name: str, value: Any) -> int:
    """The number as an int; a float is refused even where it has no fraction, and so is a bool."""
    try:
        if not isinstance(value, bool):
            return index(value)
    except TypeError:
        pass
    raise TypeError(f"{name}: expected a whole number, got {value!r}")
