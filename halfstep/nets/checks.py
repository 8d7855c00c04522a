"""What the builders check of their arguments, and how they say it."""

from collections.abc import Iterable
from difflib import get_close_matches


def expect(ok: bool, name: str, expected: str, received: object, known: Iterable[str] = ()) -> None:
    if not ok:
        raise ValueError(f"{name}: expected {expected}, received {received!r}{hint(received, known)}")


def check_size(name: str, value: object) -> None:
    """True is no size, though Python counts it as 1."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    expect(whole, name, "a whole number, 1 or more", value)


def hint(word: object, known: Iterable[str]) -> str:
    """The known word that is closest, as a question; nothing when none is close."""
    close = get_close_matches(str(word), list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""
