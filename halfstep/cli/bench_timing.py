"""Times training steps of one network in several precisions, in turns, so load hits them all."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.cli.bench import BARE_TORCH
from halfstep.experiment.build import load_network
from halfstep.experiment.settings import Settings
from halfstep.precision import Precision
from halfstep.step import TrainStep

ROUND_S = 0.05  # length of a round: long enough for the clock, short enough to take turns
WARMUP_CALLS = 2  # the first calls choose kernels; the next two estimate the time of a call
MIN_ROUNDS = 3  # quartiles need some values, however short the time
LEARNING_RATE = 1e-3

Step = Callable[[], object]


def time_steps(
    settings: Settings, input_shape: tuple[int, ...], seconds: float
) -> tuple[list[dict[str, Any]], int]:
    """Times bare torch and every precision. Returns a row of figures for each, and the rounds."""
    device = settings.torch_device
    inputs = torch.randn(settings.batch, *input_shape, device=device)
    targets = _random_targets(_build_net(settings), inputs)

    steps = {BARE_TORCH: _bare_torch_step(_build_net(settings), inputs, targets)}
    for precision in settings.precisions:
        steps[precision] = _halfstep_step(_build_net(settings), inputs, targets, precision)

    times_ms = _time_in_turns(steps, seconds, device)
    reference_ms = times_ms.get("fp32")
    rows = [_row(name, times_ms[name], reference_ms, settings.batch) for name in times_ms]
    return rows, len(times_ms[BARE_TORCH])


def _build_net(settings: Settings) -> nn.Module:
    """The network, with the same weights on every call."""
    torch.manual_seed(0)
    return load_network(settings.net).to(settings.torch_device)


def _random_targets(net: nn.Module, inputs: Tensor) -> Tensor:
    """Random labels, as many classes as the network has outputs; for a single output, numbers."""
    try:
        with torch.no_grad():
            outputs = net(inputs)
    except Exception as error:
        shape = " × ".join(map(str, inputs.shape[1:]))
        raise ValueError(
            f"net: it does not take inputs of {shape}: {type(error).__name__}: {error}. "
            "Say what it takes: --shape 3,32,32"
        ) from error
    class_count = outputs.shape[-1]
    if class_count == 1:
        return torch.randn_like(outputs)
    return torch.randint(0, class_count, (len(inputs),), device=inputs.device)


def _loss_for(targets: Tensor) -> nn.Module:
    if targets.is_floating_point():
        return nn.MSELoss()
    return nn.CrossEntropyLoss()


def _bare_torch_step(net: nn.Module, inputs: Tensor, targets: Tensor) -> Step:
    """The loop that one would write without halfstep."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    loss_fn = _loss_for(targets)

    def step() -> object:
        optimizer.zero_grad()
        loss = loss_fn(net(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _halfstep_step(net: nn.Module, inputs: Tensor, targets: Tensor, precision: str) -> Step:
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    step = TrainStep(
        net, _loss_for(targets), optimizer, precision=Precision.parse(precision), nonfinite="ignore"
    )
    return lambda: step(inputs, targets)


def _time_in_turns(
    steps: dict[str, Step], seconds: float, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of a step, one figure for each round, until the time is over."""
    # How many steps make a round.
    round_steps = {}
    for name, step in steps.items():
        _mean_seconds(step, WARMUP_CALLS, device)
        step_s = _mean_seconds(step, WARMUP_CALLS, device)
        round_steps[name] = max(1, round(ROUND_S / step_s))

    times_ms: dict[str, list[float]] = {name: [] for name in steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times_ms[BARE_TORCH]) < MIN_ROUNDS:
        for name, step in steps.items():
            times_ms[name].append(1e3 * _mean_seconds(step, round_steps[name], device))
    return times_ms


def _mean_seconds(step: Step, count: int, device: torch.device) -> float:
    """The mean time of `count` calls, all their kernels included."""
    wait_for_device(device)
    start = time.perf_counter()
    for _ in range(count):
        step()
    wait_for_device(device)
    return (time.perf_counter() - start) / count


def wait_for_device(device: torch.device) -> None:
    """Returns when every kernel launched so far has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _row(
    name: str, times_ms: list[float], fp32_ms: list[float] | None, batch_size: int
) -> dict[str, Any]:
    """The figures of one way: quartiles, throughput, and the ratio to fp32.

    The ratio is that of the medians, so that the figures of the table agree. Its quartiles are
    those of the ratios by round: ways take turns, so these say whether a lead is sure where other
    load comes and goes.
    """
    low, median, high = statistics.quantiles(times_ms, n=4)
    ratio = None
    ratio_quartiles = None
    if fp32_ms is not None:
        ratio = median / statistics.median(fp32_ms)
        ratios = [a / b for a, b in zip(times_ms, fp32_ms, strict=True)]
        low_ratio, _, high_ratio = statistics.quantiles(ratios, n=4)
        ratio_quartiles = [low_ratio, high_ratio]
    return {
        "way": name,
        "ms": median,
        "quartiles": [low, high],
        "samples_per_s": 1e3 * batch_size / median,
        "ratio": ratio,
        "ratio_quartiles": ratio_quartiles,
    }
