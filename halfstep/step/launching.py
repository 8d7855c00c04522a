"""Triton's kernels: launched, and what is said when they cannot be."""

import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, TypeAlias

import torch

from halfstep.errors import Notice

Launch: TypeAlias = tuple[Any, int, tuple[Any, ...], int]  # kernel, programs, arguments, warps


def launch(device: torch.device, launches: Iterable[Launch]) -> None:
    """Triton launches on the current device. No sum of products is fused: each rounds, as in torch."""
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for kernel, programs, arguments, warps in launches:
            kernel[(programs,)](*arguments, num_warps=warps, enable_fp_fusion=False)


def tell(error: Exception) -> None:
    advice = "It needs a C compiler and a folder to write to. Results are the same."
    warnings.warn(f"Updates take more kernels: Triton failed ({error}). {advice}", Notice, stacklevel=4)
