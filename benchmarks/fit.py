"""What `fit` costs over a bare PyTorch loop: silent, with its bar drawing, with five callbacks too.

    python benchmarks/fit.py [--rounds 15] [--steps 300] [--json benchmarks/results/fit-cpu.json]

The benchmark MLP, batch 64. Both go over the same batches in memory; rounds take turns. The bar
draws on a pseudo-terminal.
"""

import argparse
import os
import pty
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import torch
from measure import compare_rounds, conditions, rotate, wait_for_device, write_result
from torch import Tensor, nn

import halfstep as hs

BATCH_SIZE = 64
DIFFERENT_BATCHES = 20  # they are repeated until there are as many as steps

Batches = list[tuple[Tensor, Tensor]]
Epoch = Callable[[], object]


def build_mlp(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return hs.nets.mlp().to(device)


def bare_epoch(batches: Batches, device: torch.device) -> Epoch:
    """The loop everybody writes, in fp32, with the mean loss read once at its end."""
    net = build_mlp(device)
    loss_fn = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def epoch() -> object:
        loss_sum = torch.zeros((), device=device)
        for x, y in batches:
            optimizer.zero_grad()
            loss = loss_fn(net(x), y)
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach()
        return loss_sum.item()

    return epoch


def fit_epoch(
    batches: Batches, device: torch.device, folder: Path, *, progress: bool, with_callbacks: bool
) -> Epoch:
    net = build_mlp(device)
    model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=1e-3))
    log_numbers = iter(range(10**6))

    def epoch() -> object:
        callbacks = [
            hs.LossMonitor(100),
            hs.TimeMonitor(),
            hs.History(),
            hs.LRMonitor(show=False),
            hs.JSONLLog(folder / f"{next(log_numbers)}.jsonl"),
            hs.ProgressBar(),  # `fit` adds none beside LossMonitor
        ]
        with redirect_stdout(open(os.devnull, "w")):
            return model.fit(
                1, batches, callbacks=callbacks if with_callbacks else (), progress=progress
            )

    return epoch


def redirect_errors_to_terminal() -> None:
    """Standard error becomes a pseudo-terminal, so that the bar draws."""
    leader, follower = pty.openpty()
    os.dup2(follower, 2)
    os.environ.setdefault("TERM", "xterm")

    def drain() -> None:
        while os.read(leader, 65536):
            pass

    threading.Thread(target=drain, daemon=True).start()
    assert sys.stderr.isatty()


def time_epochs(
    ways: dict[str, Epoch], rounds: int, steps: int, device: torch.device
) -> dict[str, list[float]]:
    """Milliseconds of a step of each way, round by round; a first round warms up."""
    times_ms: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(rounds + 1):
        for name in rotate(list(ways), round_number):
            start = time.perf_counter()
            ways[name]()
            wait_for_device(device)
            if round_number > 0:
                times_ms[name].append((time.perf_counter() - start) / steps * 1e3)
    return times_ms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    device = torch.device(args.device)
    batches: Batches = []
    for _ in range(DIFFERENT_BATCHES):
        x = torch.randn(BATCH_SIZE, 1, 28, 28, device=device)
        y = torch.randint(0, 10, (BATCH_SIZE,), device=device)
        batches.append((x, y))
    batches = (batches * (args.steps // DIFFERENT_BATCHES + 1))[: args.steps]

    redirect_errors_to_terminal()
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "bare": bare_epoch(batches, device),
            "fit, silent": fit_epoch(
                batches, device, Path(folder), progress=False, with_callbacks=False
            ),
            "fit": fit_epoch(batches, device, Path(folder), progress=True, with_callbacks=False),
            "fit, 5 callbacks and bar": fit_epoch(
                batches, device, Path(folder), progress=True, with_callbacks=True
            ),
        }
        times_ms = time_epochs(ways, args.rounds, args.steps, device)

    shown = compare_rounds(times_ms, "fit", "fit, silent")
    print(f"the bar of fit: {shown.median:.3f} × silent ({shown.low:.3f}–{shown.high:.3f})")
    rows = []
    for name in ways:
        step_ms = statistics.median(times_ms[name])
        ratio = compare_rounds(times_ms, name, "bare")
        print(
            f"{name:28} {step_ms:8.4f} ms/step  {ratio.median:6.3f} × bare  "
            f"({ratio.low:.3f}–{ratio.high:.3f})"
        )
        rows.append(
            {
                "way": name,
                "ms": step_ms,
                "ratio": ratio.median,
                "quartiles": [ratio.low, ratio.high],
            }
        )
    result = {
        "conditions": conditions(device),
        "rounds": args.rounds,
        "steps": args.steps,
        "rows": rows,
    }
    write_result(args.json, result)


if __name__ == "__main__":
    main()
