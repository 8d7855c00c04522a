"""What a device can do, and the backend switches that would change a precision behind the user's back."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from halfstep.precision.policy import BF16, F64, Precision

_NOTHING = nullcontext()
_SWITCHES = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"))
_get_fp32: Any = (
    torch._C._get_fp32_precision_getter
)  # torch.backends.….fp32_precision, without a module look-up
_set_fp32: Any = torch._C._set_fp32_precision_setter
_get_benchmark, _set_benchmark = (
    torch._C._get_cudnn_benchmark,
    torch._C._set_cudnn_benchmark,
)  # likewise


def refuse(precision: Precision, device: torch.device) -> None:
    """ValueError when `device` cannot do `precision`, naming what it can."""
    low, cuda = precision.compute, device.type == "cuda"
    major = torch.cuda.get_device_capability(device)[0] if cuda else 0
    if precision.name == "tf32" and major < 8:
        raise ValueError(
            "precision 'tf32' needs a CUDA device of compute capability 8.0 or more, "
            f"this is {device}; use 'fp32', or 'O1' for speed"
        )
    if low == BF16 and cuda and major < 8:
        raise ValueError(
            f"{device} has no bfloat16 units (compute capability {major}.x); use dtype='float16'"
        )
    if low == F64 and device.type == "mps":
        raise ValueError("mps has no float64; use precision 'fp32', or move the network to 'cpu'")


def backend(
    precision: Precision, device: torch.device, *, deterministic: bool, benchmark: bool = True
) -> AbstractContextManager[None]:
    """TF32 exactly as the precision says, cuDNN's algorithms measured or not, deterministic kernels when asked.

    The caller's switches come back after.
    """
    if device.type == "cuda":
        return _cuda("tf32" if precision.name == "tf32" else "ieee", deterministic, benchmark)
    return _deterministic() if deterministic else _NOTHING


@contextmanager
def _cuda(mode: str, deterministic: bool, benchmark: bool) -> Iterator[None]:
    before = [_get_fp32(*switch) for switch in _SWITCHES]
    moved = [
        (switch, value) for switch, value in zip(_SWITCHES, before, strict=True) if value != mode
    ]
    measured = _get_benchmark()
    try:
        if measured != benchmark:
            _set_benchmark(benchmark)
        for switch, _ in moved:
            _set_fp32(*switch, mode)
        with _deterministic() if deterministic else _NOTHING:
            yield
    finally:
        for switch, value in moved:
            _set_fp32(*switch, value)
        if measured != benchmark:
            _set_benchmark(measured)


@contextmanager
def _deterministic() -> Iterator[None]:
    on, warn = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    benchmark = torch.backends.cudnn.benchmark
    try:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
        yield
    finally:
        torch.use_deterministic_algorithms(on, warn_only=warn)
        torch.backends.cudnn.benchmark = benchmark


def check_deterministic(device: torch.device) -> None:
    """cuBLAS repeats itself only with a fixed workspace, which must be chosen before CUDA starts."""
    good = (":4096:8", ":16:8")
    if device.type == "cuda" and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in good:
        raise ValueError(
            "deterministic=True: expected CUBLAS_WORKSPACE_CONFIG=:4096:8 (or :16:8) in the environment, "
            f"received {os.environ.get('CUBLAS_WORKSPACE_CONFIG')!r}; "
            "set it before starting Python: CUBLAS_WORKSPACE_CONFIG=:4096:8 python …"
        )
