"""Times several ways to do the same work side by side, and notes the conditions they ran under."""

import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

Work = Callable[[], object]

MIN_WARMUP_CALLS = 20


class RatioQuartiles(NamedTuple):
    median: float
    low: float
    high: float


def time_in_turns(
    ways: dict[str, Work], *, rounds: int, steps: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of a call of each way, one figure per round.

    The ways take turns, so a slow moment hits them all. Another one begins each round.
    """
    for work in ways.values():
        for _ in range(max(MIN_WARMUP_CALLS, steps // 4)):
            work()
    times_ms: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(rounds):
        for name in rotate(list(ways), round_number):
            times_ms[name].append(_mean_ms(ways[name], steps, device))
    return times_ms


def rotate(names: list[str], count: int) -> list[str]:
    """The names in the same circular order, begun `count` places later."""
    start = count % len(names)
    return names[start:] + names[:start]


def _mean_ms(work: Work, steps: int, device: torch.device) -> float:
    wait_for_device(device)
    start = time.perf_counter()
    for _ in range(steps):
        work()
    wait_for_device(device)
    return (time.perf_counter() - start) / steps * 1e3


def wait_for_device(device: torch.device) -> None:
    """Returns when every kernel launched so far has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compare_rounds(times: dict[str, list[float]], name: str, base: str) -> RatioQuartiles:
    """Median and quartiles of a ratio, round by round: noise that both ways saw cancels."""
    ratios = sorted(a / b for a, b in zip(times[name], times[base], strict=True))
    if len(ratios) == 1:
        return RatioQuartiles(ratios[0], ratios[0], ratios[0])
    low, _, high = statistics.quantiles(ratios, n=4)
    return RatioQuartiles(statistics.median(ratios), low, high)


def conditions(device: torch.device) -> dict[str, Any]:
    """Device, versions, threads, command and commit of a measurement."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "commit": git.stdout.strip() or None,
    }


def _cpu_name() -> str:
    name = platform.processor()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text().splitlines():
            if line.startswith("model name"):
                name = line.split(":")[1].strip()
                break
    return f"{name}, {torch.get_num_threads()} threads"


def write_result(path: str | None, result: dict[str, Any]) -> None:
    """Writes the result as JSON, where a path is given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}")
