"""Whose code an error came through: the user's function, his data set's sample, torch, or halfstep alone."""

import inspect
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

_OURS = str(Path(__file__).resolve().parent.parent)
_DATA = str(Path(_OURS, "data"))
_STANDARD = sysconfig.get_paths()["stdlib"]
_INSTALLED = ("site-packages", "dist-packages")
Frames = list[tuple[FrameType, int]]


def call(function: Callable[[], Any], what: str, spec: str) -> Any:
    """The function's result; what it raises says whose it is, in which file and line."""
    needed = required(function)
    if needed:
        asked = f"{', '.join(needed)}: give {'each' if len(needed) > 1 else 'it'} a default"
        raise TypeError(f"expected {what} {spec} to need no arguments, and it asks for {asked}")
    try:
        return function()
    except Exception as error:
        error.add_note(f"raised by {what} {spec}{_place(error)}")
        raise


def required(function: Callable[..., Any]) -> list[str]:
    """The parameters without which a function cannot be called; none where it does not tell."""
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:  # some classes written in C
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in found if each.default is each.empty and each.kind not in kinds]


def sample(error: BaseException) -> str | None:
    """Which sample of the user's data set raised it; None when none did."""
    for each in chain(error):
        frames = _frames(each)
        asked = next(
            (frame for i, (frame, _) in enumerate(frames) if _index(frames, i, frame) is not None),
            None,
        )
        if asked is not None:
            code, values = asked.f_code, asked.f_locals
            line = _last_line(frames, code.co_filename)
            owner, number = (values[name] for name in code.co_varnames[:2])
            return f"raised by sample {number} of {type(owner).__name__}, {code.co_filename}, line {line}"
    return None


def helps(error: BaseException) -> bool:
    """Whether a traceback would say more than the message: it came out of the user's code or torch's, or is ours and
    not written for users."""
    if not isinstance(error, ValueError | TypeError | OSError):
        return not type(error).__module__.startswith("halfstep")
    return any(
        _foreign(frames[-1][0].f_code.co_filename)
        for each in chain(error)
        if (frames := _frames(each))
    )


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes."""
    while error is not None:
        yield error
        error = error.__cause__


def _foreign(name: str) -> bool:
    if name.startswith((_OURS, "<frozen")):
        return False
    if any(each in name for each in _INSTALLED):
        return "/torch/" in name
    return not name.startswith(_STANDARD)


def _index(frames: Frames, i: int, frame: FrameType) -> int | None:
    """The number that halfstep asked a data set of the user's for."""
    code = frame.f_code
    ours = code.co_filename.startswith(_OURS)
    if ours or code.co_name != "__getitem__" or code.co_argcount < 2 or not i:
        return None
    if not any(
        before.f_code.co_filename.startswith(_DATA) for before, _ in frames[max(0, i - 2) : i]
    ):
        return None
    number = frame.f_locals.get(code.co_varnames[1])
    return number if isinstance(number, int) else None


def _place(error: Exception) -> str:
    """File and line of the function's own that the error came through last; the first frame is the one above."""
    frames = _frames(error)[1:]
    if not frames:
        return ""
    home = frames[0][0].f_code.co_filename
    return f", {home}, line {_last_line(frames, home)}"


def _last_line(frames: Frames, name: str) -> int:
    return next(line for frame, line in reversed(frames) if frame.f_code.co_filename == name)


def _frames(error: BaseException) -> Frames:
    found, at = [], error.__traceback__
    while at is not None:
        found.append((at.tb_frame, at.tb_lineno))
        at = at.tb_next
    return found
