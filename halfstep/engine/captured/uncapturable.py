"""Who keeps a step from being captured: the operation, the module it is in, and the line of the user's that asked."""

import linecache
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import nn

from halfstep.cuda_graphs.capture import set_sync_debug_mode

_HERE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


@dataclass(frozen=True)
class CodeLocation:
    """One place in the code that a graph cannot hold."""

    what: str
    file: str
    line: int
    module: str

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        inside = f" in module {self.module}" if self.module else ""
        return f"{self.what}{inside}: " + (
            f"{self.file}:{self.line}: {code}" if self.line else "in the backward pass"
        )


@contextmanager
def record_host_syncs(
    net: nn.Module | None, device: torch.device, *, on: bool
) -> Iterator[list[CodeLocation]]:
    """Inside, operations that make the host wait are written down; nothing is stopped."""
    found: list[CodeLocation] = []
    if not on or device.type != "cuda":
        yield found
        return
    names = {id(m): n for n, m in net.named_modules()} if net is not None else {}
    others: list[Any] = []

    def note(
        message: Any, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
    ) -> None:
        if "called a synchronizing" in str(message):
            found.append(_place("an operation that waits for the device", sys._getframe(1), names))
        else:
            others.append((message, category, filename, lineno))

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            set_sync_debug_mode(before)
    for other in others:  # not ours to swallow
        warnings.warn_explicit(*other)


def locate_error(error: BaseException, net: nn.Module | None) -> CodeLocation:
    """Where an error came from while a step was being captured."""
    names = {id(m): n for n, m in net.named_modules()} if net is not None else {}
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    lines = {id(frame): line for frame, line in traceback.walk_tb(error.__traceback__)}
    said = str(error).strip().split("\n")[0]
    users = [f for f in frames if _is_users(f.f_code.co_filename)]
    frame = users[-1] if users else frames[-1]
    modules = [
        f for f in frames[1:] if id(f.f_locals.get("self")) in names
    ]  # not who caught it: f_locals keeps a copy
    module = names[id(modules[-1].f_locals["self"])] or "(network)" if modules else ""
    return CodeLocation(said, frame.f_code.co_filename, lines[id(frame)], module)


def user_location() -> str:
    """The innermost line of the user's that is running now."""
    place = _place("", sys._getframe(1), {})
    return f"{place.file}:{place.line}" if place.line else "in the backward pass"


def _place(what: str, frame: FrameType | None, names: dict[int, str]) -> CodeLocation:
    module, at = "", None
    while frame is not None:
        name = names.get(id(frame.f_locals.get("self")))
        if name is not None and not module:
            module = name or "(network)"
        if at is None and _is_users(frame.f_code.co_filename):
            at = (frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return CodeLocation(what, *(at or ("?", 0)), module)


def _is_users(file: str) -> bool:
    inner = file.startswith((_TORCH, _HERE, "<"))
    return not inner and not file.endswith(("warnings.py", "contextlib.py"))
