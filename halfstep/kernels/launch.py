"""Triton's kernels: launched, and what is said when they cannot be."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad

from halfstep.errors import Notice

WORDS = {
    1: torch.int8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
}  # by bytes: what is moved as it lies
Launch: TypeAlias = tuple[Any, int, tuple[Any, ...], int]  # kernel, programs, arguments, warps
MORE, SAME = "Updates take more kernels", "Results are the same."
INSTEAD = "Compiled steps take more kernels", "Sums may differ in their last digits."


def is_capturing() -> bool:
    """Whether a graph is being recorded; torch without CUDA cannot even be asked."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def usable(device: torch.device) -> bool:
    """Whether Triton's kernels run there."""
    return device.type in _devices()


def may_read(t: Tensor) -> bool:
    """Whether a kernel may read it past torch: memory as it lies, not empty, and no derivative goes through it."""
    plain = (
        type(t) is Tensor
        and t.layout == torch.strided
        and not t.is_neg()
        and t.numel() > 0
        and usable(t.device)
    )
    return plain and not (t.requires_grad and torch.is_grad_enabled()) and not _transformed()


def _transformed() -> bool:
    """Whether torch.func (vmap, grad, jvp) or forward-mode AD is at work."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


@cache
def _devices() -> tuple[str, ...]:
    """Triton comes with torch's builds for CUDA on Linux; with TRITON_INTERPRET=1 it interprets on a CPU."""
    try:
        from triton import knobs  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        return ()
    return ("cuda", "cpu") if knobs.runtime.interpret else ("cuda",)


def launch(device: torch.device, launches: Iterable[Launch]) -> None:
    """Triton launches on the current device. No sum of products is fused: each rounds, as in torch."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for kernel, programs, arguments, warps in launches:
            kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=False)


def attempt(
    works: dict[Any, bool], key: Any, start: Callable[[], None], instead: str, same: str
) -> bool:
    """Whether a kernel ran. A first call compiles it, which a capture must not; one that failed is not tried again."""
    if not works.get(key, not is_capturing()):
        return False
    try:
        start()
    except (
        Exception
    ) as error:  # of any kind that Triton's compiler, the C compiler or the disk may raise
        if works.get(key):
            raise
        works[key] = False
        tell(error, instead, same)
    else:
        works[key] = True
    return works[key]


def tell(error: Exception, instead: str, same: str) -> None:
    """That torch's own kernels are used instead, and what that changes."""
    advice = f"It needs a C compiler and a folder to write to. {same}"
    warnings.warn(f"{instead}: Triton failed ({error}). {advice}", Notice, stacklevel=5)
