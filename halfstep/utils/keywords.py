"""Keyword arguments by a wrong name: an error that says the right one.

Python's own error says that the name is unknown, and not which one was meant.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from halfstep.errors import closest_name

P = ParamSpec("P")
R = TypeVar("R")

# What stands between a user's line and a warning: our files, and the frames of context managers.
_INNER_FILES = (str(Path(__file__).parents[1]), contextlib.__file__)


def suggest_keywords(
    owner: str | None,
    *,
    names: Mapping[str, str] | None = None,
    advice: Mapping[str, str] | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: an unknown keyword is a TypeError with the closest one, before the call.

    `names`: words of other libraries → the keyword here. `advice`: → a sentence, where there is no
    such keyword. `owner` begins the message; None: the class of the object. The signature stays
    visible to editors, type checkers and help().
    """
    renamed = names or {}
    answered = advice or {}

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = [name for name in inspect.signature(function).parameters if name != "self"]

        @wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name in known:
                    continue
                called = owner or type(args[0]).__name__
                if name in answered:
                    raise TypeError(f"{called}: unknown option {name!r}; {answered[name]}")
                close = renamed.get(name) or closest_name(name, known)
                suggestion = f"did you mean {close!r}? " if close else ""
                options = ", ".join(known)
                raise TypeError(
                    f"{called}: unknown option {name!r}; {suggestion}options are: {options}"
                )
            return function(*args, **kwargs)

        return checked

    return decorate


def user_stacklevel() -> int:
    """The stacklevel with which the caller's warning names the user's line, outside halfstep."""
    level = 1
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER_FILES):
        frame = frame.f_back
        level += 1
    return level
