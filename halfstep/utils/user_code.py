"""Calls functions of the user's, and finds the user's file and line in a traceback."""

import inspect
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import halfstep

# Folders, as text: the file name in a code object is compared with them.
HALFSTEP_FOLDER = str(Path(halfstep.__path__[0]).resolve())
DATA_FOLDER = str(Path(HALFSTEP_FOLDER, "data"))
STDLIB_FOLDER = sysconfig.get_paths()["stdlib"]
INSTALL_FOLDERS = ("site-packages", "dist-packages")

# The frames of a traceback with their lines, the outermost first.
Frames = list[tuple[FrameType, int]]


def call_user_function(function: Callable[[], Any], what: str, spec: str) -> Any:
    """The function's result. An error that it raises gets a note with its file and line.

    `what` and `spec` name the function in messages: "the builder", "train:build".
    """
    required = _required_parameters(function)
    if required:
        pronoun = "each" if len(required) > 1 else "it"
        raise TypeError(
            f"expected {what} {spec} to need no arguments, "
            f"and it asks for {', '.join(required)}: give {pronoun} a default"
        )
    try:
        return function()
    except Exception as error:
        error.add_note(f"raised by {what} {spec}{_location_in_function(error)}")
        raise


def _required_parameters(function: Callable[..., Any]) -> list[str]:
    """Parameters without a default; none where the function has no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some classes written in C
        return []
    optional_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in optional_kinds]


def failing_sample(error: BaseException) -> str | None:
    """Which sample of the user's data set raised the error, with its line; None when none did."""
    for cause in _with_causes(error):
        frames = _traceback_frames(cause)
        for i, (frame, _) in enumerate(frames):
            if not _is_sample_access(frames, i):
                continue
            code = frame.f_code
            dataset_name, index_name = code.co_varnames[:2]
            dataset = frame.f_locals[dataset_name]
            index = frame.f_locals[index_name]
            line = _last_line_in(frames, code.co_filename)
            return (
                f"raised by sample {index} of {type(dataset).__name__}, "
                f"{code.co_filename}, line {line}"
            )
    return None


def _is_sample_access(frames: Frames, i: int) -> bool:
    """Whether frame i is a user's `__getitem__` that halfstep's data pipeline called by number."""
    code = frames[i][0].f_code
    is_ours = code.co_filename.startswith(HALFSTEP_FOLDER)
    if is_ours or code.co_name != "__getitem__" or code.co_argcount < 2:
        return False
    callers = frames[max(0, i - 2) : i]
    if not any(frame.f_code.co_filename.startswith(DATA_FOLDER) for frame, _ in callers):
        return False
    index = frames[i][0].f_locals.get(code.co_varnames[1])
    return isinstance(index, int)


def traceback_helps(error: BaseException) -> bool:
    """Whether a traceback says more than the message.

    It does for an error out of the user's code or torch's, and for one of halfstep's that was not
    written for users.
    """
    if not isinstance(error, ValueError | TypeError | OSError):
        return not type(error).__module__.startswith("halfstep")
    for cause in _with_causes(error):
        frames = _traceback_frames(cause)
        if not frames:
            continue
        innermost_frame, _ = frames[-1]
        if _is_user_or_torch_file(innermost_frame.f_code.co_filename):
            return True
    return False


def _is_user_or_torch_file(file_name: str) -> bool:
    if file_name.startswith((HALFSTEP_FOLDER, "<frozen")):
        return False
    if any(folder in file_name for folder in INSTALL_FOLDERS):
        return "/torch/" in file_name
    return not file_name.startswith(STDLIB_FOLDER)


def _with_causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, then the errors that it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__


def _location_in_function(error: Exception) -> str:
    """ ", FILE, line N": the last line in the file of the function that was called."""
    frames = _traceback_frames(error)[1:]  # the first frame is call_user_function itself
    if not frames:
        return ""
    function_frame, _ = frames[0]
    file_name = function_frame.f_code.co_filename
    return f", {file_name}, line {_last_line_in(frames, file_name)}"


def _last_line_in(frames: Frames, file_name: str) -> int:
    lines = [line for frame, line in frames if frame.f_code.co_filename == file_name]
    return lines[-1]


def _traceback_frames(error: BaseException) -> Frames:
    frames: Frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lineno))
        traceback = traceback.tb_next
    return frames
