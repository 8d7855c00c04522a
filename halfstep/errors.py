"""What halfstep raises and warns with, beside ValueError and TypeError, and the word that a misspelt one meant."""

from collections.abc import Iterable
from difflib import get_close_matches


class NonFiniteError(FloatingPointError):
    """A gradient was inf or NaN and the step was told to raise; nothing of it was committed."""


class Notice(UserWarning):
    """Something the user should know once, about a choice made or a limit of the method."""


class UncapturableError(RuntimeError):
    """A step that cannot become a CUDA graph: the message names the operation, its module and its source line."""


def meant(word: object, known: Iterable[str]) -> str | None:
    """The known word that is closest; capitals, dashes and O for 0 do not count. None when none is close."""
    given, keys = (
        _key(str(word)),
        {_key(name): name for name in reversed(list(known))},
    )  # of two the first
    turned = (
        key for key in reversed(keys) if sorted(key) == sorted(given)
    )  # fp61: nearer to fp16 than to fp64
    begun = (key for key in reversed(keys) if len(given) > 2 and key.startswith(given))
    near = iter(get_close_matches(given, keys, 1))
    found = given if given in keys else next(turned, None) or next(begun, None) or next(near, None)
    return None if found is None else keys[found]


def _key(name: str) -> str:
    return name.casefold().translate(
        {ord("-"): None, ord("_"): None, ord(" "): None, ord("0"): "o"}
    )
