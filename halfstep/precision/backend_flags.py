"""What a device can do, and torch's global flags that would change a precision unnoticed.

Such flags are TF32 for float32 products, cuDNN's choice of algorithms, and deterministic kernels.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from halfstep.precision.advice import begin_with, find_half_units
from halfstep.precision.policy import BF16, F64, Precision

# torch.backends.….fp32_precision and cudnn.benchmark, without looking up modules at every step.
_get_fp32_precision: Any = torch._C._get_fp32_precision_getter
_set_fp32_precision: Any = torch._C._set_fp32_precision_setter
_get_benchmark = torch._C._get_cudnn_benchmark
_set_benchmark = torch._C._set_cudnn_benchmark

_FP32_PRECISION_FLAGS = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"))
_REPRODUCIBLE_WORKSPACES = (":4096:8", ":16:8")  # of cuBLAS, by its documentation
_NO_CHANGE = nullcontext()


def check_supported(precision: Precision, device: torch.device) -> None:
    """Raises a ValueError when `device` cannot do `precision`; its message says what it can do."""
    is_cuda = device.type == "cuda"
    major = 0
    if is_cuda:
        major = torch.cuda.get_device_capability(device)[0]

    if precision.name == "tf32" and major < 8:
        raise ValueError(
            "precision 'tf32' needs a CUDA device of compute capability 8.0 or more, "
            f"this is {device}; use {_instead_of_tf32(device)}"
        )
    if precision.compute == BF16 and is_cuda and major < 8:
        raise ValueError(
            f"{device} has no bfloat16 units (compute capability {major}.x); use dtype='float16'"
        )
    if precision.compute == F64 and device.type == "mps":
        raise ValueError("mps has no float64; use precision 'fp32', or move the network to 'cpu'")


def _instead_of_tf32(device: torch.device) -> str:
    """As in "'fp32', or 'O1' for speed": the second only where the device has units for it."""
    fast = begin_with(find_half_units(device))
    return "'fp32'" if fast == "fp32" else f"'fp32', or {fast!r} for speed"


def check_deterministic(device: torch.device) -> None:
    """Raises a ValueError unless cuBLAS has the fixed workspace that makes it repeat its results.

    The environment has to name it before CUDA starts.
    """
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    if device.type == "cuda" and workspace not in _REPRODUCIBLE_WORKSPACES:
        raise ValueError(
            "deterministic=True: expected CUBLAS_WORKSPACE_CONFIG=:4096:8 (or :16:8) in the "
            f"environment, received {workspace!r}; "
            "set it before starting Python: CUBLAS_WORKSPACE_CONFIG=:4096:8 python …"
        )


def set_backend_flags(
    precision: Precision, device: torch.device, *, deterministic: bool, benchmark: bool = True
) -> AbstractContextManager[None]:
    """Inside, torch's flags are what the precision needs; afterwards they are the caller's again.

    TF32 is on for "tf32" only. `benchmark`: cuDNN measures its algorithms and takes the fastest.
    """
    if device.type == "cuda":
        fp32_precision = "tf32" if precision.name == "tf32" else "ieee"
        return _cuda_flags(fp32_precision, deterministic, benchmark)
    return _deterministic_flags() if deterministic else _NO_CHANGE


@contextmanager
def _cuda_flags(fp32_precision: str, deterministic: bool, benchmark: bool) -> Iterator[None]:
    # Only the flags that differ are set, and only those are put back.
    callers_flags = [(flag, _get_fp32_precision(*flag)) for flag in _FP32_PRECISION_FLAGS]
    changed_flags = [(flag, value) for flag, value in callers_flags if value != fp32_precision]
    callers_benchmark = _get_benchmark()
    try:
        if callers_benchmark != benchmark:
            _set_benchmark(benchmark)
        for flag, _ in changed_flags:
            _set_fp32_precision(*flag, fp32_precision)
        with _deterministic_flags() if deterministic else _NO_CHANGE:
            yield
    finally:
        for flag, value in changed_flags:
            _set_fp32_precision(*flag, value)
        if callers_benchmark != benchmark:
            _set_benchmark(callers_benchmark)


@contextmanager
def _deterministic_flags() -> Iterator[None]:
    was_enabled = torch.are_deterministic_algorithms_enabled()
    warned_only = torch.is_deterministic_algorithms_warn_only_enabled()
    callers_benchmark = torch.backends.cudnn.benchmark
    try:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=warned_only)
        torch.backends.cudnn.benchmark = callers_benchmark
