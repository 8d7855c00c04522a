"""Checks of arguments. Every error says what was expected and what was received."""

from collections.abc import Iterable
from math import isfinite
from operator import index
from typing import Any

from halfstep.errors import closest_name


def expect(ok: bool, name: str, expected: str, received: object, known: Iterable[str] = ()) -> None:
    """Raises a ValueError unless `ok`. Where `known` names exist, it suggests the closest one."""
    if not ok:
        suggestion = did_you_mean(received, known)
        raise ValueError(f"{name}: expected {expected}, received {received!r}{suggestion}")


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The closest known name as the end of a message; an empty text when none is close."""
    name = closest_name(word, known)
    if name is None:
        return ""
    return f"; did you mean {name!r}?"


def whole_number(
    name: str,
    value: Any,
    *,
    minimum: int | None = None,
    of_what: str = "",
    type_error: type[Exception] = ValueError,
) -> int:
    """The value as an int. Python's and numpy's integers pass; True, 2.0 and "2" do not.

    `of_what` completes the message: "a whole number of updates". `type_error` is raised for a value
    that is no whole number, ValueError for one below the minimum.
    """
    expected = f"a whole number{of_what and f' of {of_what}'}"
    if minimum is not None:
        expected = f"{expected}, {minimum} or more"
    try:
        number = index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise type_error(f"{name}: expected {expected}, received {value!r}")
    if minimum is not None and number < minimum:
        raise ValueError(f"{name}: expected {expected}, received {value!r}")
    return number


def finite_number(
    name: str, value: Any, *, above: float | None = None, minimum: float | None = None
) -> float:
    """The value as a float: an int or float that is finite, and within the bound."""
    expected = "a finite number"
    if above is not None:
        expected = f"a finite number above {above:g}"
    if minimum is not None:
        expected = f"a finite number, {minimum:g} or more"
    ok = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    if ok and above is not None:
        ok = value > above
    if ok and minimum is not None:
        ok = value >= minimum
    expect(ok, name, expected, value)
    return float(value)


def one_of(name: str, value: Any, choices: Iterable[str]) -> None:
    """Raises a ValueError unless the value is one of the choices."""
    known = list(choices)
    expected = "one of " + ", ".join(map(repr, known))
    expect(value in known, name, expected, value, known)
