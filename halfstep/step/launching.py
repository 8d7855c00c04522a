"""Triton's kernels: launched, and what is said when they cannot be."""

import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch

from halfstep.errors import Notice
from halfstep.step.capturing import is_capturing

Launch: TypeAlias = tuple[Any, int, tuple[Any, ...], int]  # kernel, programs, arguments, warps
MORE, SAME = "Updates take more kernels", "Results are the same."
INSTEAD = "Compiled steps take more kernels", "Sums may differ in their last digits."


def launch(device: torch.device, launches: Iterable[Launch]) -> None:
    """Triton launches on the current device. No sum of products is fused: each rounds, as in torch."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for kernel, programs, arguments, warps in launches:
            kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=False)


def attempt(works: dict[Any, bool], key: Any, start: Callable[[], None], instead: str, same: str) -> bool:
    """Whether a kernel ran. A first call compiles it, which a capture must not; one that failed is not tried again."""
    if not works.get(key, not is_capturing()):
        return False
    try:
        start()
    except Exception as error:  # of any kind that Triton's compiler, the C compiler or the disk may raise
        if key in works:
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
