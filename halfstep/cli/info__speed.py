"""How fast a device multiplies matrices in each dtype, and the precision that recommends itself by it."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from halfstep.precision import Precision
from halfstep.precision.backend_flags import set_backend_flags
from halfstep.precision.cpu_half import FastHalf, has_native

_WORTH = 1.5  # a product that is less than that faster is eaten up by the casts around it
_LARGEST = {"cpu": 1024, "cuda": 8192}
_ENOUGH_S = 0.005  # a product this long needs no larger one to be timed


def dtypes(device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """A row per dtype and way: native or not, and GFLOP/s when `seconds` is above 0."""
    major = torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0
    rows = [
        _row("fp64", torch.float64, True, device, seconds),
        _row("fp32", torch.float32, True, device, seconds),
    ]
    if major >= 8:
        rows.append(_row("tf32", torch.float32, True, device, seconds))
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
        native = (
            has_native(dtype) if device.type == "cpu" else major >= (7 if name == "fp16" else 8)
        )
        rows.append(_row(name, dtype, native, device, seconds))
        if device.type == "cpu" and not native:
            rows.append(_row(name, dtype, False, device, seconds, FastHalf(dtype)))
    return rows


def _row(
    name: str, dtype: torch.dtype, native: bool, device: torch.device, seconds: float,
    way: AbstractContextManager[Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    own = "halfstep: rounded fp32 product" if way is not None else "torch"
    precision = Precision("tf32" if name == "tf32" else "fp32")
    with set_backend_flags(precision, device, deterministic=False), way or nullcontext():
        speed = gflops(dtype, device, seconds) if seconds else None
    return {"dtype": name, "native": native, "by": own, "gflops": speed}


def gflops(dtype: torch.dtype, device: torch.device, seconds: float) -> float:
    """2 n³ over the shortest time of one n × n product; n doubles while a product is too short to be timed."""
    size = 256
    while True:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        best = _best(lambda a=a, b=b: a @ b, device, seconds / 4)  # type: ignore[misc]
        if best >= _ENOUGH_S or size >= _LARGEST[device.type]:
            best = min(best, _best(lambda a=a, b=b: a @ b, device, seconds))  # type: ignore[misc]
            return 2 * size**3 / best / 1e9
        size *= 2


def _best(product: Callable[[], Tensor], device: torch.device, seconds: float) -> float:
    product()  # the first call chooses its kernel
    _wait(device)
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        product()
        _wait(device)
        now = time.perf_counter()
        best = min(best, now - start)
        if now >= end or now - start > seconds:
            return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def recommend(device: str, rows: list[dict[str, Any]]) -> dict[str, str]:
    """What to begin with, by docs/guide/choosing.md: bfloat16 or float16 under autocast where it is native and worth it."""
    native = {row["dtype"]: row["gflops"] for row in rows if row["native"]}
    full = native["fp32"]
    for name, precision in (("bf16", "O1+bf16"), ("fp16", "O1")):
        if name not in native:
            continue
        if full is None or native[name] is None:
            return _advice(precision, f"this {device} multiplies {name} natively (not measured)")
        if native[name] >= _WORTH * full:
            why = "needs no loss scale" if name == "bf16" else "its loss scale is found by itself"
            return _advice(
                precision,
                f"{name} products are {native[name] / full:.1f} × as fast as fp32, and it {why}",
            )
    halves = [name for name in ("fp16", "bf16") if name in native]
    if not halves:
        return _advice(
            "fp32",
            f"this {device} has no half-precision units: half is for studying it here, not for speed",
        )
    return _advice(
        "fp32", f"{' and '.join(halves)} products are not {_WORTH} × as fast as fp32 here"
    )


def _advice(precision: str, reason: str) -> dict[str, str]:
    return {"precision": precision, "reason": reason}
