"""Lengths of time as users write them."""

import re
from datetime import timedelta
from math import isfinite
from typing import Any

SECONDS_OF_UNIT = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}

# "1d2h", "1h30m", "90 s", "1.5h": every unit once, from days down to seconds.
DURATION = re.compile(
    r"""
    \s*(?:(?P<d>\d+(?:\.\d+)?)\s*d(?:ays?)?)?
    \s*(?:(?P<h>\d+(?:\.\d+)?)\s*h(?:ours?|rs?)?)?
    \s*(?:(?P<m>\d+(?:\.\d+)?)\s*m(?:in(?:ute)?s?)?)?
    \s*(?:(?P<s>\d+(?:\.\d+)?)\s*s(?:ec(?:ond)?s?)?)?\s*
    """,
    re.VERBOSE | re.IGNORECASE,
)
EXPECTED = "seconds as a number, a text such as '1h30m' or '45s', or a timedelta, above 0"


def duration_s(name: str, value: Any) -> float:
    """The seconds of a number, a text or a timedelta; anything else is an error with that name.

    >>> duration_s("max_time", "1h30m")
    5400.0
    """
    seconds: float | None = None
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    elif isinstance(value, str):
        seconds = _read_text(value)
    if seconds is None or not isfinite(seconds) or seconds <= 0:
        is_of_a_type = isinstance(value, timedelta | int | float | str)
        error_class = ValueError if is_of_a_type and not isinstance(value, bool) else TypeError
        raise error_class(f"{name}: expected {EXPECTED}, got {value!r}")
    return seconds


def format_duration(seconds: float) -> str:
    """A length of time in the same form: "1h30m", "45s", "0.5s"."""
    if seconds < 60:
        return f"{seconds:g}s"
    rest = round(seconds)
    parts = []
    for unit, length in SECONDS_OF_UNIT.items():
        count, rest = divmod(rest, length)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts)


def _read_text(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        pass
    match = DURATION.fullmatch(text)
    if match is None:
        return None
    counts = {unit: count for unit, count in match.groupdict().items() if count is not None}
    if not counts:
        return None
    return sum(float(count) * SECONDS_OF_UNIT[unit] for unit, count in counts.items())
