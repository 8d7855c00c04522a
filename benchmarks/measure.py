"""Timing several ways to do the same work side by side, in one run, and writing down the conditions."""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Work = Callable[[], object]


def interleave(
    ways: dict[str, Work], *, rounds: int, steps: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds per call of each way, round by round; the ways take turns, so a slow moment hits them all."""
    for work in ways.values():
        for _ in range(max(20, steps // 4)):
            work()
    times: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            times[name].append(_time(ways[name], steps, device))
    return times


def _time(work: Work, steps: int, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(steps):
        work()
    _wait(device)
    return (time.perf_counter() - start) / steps * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratios(times: dict[str, list[float]], name: str, base: str) -> tuple[float, float, float]:
    """Median and quartiles of the per-round ratio of two ways: noise that both saw cancels."""
    each = sorted(a / b for a, b in zip(times[name], times[base], strict=True))
    q = statistics.quantiles(each, n=4) if len(each) > 1 else [each[0]] * 3
    return statistics.median(each), q[0], q[2]


def conditions(device: torch.device) -> dict[str, Any]:
    """Device, versions, threads, command and commit of a measurement."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    asked = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=False).stdout
    return {
        "device": name, "torch": torch.__version__, "python": platform.python_version(), "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(), "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]), "commit": commit.strip() or None,
    }  # fmt: skip


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )
    return f"{model}, {torch.get_num_threads()} threads"


def write(path: str | None, result: dict[str, Any]) -> None:
    """The result as JSON, where a path is given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}")
