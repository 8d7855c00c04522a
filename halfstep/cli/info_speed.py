"""How fast a device multiplies matrices in each dtype."""

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from halfstep.cli.bench_timing import wait_for_device
from halfstep.precision import Precision
from halfstep.precision.advice import find_half_units
from halfstep.precision.backend_flags import set_backend_flags
from halfstep.precision.cpu_half import FastHalf

FIRST_SIZE = 256  # rows and columns of the smallest matrix
MAX_SIZE = {"cpu": 1024, "cuda": 8192}
MIN_PRODUCT_S = 0.005  # a product this long is timed well; a shorter one gets a larger matrix

TF32_SINCE = 8  # compute capability of a CUDA device, major number


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
    units = find_half_units(device)
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        native = name in units.dtypes
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


def product_speedups(rows: list[dict[str, Any]]) -> dict[str, float]:
    """How many times as fast as fp32's the products of each native half dtype are; {}: unmeasured.

    These are what `advise` decides by.
    """
    native_gflops = {row["dtype"]: row["gflops"] for row in rows if row["native"]}
    fp32_gflops = native_gflops["fp32"]
    if fp32_gflops is None:
        return {}
    return {
        name: native_gflops[name] / fp32_gflops
        for name in ("bf16", "fp16")
        if native_gflops.get(name) is not None
    }
