"""MegEngine's autocast on torch's: a context manager, a decorator and a switch per thread; no cast is ever cached."""

import functools
import inspect
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Never, ParamSpec, Self, TypeAlias, TypeVar

import torch
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    _pop_mode,
    _push_mode,
)

from halfstep.precision.cpu_half import FastHalf, has_native
from halfstep.precision.policy import BF16, DTYPES, F16, F32, KERNELS

P = ParamSpec("P")
R = TypeVar("R")
Dtype: TypeAlias = str | torch.dtype

LOW = (F16, BF16, F32)
HIGH = (F32,)


class autocast:
    """Inside, products round their operands to the low dtype, delicate ops widen to float32; each entry is its own.

    None takes `amp.low_prec_dtype` / `amp.high_prec_dtype` as they are at entry, and every device of this machine.
    A low dtype of float32 casts nothing. On a CPU without half units `kernels="auto"` forms round(fp32 product).
    """

    def __init__(
        self, enabled: bool = True, low_prec_dtype: Dtype | None = None, high_prec_dtype: Dtype | None = None, *,
        device_type: str | None = None, kernels: str = "auto", **torchs: Never,
    ) -> None:  # fmt: skip
        if not isinstance(enabled, bool) or torchs:
            raise TypeError(_not_torchs(enabled, torchs))
        if kernels not in KERNELS:
            raise ValueError(f"kernels: expected one of {', '.join(KERNELS)}, received {kernels!r}")
        self.enabled, self.kernels = enabled, kernels
        self.low_prec_dtype = None if low_prec_dtype is None else parse_low(low_prec_dtype)
        self.high_prec_dtype = None if high_prec_dtype is None else parse_high(high_prec_dtype)
        self.device_type = None if device_type is None else _known_device(device_type)

    def __enter__(self) -> Self:
        _here.frames.append(_open(self, switch=False))
        return self

    def __exit__(self, *exc: object) -> None:
        while _close().switch:  # switches set inside the block end with it
            pass
        refresh()

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """`fn` with every call in an autocast block of its own: recursion and threads do not share state."""
        _check_function(fn)

        @functools.wraps(fn)
        def inside(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return fn(*args, **kwargs)

        return inside


@dataclass
class Defaults:
    """What None means in autocast(), for the whole process."""

    low: torch.dtype = F16
    high: torch.dtype = F32


defaults = Defaults()


@dataclass(frozen=True)
class Frame:
    """One open block, or the switch: what it asked for and what must be left after it."""

    on: bool
    low: torch.dtype
    fast: FastHalf | None
    contexts: ExitStack
    switch: bool


class _Thread(threading.local):
    def __init__(self) -> None:
        self.frames: list[Frame] = []


_here = _Thread()


class _Fast(FastHalf):
    """FastHalf that stands back while a block inside it asks for another dtype or for torch's own kernels."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        mine = bool(_here.frames) and _here.frames[-1].fast is self
        if mine and torch.get_autocast_dtype("cpu") == self.low:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


def is_on() -> bool:
    """Whether the innermost block or switch of this thread has autocast on."""
    return bool(_here.frames) and _here.frames[-1].on


def switch(on: bool) -> None:
    """Autocast on or off for this thread from here on, or until the surrounding block ends."""
    if not isinstance(on, bool):
        raise TypeError(f"amp.enabled: expected True or False, received {on!r}")
    if _here.frames and _here.frames[-1].switch:
        _close()
    if is_on() != on:
        _here.frames.append(_open(autocast(enabled=on), switch=True))


def set_low(low: torch.dtype) -> bool:
    """Change what None means, for entries to come; whether that is a change."""
    changed, defaults.low = low != defaults.low, low
    refresh()
    return changed


def refresh() -> None:
    """A switch that is on follows a changed `amp.low_prec_dtype`; open blocks keep the dtype of their entry."""
    if _here.frames and (top := _here.frames[-1]).switch and top.on and top.low != defaults.low:
        switch(True)


def _open(block: autocast, *, switch: bool) -> Frame:
    low = block.low_prec_dtype or defaults.low
    fast = (
        _here.frames[-1].fast if _here.frames else None
    )  # a block for another device leaves the CPU's as it is
    with ExitStack() as contexts:
        kinds = {block.device_type} if block.device_type else {"cpu", accelerator()}
        if block.enabled and low != F32:
            for kind in kinds:
                _check_there(kind)
                contexts.enter_context(
                    torch.autocast(kind, dtype=low, cache_enabled=False)
                )  # a cached cast goes stale
            if (
                kinds == {"cpu"}
            ):  # beside an accelerator, where a CPU product is the exception, torch's kernel will do
                fast = (
                    _enter_fast(contexts, low)
                    if block.kernels == "auto" and not has_native(low)
                    else None
                )
        else:
            for kind in kinds:
                if torch.is_autocast_enabled(kind):
                    contexts.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        return Frame(block.enabled, low, fast, contexts.pop_all(), switch)


def _close() -> Frame:
    frame = _here.frames.pop()
    frame.contexts.close()
    return frame


def _enter_fast(contexts: ExitStack, low: torch.dtype) -> FastHalf:
    fast = _Fast(low, cast=True)
    _push_mode(fast)
    contexts.callback(_remove, fast)
    return fast


def _remove(mode: TorchFunctionMode) -> None:
    """Take the mode out from wherever it is: a switch may end inside modes that began after it."""
    stack: list[TorchFunctionMode] = _get_current_function_mode_stack()
    if mode not in stack:
        return
    above = stack[stack.index(mode) + 1 :]
    for _ in (mode, *above):
        _pop_mode()
    for other in above:
        _push_mode(other)


def accelerator() -> str:
    """The device type that None means: the accelerator if one is there, else "cpu"."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if found is None else found.type


def name(dtype: torch.dtype) -> str:
    """ "float16" for torch.float16."""
    return str(dtype).removeprefix("torch.")


def parse_low(value: Dtype) -> torch.dtype:
    """A low dtype from its name or itself: float16, bfloat16, or float32 for no casting."""
    return _parse("low_prec_dtype", value, LOW, "")


def parse_high(value: Dtype) -> torch.dtype:
    """float32 from its name or itself: torch's op lists know no other."""
    return _parse("high_prec_dtype", value, HIGH, " (torch's op lists widen to float32 only)")


def _parse(field: str, value: Dtype, options: tuple[torch.dtype, ...], reason: str) -> torch.dtype:
    found = DTYPES.get(value) if isinstance(value, str) else value
    if found in options:
        return found
    names = [n for n, d in DTYPES.items() if d in options]
    raise ValueError(
        f"{field}: expected one of {', '.join(names)} or the torch.dtype{reason}, received {value!r}"
    )


def _not_torchs(enabled: object, others: dict[str, Any]) -> str:
    """What to write instead of torch.autocast's arguments, or instead of a decorator without parentheses."""
    if not others and not isinstance(enabled, str | torch.dtype | torch.device):
        said = f"enabled: expected True or False, received {type(enabled).__name__}"
        return f"{said}, do write the parentheses when decorating: @amp.autocast()"
    came = (
        f"there is no {'=, '.join(others)}="
        if others
        else f"enabled: expected True or False, received {enabled!r}"
    )
    low = "low_prec_dtype='float16', 'bfloat16' or 'float32'"
    return f"{came}, do write amp.autocast(), which is for every device of this machine; a dtype is {low}"


def _known_device(kind: str) -> str:
    try:
        known = torch.amp.is_autocast_available(kind)
    except (RuntimeError, TypeError):  # not a device type at all
        known = False
    if not known:
        raise ValueError(
            f"device_type: expected 'cpu', 'cuda' or another type with autocast, received {kind!r}"
        )
    return kind


def _check_there(kind: str) -> None:
    if kind not in ("cpu", accelerator()):
        raise ValueError(
            f"device_type: expected one that this machine has ({' or '.join(sorted({'cpu', accelerator()}))}), "
            f"received {kind!r}, do leave device_type=None"
        )


def _check_function(fn: object) -> None:
    if isinstance(fn, staticmethod | classmethod):
        raise TypeError(
            f"expected a function, received a {type(fn).__name__}, do put @amp.autocast() below that line"
        )
    if inspect.isclass(fn) or not callable(fn):
        raise TypeError(
            f"expected a function, received {fn!r}, do decorate its method: @amp.autocast() def forward…"
        )
    if (
        inspect.isgeneratorfunction(fn)
        or inspect.isasyncgenfunction(fn)
        or inspect.iscoroutinefunction(fn)
    ):
        raise TypeError(
            "expected a plain function, received a generator or coroutine, whose body runs after the call returned, "
            "do write `with amp.autocast():` around the computation inside it"
        )
