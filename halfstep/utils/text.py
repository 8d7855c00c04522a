"""Pieces of messages that many places need."""

from collections.abc import Sequence


def list_some(names: Sequence[str], limit: int) -> str:
    """The first names, and how many there are beyond them: "a, b, c and 4 more"."""
    shown = ", ".join(names[:limit])
    if len(names) <= limit:
        return shown
    return f"{shown} and {len(names) - limit} more"


def plural(count: int, noun: str) -> str:
    """The number with its noun: "1 step", "3 steps"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def dtype_name(dtype: object) -> str:
    """A torch dtype without its prefix: "float16"."""
    return str(dtype).removeprefix("torch.")


def first_line(error: BaseException) -> str:
    """The first line of an error's message that is not blank; its class where there is none."""
    for line in str(error).splitlines():
        if line.strip():
            return line.strip()
    return type(error).__name__
