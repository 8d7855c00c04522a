"""Launches of halfstep's Triton kernels, and the way back to torch's kernels if Triton fails.

What each kernel buys is said in its file. Without Triton (torch's builds for CPUs, Windows), or
where it cannot compile, torch's own kernels do the same work: uninstalling Triton switches all of
them off.
"""

import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from halfstep.errors import Notice
from halfstep.utils.device_values import is_capturing

# Integers by their size in bytes: values of any dtype are copied as words of these.
WORD_DTYPES = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}

# Kernel, how many programs, its arguments by position or by name, how many warps a program has.
Launch: TypeAlias = tuple[Any, int, tuple[Any, ...] | dict[str, Any], int]

# What a warning says: what happens instead, and whether results change.
MORE_UPDATE_KERNELS = "Updates take more kernels"
SAME_RESULTS = "Results are the same."
MORE_COMPILED_KERNELS = "Compiled steps take more kernels"
SUMS_MAY_DIFFER = "Sums may differ in their last digits."


def triton_runs_on(device: torch.device) -> bool:
    """Whether Triton kernels run on this device."""
    return device.type in _triton_devices()


@cache
def _triton_devices() -> tuple[str, ...]:
    """The types of devices that Triton kernels run on."""
    try:
        from triton import knobs  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return ()
    # With TRITON_INTERPRET=1 kernels are interpreted, also for tensors on a CPU.
    return ("cuda", "cpu") if knobs.runtime.interpret else ("cuda",)


def may_read_memory(t: Tensor) -> bool:
    """Whether a kernel may read a tensor's memory directly, without torch knowing of it."""
    is_plain = type(t) is Tensor and t.layout == torch.strided and not t.is_neg()
    if not is_plain or t.numel() == 0 or not triton_runs_on(t.device):
        return False
    needs_gradient = t.requires_grad and torch.is_grad_enabled()
    return not needs_gradient and not _inside_function_transform()


def _inside_function_transform() -> bool:
    """Whether torch.func (vmap, grad, jvp) or forward-mode differentiation is active."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    return forward_ad._current_level >= 0


def launch(device: torch.device, launches: Iterable[Launch]) -> None:
    """Launches Triton kernels, one after the other, on the current stream of `device`."""
    current_device: AbstractContextManager[Any] = nullcontext()
    if device.type == "cuda":
        current_device = torch.cuda.device(device)
    with current_device:
        for kernel, programs, arguments, warps in launches:
            # Without fused multiply-adds every product is rounded, as it is in torch's kernels.
            options = {"num_warps": warps, "enable_fp_fusion": False}
            if isinstance(arguments, dict):
                kernel[(programs,)](**arguments, **options)
            else:
                kernel[(programs,)](*arguments, **options)


def run_or_fall_back(
    works: dict[Any, bool],
    key: Any,
    run_kernel: Callable[[], None],
    consequence: str,
    effect: str,
) -> bool:
    """Runs a kernel and returns True; where it cannot be compiled, warns and returns False.

    `works` remembers whether the kernel could be compiled, by `key`: all that it is compiled for.
    A kernel that failed is not tried again. `consequence` and `effect` are said in the warning.
    """
    # The first call compiles the kernel, which must not happen while a CUDA graph is captured.
    if not works.get(key, not is_capturing()):
        return False
    try:
        run_kernel()
    except Exception as error:  # Triton's compiler, the C compiler and the disk raise all kinds
        if works.get(key):
            raise
        works[key] = False
        warn_fallback(error, consequence, effect)
    else:
        works[key] = True
    return works[key]


def warn_fallback(error: Exception, consequence: str, effect: str) -> None:
    """Warns that torch's own kernels are used because Triton failed."""
    advice = "It needs a C compiler and a folder to write to."
    message = f"{consequence}: Triton failed ({error}). {advice} {effect}"
    warnings.warn(message, Notice, stacklevel=5)
