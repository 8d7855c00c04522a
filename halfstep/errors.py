"""Errors and warnings of halfstep, beside ValueError and TypeError; and the closest known name."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any


class NonFiniteError(FloatingPointError):
    """A gradient was inf or NaN and `nonfinite="raise"`: nothing of the step was committed.

    Or too many updates in a row were skipped. `record` is that of the step that raised it, which
    is over; None where a host visit raised it, whose records have been handed out.
    """

    record: Any = None


class Notice(UserWarning):
    """Something the user should know once, about a choice made or a limit of the method."""


class RankLostError(RuntimeError):
    """Another rank of a job did not take part in a collective.

    It has ended, or hangs. The message names the collective; the other rank has its own message.
    """


class NewerAttemptError(RuntimeError):
    """A newer attempt of this job has begun: this one may neither save nor remove checkpoints."""


class UncapturableError(RuntimeError):
    """A step that cannot become a CUDA graph.

    The message names the operation, its module and its source line.
    """


class CheckpointError(ValueError):
    """A checkpoint could not be written, or the files on the disk are not a complete one.

    Nothing of it was used.
    """


class StoreError(OSError):
    """An object store could not be reached, or refused. The message shows no credentials."""


DAMAGED_ADVICE = "The file is damaged or was not written by halfstep: use another checkpoint."


def checkpoint_error(path: Path | str, expected: str, found: str, advice: str) -> CheckpointError:
    """The error that names the place, what was expected there, what was found and what to do."""
    return CheckpointError(f"{path}: expected {expected}, found {found}. {advice}")


def closest_name(word: object, known: Iterable[str]) -> str | None:
    """The known name that is closest to a misspelt one; None when none is close.

    Capitals, dashes and spaces do not count, and the letter O is the digit 0.
    """
    wanted = _spelling_key(str(word))
    names: dict[str, str] = {}
    for name in known:
        names.setdefault(_spelling_key(name), name)

    if wanted in names:
        return names[wanted]
    for key, name in names.items():
        if sorted(key) == sorted(wanted):  # fp61 is nearer to fp16 than to fp64
            return name
    for key, name in names.items():
        if len(wanted) > 2 and key.startswith(wanted):
            return name
    close = get_close_matches(wanted, names, 1)
    return names[close[0]] if close else None


def _spelling_key(name: str) -> str:
    ignored = {ord("-"): None, ord("_"): None, ord(" "): None, ord("0"): "o"}
    return name.casefold().translate(ignored)
