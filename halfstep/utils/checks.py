"""What the builders check of their arguments, and how they say it."""

from collections.abc import Iterable

from halfstep.errors import meant


def expect(ok: bool, name: str, expected: str, received: object, known: Iterable[str] = ()) -> None:
    if not ok:
        raise ValueError(
            f"{name}: expected {expected}, received {received!r}{hint(received, known)}"
        )


def check_size(name: str, value: object) -> None:
    """True is no size, though Python counts it as 1."""
    whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    expect(whole, name, "a whole number, 1 or more", value)


def hint(word: object, known: Iterable[str]) -> str:
    """The known word that is closest, as a question; nothing when none is close."""
    close = meant(word, known)
    return f"; did you mean {close!r}?" if close else ""
