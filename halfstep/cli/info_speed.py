"""How fast a device multiplies matrices in each dtype, and the precision that follows from it."""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from halfstep.cli.bench_timing import wait_for_device
from halfstep.precision import Precision
from halfstep.precision.backend_flags import set_backend_flags
from halfstep.precision.cpu_half import FastHalf, has_native

# A 16-bit product must be this many times as fast as fp32: casts around it cost the rest.
MIN_SPEEDUP = 1.5

FIRST_SIZE = 256  # rows and columns of the smallest matrix
MAX_SIZE = {"cpu": 1024, "cuda": 8192}
MIN_PRODUCT_S = 0.005  # a product this long is timed well; a shorter one gets a larger matrix

# Compute capabilities of CUDA devices, major number, from which on a dtype has units of its own.
TF32_SINCE = 8
FP16_SINCE = 7
BF16_SINCE = 8


def measure_dtypes(device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """A row for each dtype: native or not, by whom, and GFLOP/s where `seconds` is above 0."""
    on_cpu = device.type == "cpu"
    capability = 0
    if device.type == "cuda":
        capability, _ = torch.cuda.get_device_capability(device)

    rows = [
        _row("fp64", torch.float64, device, seconds, native=True),
        _row("fp32", torch.float32, device, seconds, native=True),
    ]
    if capability >= TF32_SINCE:
        rows.append(_row("tf32", torch.float32, device, seconds, native=True))
    for name, dtype, native_since in (
        ("fp16", torch.float16, FP16_SINCE),
        ("bf16", torch.bfloat16, BF16_SINCE),
    ):
        native = has_native(dtype) if on_cpu else capability >= native_since
        rows.append(_row(name, dtype, device, seconds, native=native))
        # A CPU without such units: halfstep's own way beside torch's.
        if on_cpu and not native:
            fast_half = FastHalf(dtype)
            rows.append(
                _row(name, dtype, device, seconds, native=False, halfstep_kernels=fast_half)
            )
    return rows


def _row(
    name: str,
    dtype: torch.dtype,
    device: torch.device,
    seconds: float,
    *,
    native: bool,
    halfstep_kernels: AbstractContextManager[Any] | None = None,
) -> dict[str, Any]:
    kernels: AbstractContextManager[Any] = nullcontext()
    provider = "torch"
    if halfstep_kernels is not None:
        kernels = halfstep_kernels
        provider = "halfstep: rounded fp32 product"

    precision = Precision("tf32" if name == "tf32" else "fp32")
    speed = None
    with set_backend_flags(precision, device, deterministic=False), kernels:
        if seconds:
            speed = measure_gflops(dtype, device, seconds)
    return {"dtype": name, "native": native, "by": provider, "gflops": speed}


def measure_gflops(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """GFLOP/s of an n × n matrix product: 2 n³ operations over the shortest time of one.

    n doubles while a product is too short to be timed.
    """
    size = FIRST_SIZE
    while True:
        a = torch.randn(size, size, device=device).to(dtype)
        b = torch.randn(size, size, device=device).to(dtype)
        product_s = _shortest_product(a, b, seconds / 4)
        if product_s >= MIN_PRODUCT_S or size >= MAX_SIZE[device.type]:
            break
        size *= 2
    product_s = min(product_s, _shortest_product(a, b, seconds))
    return 2 * size**3 / product_s / 1e9


def _shortest_product(a: Tensor, b: Tensor, seconds: float) -> float:
    """The shortest time of one product, in seconds, among all that fit into the given time."""
    torch.matmul(a, b)  # the first call chooses its kernel
    wait_for_device(a.device)
    shortest_s = float("inf")
    end = time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        torch.matmul(a, b)
        wait_for_device(a.device)
        now = time.perf_counter()
        shortest_s = min(shortest_s, now - start)
        if now >= end or now - start > seconds:
            return shortest_s


def recommend_precision(device_type: str, rows: list[dict[str, Any]]) -> dict[str, str]:
    """The precision to begin with and the reason, by docs/guide/choosing.md.

    bfloat16 or float16 under autocast, where it is native and fast enough; else fp32.
    """
    native_gflops = {row["dtype"]: row["gflops"] for row in rows if row["native"]}
    fp32_gflops = native_gflops["fp32"]
    for name, precision, loss_scale in (
        ("bf16", "O1+bf16", "needs no loss scale"),
        ("fp16", "O1", "its loss scale is found by itself"),
    ):
        if name not in native_gflops:
            continue
        half_gflops = native_gflops[name]
        if fp32_gflops is None or half_gflops is None:
            reason = f"this {device_type} multiplies {name} natively (not measured)"
            return {"precision": precision, "reason": reason}
        if half_gflops >= MIN_SPEEDUP * fp32_gflops:
            speedup = half_gflops / fp32_gflops
            reason = f"{name} products are {speedup:.1f} × as fast as fp32, and it {loss_scale}"
            return {"precision": precision, "reason": reason}

    native_halves = [name for name in ("fp16", "bf16") if name in native_gflops]
    if native_halves:
        names = " and ".join(native_halves)
        reason = f"{names} products are not {MIN_SPEEDUP} × as fast as fp32 here"
    else:
        reason = (
            f"this {device_type} has no half-precision units: half is for studying it here, "
            "not for speed"
        )
    return {"precision": "fp32", "reason": reason}
