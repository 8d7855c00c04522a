"""The seed MLP on a CPU beside its floor and its peers: one epoch of Fashion-MNIST, batch 64, SGD.

    python benchmarks/cpu.py [--rounds 9] [--steps 938] [--json benchmarks/results/cpu.json] [--only "floor;torch"]

The floor is the GEMMs of forward and backward and the SGD axpy alone, into buffers that are used again. Each way is a
process of its own, since malloc's thresholds are a process's; they take turns, and ratios are taken round by round.
"""

import argparse
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import conditions, ratios, write
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine.memory import kept
from halfstep.model import Model

Batches = list[tuple[Tensor, Tensor]]
Epoch = Callable[[Batches], object]
LR = 1e-3
PEERS = {"Lightning": "lightning", "Accelerate": "accelerate"}


def store(folder: Path, steps: int) -> None:
    """Fashion-MNIST in order, as float batches on disk; the shipped sample over and over where it is all there is."""
    with warnings.catch_warnings(action="ignore", category=hs.Notice):
        images, labels = next(iter(hs.data.load("fashion-mnist").batch(1 << 20)))
    rows = torch.arange(min(64 * steps, max(60000, len(labels)))) % len(labels)
    np.save(folder / "x.npy", (images.view(-1, 1, 28, 28)[rows].float() / 255).numpy())
    np.save(folder / "y.npy", labels[rows].numpy())


def batches(folder: Path, steps: int) -> Batches:
    """Mapped, not read: what a process has freed before its first step decides what malloc does in it."""
    x, y = (torch.from_numpy(np.load(folder / f"{name}.npy", mmap_mode="c")) for name in "xy")
    return list(zip(x.split(64), y.split(64), strict=True))[:steps]


def parts() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = hs.nets.mlp()
    return net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=LR)


def floor() -> Epoch:
    """Eight products and p -= lr·g, with nothing allocated and nothing else done."""
    sizes = [(784, 512), (512, 512), (512, 10)]
    weights, biases = (
        [torch.randn(n, m) * 0.01 for m, n in sizes],
        [torch.zeros(n) for _, n in sizes],
    )
    grads, bias_grads = (
        [torch.empty_like(w) for w in weights],
        [torch.zeros_like(b) for b in biases],
    )
    outs, downs = [torch.empty(64, n) for _, n in sizes], [torch.empty(64, m) for m, _ in sizes]
    up = torch.randn(64, 10) * 1e-3

    def epoch(data: Batches) -> None:
        for x, _ in data:
            x, n = x.view(len(x), 784), len(x)
            ins = [x, outs[0][:n], outs[1][:n]]
            for i in range(3):
                torch.addmm(biases[i], ins[i], weights[i].t(), out=outs[i][:n])
            down = up[:n]
            for i in (2, 1, 0):
                torch.mm(down.t(), ins[i], out=grads[i])
                if i:
                    down = torch.mm(down, weights[i], out=downs[i][:n])
            torch._foreach_add_([*weights, *biases], [*grads, *bias_grads], alpha=-LR)

    return torch.no_grad()(epoch)


def bare(*, compiled: bool = False, keeps: bool = False, accelerates: bool = False) -> Epoch:
    """The loop everybody writes."""
    net, loss_fn, optimizer = parts()
    backward = Tensor.backward
    if accelerates:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        net, optimizer = accelerator.prepare(net, optimizer)
        backward = accelerator.backward
    forward = torch.compile(net) if compiled else net

    def epoch(data: Batches) -> object:
        total = torch.zeros(())
        with kept() if keeps else nullcontext():
            for x, y in data:
                optimizer.zero_grad()
                loss = loss_fn(forward(x), y)
                backward(loss)
                optimizer.step()
                total += loss.detach()
        return total.item()

    return epoch


def lightning() -> Epoch:
    import logging

    from lightning import LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    net, loss_fn, optimizer = parts()

    class Loader(list[tuple[Tensor, Tensor]]):  # a plain list is several loaders there
        pass

    class Cell(LightningModule):
        def training_step(self, batch: Any, _: int) -> Tensor:
            return loss_fn(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    def epoch(data: Batches) -> None:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, **quiet).fit(
            cell, Loader(data)
        )

    cell = Cell()
    cell.net = net
    return epoch


def fit(precision: str = "fp32", *, shuffled: bool = False, **options: Any) -> Epoch:
    """halfstep over the same list of batches; `shuffled`: over a data set of its own, in a new order each epoch."""
    net, loss_fn, optimizer = parts()
    model = Model(net, loss_fn, optimizer, precision, **options)
    made: list[Any] = []

    def epoch(data: Batches) -> object:
        if shuffled and not made:
            made.append(
                hs.data.Dataset(tuple(map(torch.cat, zip(*data, strict=True)))).shuffle().batch(64)
            )
        return model.fit(1, made[0] if made else data)

    return epoch


WAYS: dict[str, Callable[[], Epoch]] = {
    "floor": floor,
    "torch": bare,
    "torch inside kept()": lambda: bare(keeps=True),
    "torch compiled": lambda: bare(compiled=True),
    "Lightning": lightning,
    "Accelerate": lambda: bare(accelerates=True),
    "halfstep": fit,
    "halfstep compiled": lambda: fit(compile=True),
    "halfstep, Dataset shuffled": lambda: fit(shuffled=True),
    "halfstep compiled, Dataset shuffled": lambda: fit(compile=True, shuffled=True),
    "halfstep fp16": lambda: fit("fp16"),
    "halfstep O1": lambda: fit("O1"),
    "halfstep O2": lambda: fit("O2"),
}


def work(name: str, folder: Path, args: argparse.Namespace) -> None:
    """A way's process: an epoch for every line that comes, after two to warm up."""
    torch.set_num_threads(args.threads)
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    data, epoch = batches(folder, args.steps), WAYS[name]()
    for _ in range(2):  # programs are compiled for what has come some 20 times
        epoch(data)
    print("ready", flush=True)
    for _ in sys.stdin:
        faults, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, clock()
        epoch(data)
        seconds, faults = (
            clock() - start,
            resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults,
        )
        print(json.dumps([seconds, faults / args.steps]), flush=True)


def start(name: str, folder: str) -> subprocess.Popen[str] | None:
    """The way's process, warm; None, with a word, where it cannot run here."""
    if name in PEERS and importlib.util.find_spec(PEERS[name]) is None:
        return print(f"{name}: not installed, left out")
    command = [sys.executable, *sys.argv, "--way", name, "--folder", folder]
    with open(Path(folder) / "errors", "w+") as errors:
        process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        if process.stdout.readline().strip() == "ready":
            return process
        process.communicate()
        errors.seek(0)
        return print(
            f"{name}: left out, {(errors.read().strip().splitlines() or ['it ended'])[-1]}"
        )


def measure(names: list[str], rounds: int, steps: int) -> dict[str, list[list[float]]]:
    """Seconds, and faults a step, of every way, round by round."""
    with tempfile.TemporaryDirectory() as folder:
        store(Path(folder), steps)
        ways = {name: process for name in names if (process := start(name, folder)) is not None}
    taken: dict[str, list[list[float]]] = {name: [] for name in ways}
    for r in range(rounds):
        for name in sorted(ways, key=lambda name: (list(ways).index(name) - r) % len(ways)):
            print(file=ways[name].stdin, flush=True)
            taken[name].append(json.loads(ways[name].stdout.readline()))
    for process in ways.values():
        process.communicate()
    return taken


def table(taken: dict[str, list[list[float]]]) -> list[dict[str, Any]]:
    seconds, rows = {name: [s for s, _ in each] for name, each in taken.items()}, []
    print(f"{'way':36} {'s':>7} {'faults/step':>12} {'× floor':>20} {'× torch':>20}")
    for name, each in taken.items():
        middle = [statistics.median(column) for column in zip(*each, strict=True)]
        row: dict[str, Any] = {"way": name, "seconds": middle[0], "faults_per_step": middle[1]}
        shown = ""
        for base in {"floor", "torch", "halfstep"} & set(seconds):
            ratio, low, high = ratios(seconds, name, base)
            row[f"to_{base}"] = {"median": ratio, "quartiles": [low, high]}
        for r in (row[f"to_{base}"] for base in ("floor", "torch") if base in seconds):
            shown += f"  {r['median']:6.2f} ({r['quartiles'][0]:.2f}–{r['quartiles'][1]:.2f})"
        print(f"{name:36} {row['seconds']:7.3f} {row['faults_per_step']:12.1f} {shown}")
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=938)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: for one thread on a busy machine",
    )
    parser.add_argument("--only", help="ways, by semicolons")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.way:
        return work(args.way, args.folder, args)
    rows = table(
        measure(args.only.split(";") if args.only else list(WAYS), args.rounds, args.steps)
    )
    shape = {"rounds": args.rounds, "steps": args.steps, "clock": args.clock}
    write(args.json, {"conditions": conditions(torch.device("cpu")), **shape, "rows": rows})


if __name__ == "__main__":
    main()
