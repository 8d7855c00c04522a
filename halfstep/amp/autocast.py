"""MegEngine's autocast on torch's: a context manager, a decorator and a switch for each thread.

Each entry of a block, and the switch, is an OpenBlock on a stack of its thread. No cast is cached:
torch's cache would serve the weights of the first forward until the outermost block ends.
"""

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
from halfstep.utils.checks import one_of

P = ParamSpec("P")
R = TypeVar("R")
Dtype: TypeAlias = str | torch.dtype

LOW_DTYPES = (F16, BF16, F32)
HIGH_DTYPES = (F32,)


class autocast:
    """Inside, products round their operands to the low dtype; delicate ops widen to float32.

    None takes `amp.low_prec_dtype` / `amp.high_prec_dtype` as they are at entry, and every device
    of this machine. A low dtype of float32 casts nothing. On a CPU without half units
    `kernels="auto"` forms round(fp32 product). One instance may be entered many times, also nested
    and from several threads.
    """

    def __init__(
        self,
        enabled: bool = True,
        low_prec_dtype: Dtype | None = None,
        high_prec_dtype: Dtype | None = None,
        *,
        device_type: str | None = None,
        kernels: str = "auto",
        **torch_arguments: Never,
    ) -> None:
        if not isinstance(enabled, bool) or torch_arguments:
            raise TypeError(_wrong_arguments_message(enabled, torch_arguments))
        one_of("kernels", kernels, KERNELS)
        self.enabled = enabled
        self.kernels = kernels

        self.low_prec_dtype: torch.dtype | None = None
        if low_prec_dtype is not None:
            self.low_prec_dtype = parse_low_dtype(low_prec_dtype)
        self.high_prec_dtype: torch.dtype | None = None
        if high_prec_dtype is not None:
            self.high_prec_dtype = parse_high_dtype(high_prec_dtype)

        if device_type is not None:
            _check_has_autocast(device_type)
        self.device_type = device_type

    def __enter__(self) -> Self:
        _thread.blocks.append(_open(self, is_switch=False))
        return self

    def __exit__(self, *exc: object) -> None:
        # Switches that were set inside the block end with it.
        while _close_innermost().is_switch:
            pass
        _follow_default_dtype()

    def __call__(self, fn: Callable[P, R]) -> Callable[P, R]:
        """`fn` with an autocast block of its own around each call."""
        _check_is_function(fn)

        @functools.wraps(fn)
        def call_with_autocast(*args: P.args, **kwargs: P.kwargs) -> R:
            with self:
                return fn(*args, **kwargs)

        return call_with_autocast


@dataclass
class DefaultDtypes:
    """What None means in autocast(), for the whole process."""

    low: torch.dtype = F16
    high: torch.dtype = F32


default_dtypes = DefaultDtypes()


@dataclass(frozen=True)
class OpenBlock:
    """An entered block, or the switch."""

    is_on: bool
    low: torch.dtype
    fast_half: FastHalf | None  # the CPU's, if products are formed in fp32 in this block
    contexts: ExitStack  # what has to be left after it
    is_switch: bool


class _Thread(threading.local):
    def __init__(self) -> None:
        self.blocks: list[OpenBlock] = []  # the innermost last


_thread = _Thread()


class _InnermostFastHalf(FastHalf):
    """FastHalf that does nothing while a block inside asks for another dtype or torch's kernels."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        is_innermost = bool(_thread.blocks) and _thread.blocks[-1].fast_half is self
        if is_innermost and torch.get_autocast_dtype("cpu") == self.low:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


# The switch and the default dtypes


def is_enabled() -> bool:
    """Whether the innermost block or switch of this thread has autocast on."""
    return bool(_thread.blocks) and _thread.blocks[-1].is_on


def set_enabled(on: bool) -> None:
    """Switches autocast on or off for this thread, until the surrounding block ends if any."""
    if not isinstance(on, bool):
        raise TypeError(f"amp.enabled: expected True or False, received {on!r}")
    if _thread.blocks and _thread.blocks[-1].is_switch:
        _close_innermost()
    if is_enabled() != on:
        _thread.blocks.append(_open(autocast(enabled=on), is_switch=True))


def low_dtype() -> torch.dtype:
    """The low dtype of this thread's innermost block or switch if it is on, else the default."""
    return _thread.blocks[-1].low if is_enabled() else default_dtypes.low


def set_default_low_dtype(low: torch.dtype) -> bool:
    """Sets the low dtype of entries to come. Returns whether it is another one than before."""
    changed = low != default_dtypes.low
    default_dtypes.low = low
    _follow_default_dtype()
    return changed


def _follow_default_dtype() -> None:
    """Makes a switch that is on take the present default; open blocks keep that of their entry."""
    if not _thread.blocks:
        return
    innermost = _thread.blocks[-1]
    if innermost.is_switch and innermost.is_on and innermost.low != default_dtypes.low:
        set_enabled(True)


# Entering and leaving


def _open(block: autocast, *, is_switch: bool) -> OpenBlock:
    """Enters torch's autocast as the block asks for it."""
    low = block.low_prec_dtype or default_dtypes.low
    if block.device_type:
        device_types = {block.device_type}
    else:
        device_types = {"cpu", default_device_type()}

    # A block for another device leaves the CPU's products as they are.
    fast_half = None
    if _thread.blocks:
        fast_half = _thread.blocks[-1].fast_half

    with ExitStack() as contexts:
        if block.enabled and low != F32:
            for kind in device_types:
                _check_present(kind)
                contexts.enter_context(torch.autocast(kind, dtype=low, cache_enabled=False))
            # Beside an accelerator, products on the CPU are rare: torch's kernel will do.
            if device_types == {"cpu"}:
                fast_half = None
                if block.kernels == "auto" and not has_native(low):
                    fast_half = _enter_fast_half(contexts, low)
        else:
            for kind in device_types:
                if torch.is_autocast_enabled(kind):
                    contexts.enter_context(torch.autocast(kind, enabled=False, cache_enabled=False))
        return OpenBlock(block.enabled, low, fast_half, contexts.pop_all(), is_switch)


def _close_innermost() -> OpenBlock:
    block = _thread.blocks.pop()
    block.contexts.close()
    return block


def _enter_fast_half(contexts: ExitStack, low: torch.dtype) -> FastHalf:
    fast_half = _InnermostFastHalf(low, cast=True)
    _push_mode(fast_half)
    contexts.callback(_remove_mode, fast_half)
    return fast_half


def _remove_mode(mode: TorchFunctionMode) -> None:
    """Takes the mode out of torch's stack, also from below others.

    A switch may end inside modes that began after it.
    """
    stack: list[TorchFunctionMode] = _get_current_function_mode_stack()
    if mode not in stack:
        return
    modes_above = stack[stack.index(mode) + 1 :]
    for _ in (mode, *modes_above):
        _pop_mode()
    for mode_above in modes_above:
        _push_mode(mode_above)


# Arguments


def default_device_type() -> str:
    """The device type that None means: the accelerator if this machine has one, else "cpu"."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None else accelerator.type


def parse_low_dtype(value: Dtype) -> torch.dtype:
    """A low dtype from its name or itself: float16, bfloat16, or float32 for no casting."""
    return _parse_dtype("low_prec_dtype", value, LOW_DTYPES, reason="")


def parse_high_dtype(value: Dtype) -> torch.dtype:
    """float32 from its name or itself: torch's op lists know no other."""
    reason = " (torch's op lists widen to float32 only)"
    return _parse_dtype("high_prec_dtype", value, HIGH_DTYPES, reason)


def _parse_dtype(
    argument: str, value: Dtype, choices: tuple[torch.dtype, ...], reason: str
) -> torch.dtype:
    dtype = DTYPES.get(value) if isinstance(value, str) else value
    if dtype in choices:
        return dtype
    names = [name for name, dtype in DTYPES.items() if dtype in choices]
    raise ValueError(
        f"{argument}: expected one of {', '.join(names)} or the torch.dtype{reason}, "
        f"received {value!r}"
    )


def _wrong_arguments_message(enabled: object, torch_arguments: dict[str, Any]) -> str:
    """What to write instead of torch.autocast's arguments, or a decorator without parentheses."""
    if not torch_arguments and not isinstance(enabled, str | torch.dtype | torch.device):
        return (
            f"enabled: expected True or False, received {type(enabled).__name__}, "
            "do write the parentheses when decorating: @amp.autocast()"
        )
    if torch_arguments:
        problem = f"there is no {'=, '.join(torch_arguments)}="
    else:
        problem = f"enabled: expected True or False, received {enabled!r}"
    return (
        f"{problem}, do write amp.autocast(), which is for every device of this machine; "
        "a dtype is low_prec_dtype='float16', 'bfloat16' or 'float32'"
    )


def _check_has_autocast(device_type: str) -> None:
    """Raises a ValueError for a device type that torch has no autocast for."""
    try:
        has_autocast = torch.amp.is_autocast_available(device_type)
    except (RuntimeError, TypeError):  # not a device type at all
        has_autocast = False
    if not has_autocast:
        raise ValueError(
            "device_type: expected 'cpu', 'cuda' or another type with autocast, "
            f"received {device_type!r}"
        )


def _check_present(device_type: str) -> None:
    """Raises a ValueError for a device type that this machine does not have."""
    present = {"cpu", default_device_type()}
    if device_type not in present:
        raise ValueError(
            f"device_type: expected one that this machine has ({' or '.join(sorted(present))}), "
            f"received {device_type!r}, do leave device_type=None"
        )


def _check_is_function(fn: object) -> None:
    """Raises a TypeError for what a decorator cannot wrap: its body would run without autocast."""
    if isinstance(fn, staticmethod | classmethod):
        raise TypeError(
            f"expected a function, received a {type(fn).__name__}, "
            "do put @amp.autocast() below that line"
        )
    if inspect.isclass(fn) or not callable(fn):
        raise TypeError(
            f"expected a function, received {fn!r}, "
            "do decorate its method: @amp.autocast() def forward…"
        )
    is_generator = inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)
    if is_generator or inspect.iscoroutinefunction(fn):
        raise TypeError(
            "expected a plain function, received a generator or coroutine, "
            "whose body runs after the call returned, "
            "do write `with amp.autocast():` around the computation inside it"
        )
