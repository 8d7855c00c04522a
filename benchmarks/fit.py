"""What `fit` costs over a bare PyTorch loop, with five callbacks and the progress bar drawing: the seed MLP, batch 64.

    python benchmarks/fit.py [--rounds 15] [--steps 300] [--json benchmarks/results/fit-cpu.json]

Both go over the same batches in memory; rounds take turns. The bar draws on a pseudo-terminal.
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
from measure import conditions, ratios, write
from torch import Tensor, nn

import halfstep as hs
from halfstep import callbacks as cb
from halfstep.model import Model

Batches = list[tuple[Tensor, Tensor]]


def mlp(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return hs.nets.mlp().to(device)


def bare(batches: Batches, device: torch.device) -> Callable[[], object]:
    """The loop everybody writes, in fp32, with the mean loss read once at its end."""
    net, loss_fn = mlp(device), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def epoch() -> object:
        total = torch.zeros((), device=device)
        for x, y in batches:
            optimizer.zero_grad()
            loss = loss_fn(net(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
        return total.item()

    return epoch


def fitted(
    batches: Batches, device: torch.device, folder: Path, *, callbacks: bool
) -> Callable[[], object]:
    net = mlp(device)
    model = Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=1e-3))
    count = iter(range(10**6))

    def epoch() -> object:
        five = [
            cb.LossMonitor(100), cb.TimeMonitor(), cb.History(), cb.LRMonitor(show=False),
            cb.JSONLLog(folder / f"{next(count)}.jsonl"), cb.ProgressBar(),
        ]  # fmt: skip
        with redirect_stdout(open(os.devnull, "w")):
            return model.fit(1, batches, callbacks=five if callbacks else ())

    return epoch


def on_a_terminal() -> None:
    """Standard error becomes a pseudo-terminal, so that the bar draws."""
    leader, follower = pty.openpty()
    os.dup2(follower, 2)
    os.environ.setdefault("TERM", "xterm")
    threading.Thread(
        target=lambda: [None for _ in iter(lambda: os.read(leader, 65536), b"")], daemon=True
    ).start()
    assert sys.stderr.isatty()


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
    batches = [
        (torch.randn(64, 1, 28, 28, device=device), torch.randint(0, 10, (64,), device=device))
        for _ in range(20)
    ]
    batches = (batches * (args.steps // 20 + 1))[: args.steps]
    on_a_terminal()
    with tempfile.TemporaryDirectory() as folder:
        ways = {
            "bare": bare(batches, device),
            "fit": fitted(batches, device, Path(folder), callbacks=False),
            "fit, 5 callbacks and bar": fitted(batches, device, Path(folder), callbacks=True),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for r in range(args.rounds + 1):
            names = list(ways)
            for name in names[r % 3 :] + names[: r % 3]:
                start = time.perf_counter()
                ways[name]()
                if device.type == "cuda":
                    torch.cuda.synchronize()
                if r:
                    times[name].append((time.perf_counter() - start) / args.steps * 1e3)
    rows = []
    for name, each in times.items():
        middle, low, high = ratios(times, name, "bare")
        print(
            f"{name:28} {statistics.median(each):8.4f} ms/step  {middle:6.3f} × bare  ({low:.3f}–{high:.3f})"
        )
        rows.append(
            {"way": name, "ms": statistics.median(each), "ratio": middle, "quartiles": [low, high]}
        )
    write(
        args.json,
        {
            "conditions": conditions(device),
            "rounds": args.rounds,
            "steps": args.steps,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
