"""Why a step cannot be captured, and where: the operation, its module, the line of the user's code.

Captured steps are a fast path: what they buy is in docs/internals/speed.md, `Model(capture=False)`
switches them off. A step that cannot be captured runs eagerly, with the same results.
"""

import linecache
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

import halfstep
from halfstep.cuda_graphs.capture import set_sync_debug_mode
from halfstep.cuda_graphs.guards import has_step_hooks
from halfstep.errors import Notice, UncapturableError
from halfstep.step import TrainStep
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.text import first_line, list_some

OnUncapturable: TypeAlias = Literal["raise", "eager"]

_HALFSTEP_FOLDERS = tuple(os.path.abspath(folder) for folder in halfstep.__path__)
_TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__))

# Frames of these are never the user's: torch, halfstep, code made of strings ("<string>"), and two
# modules of Python that stand between.
_INNER_PREFIXES = (_TORCH_FOLDER, *_HALFSTEP_FOLDERS, "<")
_INNER_SUFFIXES = ("warnings.py", "contextlib.py")

_SYNC_WARNING = "called a synchronizing"  # how torch's warning about a wait begins


def unrepeatable_reason(changes: Sequence[str]) -> str:
    """Why a step that changes this on the Python side has no replay. Without names: its tensors."""
    if not changes:
        return (
            "the step replaces a tensor of its network, or counts in Python: "
            "write in place, b.copy_(…)"
        )
    return (
        f"the step changes {list_some(changes, 3)} in Python, which a replay would not repeat: "
        "it counts in Python, or collects in a list; use a buffer, written in place: b.copy_(…)"
    )


def why_not_capturable(step: Any, device: torch.device) -> str:
    """Why this step cannot be captured at all, known before it runs; "" if it can."""
    is_train_step = isinstance(step, TrainStep)
    if is_train_step and step.lanes is not None:
        return "its batches are divided, and what the ranks exchange is not captured"
    compiles_whole_step = device.type == "cpu" and is_train_step and step.compiled.on
    if device.type != "cuda" and not compiles_whole_step:
        return f"{device.type} has no graphs to capture"
    if not is_train_step:
        return "the step is one of your own; hs.sink(step, data) captures it"

    # A compiled step on a CPU lets the device decide, unless optimizer or options forbid it.
    if not step.decides_on_device:
        needs_host = step.optimizer_kind == "host" or step.options.decide == "host"
        if device.type == "cuda" or needs_host:
            optimizer = f"{type(step.optimizer).__name__} ({step.optimizer_kind})"
            return (
                f"{optimizer} reads values on the host at every update; "
                "fused=True or capturable=True does not"
            )
    if has_step_hooks(step.optimizer):
        return "the optimizer has step hooks, which a replay would not run"
    return ""


def raise_or_warn(
    reason: str, policy: OnUncapturable | Literal["parts"], cause: BaseException | None = None
) -> None:
    """Raises UncapturableError for "raise", warns that the step runs eagerly for "eager".

    "parts": warns that only forward and loss are compiled, as the whole step cannot be.
    """
    if policy == "parts":
        message = (
            f"this step cannot be one compiled program:\n  {reason}\n"
            "Forward and loss are, the rest runs eagerly."
        )
        warnings.warn(message, Notice, stacklevel=user_stacklevel())
        return

    message = f"this step cannot be captured as a CUDA graph:\n  {reason}\n"
    if policy == "raise":
        advice = "Keep values on the device, or give on_uncapturable='eager'."
        raise UncapturableError(message + advice) from cause
    warnings.warn(
        message + "It runs eagerly, launch by launch.", Notice, stacklevel=user_stacklevel()
    )


@dataclass(frozen=True)
class CodeLocation:
    """An operation that a graph cannot hold, with its source line and its module."""

    what: str
    file: str
    line: int  # 0: no line of the user's was running, as in the backward pass
    module: str  # "" outside of all modules

    def __str__(self) -> str:
        operation = f"{self.what} in module {self.module}" if self.module else self.what
        if not self.line:
            return f"{operation}: in the backward pass"
        code = linecache.getline(self.file, self.line).strip()
        return f"{operation}: {self.file}:{self.line}: {code}"


@contextmanager
def record_host_syncs(
    net: nn.Module | None, device: torch.device, *, on: bool
) -> Iterator[list[CodeLocation]]:
    """Inside, each operation that makes the host wait for the device is added to the list.

    Nothing is stopped. Without `on`, or on another device than CUDA, the list stays empty.
    """
    locations: list[CodeLocation] = []
    if not on or device.type != "cuda":
        yield locations
        return
    module_names = _module_names(net)
    other_warnings: list[Any] = []

    def record_warning(
        message: Any, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
    ) -> None:
        if _SYNC_WARNING in str(message):
            caller = sys._getframe(1)
            what = "an operation that waits for the device"
            locations.append(_locate_frame(what, caller, module_names))
        else:
            other_warnings.append((message, category, filename, lineno))

    sync_debug_mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = record_warning
        set_sync_debug_mode("warn")
        try:
            yield locations
        finally:
            set_sync_debug_mode(sync_debug_mode)

    # Warnings about other things are for the user.
    for other_warning in other_warnings:
        warnings.warn_explicit(*other_warning)


def locate_error(error: BaseException, net: nn.Module | None) -> CodeLocation:
    """Where an error was raised while a step was being captured."""
    stack = list(traceback.walk_tb(error.__traceback__))
    frame, line = stack[-1]
    for user_frame, user_line in stack:
        if _is_user_file(user_frame.f_code.co_filename):
            frame = user_frame
            line = user_line

    # The first frame caught the error and is still running. Reading its f_locals would leave a copy
    # of them behind, which holds the error.
    module_names = _module_names(net)
    module = ""
    for module_frame, _ in stack[1:]:
        name = module_names.get(id(module_frame.f_locals.get("self")))
        if name is not None:
            module = name
    return CodeLocation(first_line(error), frame.f_code.co_filename, line, module)


def user_location() -> str:
    """File and line of the user's code that is running now."""
    location = _locate_frame("", sys._getframe(1), module_names={})
    return f"{location.file}:{location.line}" if location.line else "in the backward pass"


def _locate_frame(what: str, frame: FrameType | None, module_names: dict[int, str]) -> CodeLocation:
    """The innermost user's line and the innermost module, from this frame outwards."""
    file = "?"
    line = 0
    module = ""
    while frame is not None:
        if not module:
            module = module_names.get(id(frame.f_locals.get("self")), "")
        if not line and _is_user_file(frame.f_code.co_filename):
            file = frame.f_code.co_filename
            line = frame.f_lineno
        frame = frame.f_back
    return CodeLocation(what, file, line, module)


def _module_names(net: nn.Module | None) -> dict[int, str]:
    """The name of each module of the network, by its id."""
    if net is None:
        return {}
    return {id(module): name or "(network)" for name, module in net.named_modules()}


def _is_user_file(file: str) -> bool:
    return not file.startswith(_INNER_PREFIXES) and not file.endswith(_INNER_SUFFIXES)
