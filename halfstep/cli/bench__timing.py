"""Steps of one network in several precisions, timed by turns."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import nets
from halfstep.experiment.settings import Settings
from halfstep.step import TrainStep

_BARE = "torch, fp32"
_ROUND_S = 0.05  # long enough for the clock, short enough for turns
_LR = 1e-3
Work = Callable[[], object]


def measure(
    settings: Settings, shape: tuple[int, ...], seconds: float
) -> tuple[list[dict[str, Any]], int]:
    """A row per way, and the number of rounds."""
    device = settings.place
    x = torch.randn(settings.batch, *shape, device=device)
    y = _labels(_net(settings), x)
    ways: dict[str, Work] = {_BARE: _bare(_net(settings), x, y)}
    for name in settings.precisions:
        ways[name] = _step(_net(settings), x, y, name)
    times = _turns(ways, seconds, device)
    base = times.get("fp32")
    rows = [_row(name, each, base, settings.batch) for name, each in times.items()]
    return rows, len(times[_BARE])


def _net(settings: Settings) -> nn.Module:
    torch.manual_seed(0)
    return nets.load(settings.net).to(settings.place)


def _labels(net: nn.Module, x: Tensor) -> Tensor:
    """As many classes as the network has outputs; a single output is a number to be met."""
    try:
        with torch.no_grad():
            out = net(x)
    except Exception as error:
        shape = " × ".join(map(str, x.shape[1:]))
        came = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"net: it does not take inputs of {shape}: {came}. Say what it takes: --shape 3,32,32"
        ) from error
    if out.shape[-1] == 1:
        return torch.randn_like(out)
    return torch.randint(0, out.shape[-1], (len(x),), device=x.device)


def _loss(y: Tensor) -> nn.Module:
    return nn.MSELoss() if y.is_floating_point() else nn.CrossEntropyLoss()


def _bare(net: nn.Module, x: Tensor, y: Tensor) -> Work:
    optimizer, loss_fn = torch.optim.SGD(net.parameters(), lr=_LR), _loss(y)

    def step() -> object:
        optimizer.zero_grad()
        loss = loss_fn(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _step(net: nn.Module, x: Tensor, y: Tensor, name: str) -> Work:
    optimizer = torch.optim.SGD(net.parameters(), lr=_LR)
    step = TrainStep(net, _loss(y), optimizer, precision=name, nonfinite="ignore")
    return lambda: step(x, y)


def _turns(ways: dict[str, Work], seconds: float, device: torch.device) -> dict[str, list[float]]:
    """Milliseconds per call, round by round, until the time is over; three rounds at least."""
    counts = {name: _count(work, device) for name, work in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[_BARE]) < 3:
        for name, work in ways.items():
            times[name].append(1e3 * _time(work, counts[name], device))
    return times


def _count(work: Work, device: torch.device) -> int:
    """How many calls make a round; the first ones choose kernels, and are not counted."""
    _time(work, 2, device)
    return max(1, round(_ROUND_S / _time(work, 2, device)))


def _time(work: Work, count: int, device: torch.device) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(count):
        work()
    _wait(device)
    return (time.perf_counter() - start) / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(name: str, times: list[float], base: list[float] | None, batch: int) -> dict[str, Any]:
    low, middle, high = statistics.quantiles(times, n=4)
    ratio = statistics.median(a / b for a, b in zip(times, base, strict=True)) if base else None
    return {
        "way": name,
        "ms": middle,
        "quartiles": [low, high],
        "samples_per_s": 1e3 * batch / middle,
        "ratio": ratio,
    }
