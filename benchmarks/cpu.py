"""The benchmark MLP on a CPU beside its floor and its peers: one epoch of Fashion-MNIST, batch 64.

    python benchmarks/cpu.py [--rounds 9] [--steps 938] [--json benchmarks/results/cpu.json]
                             [--only "floor;torch"]

The floor is the GEMMs of forward and backward and the SGD axpy alone, into buffers that are used
again. Each way is a process of its own, since malloc's thresholds are a process's; they take turns,
and ratios are taken round by round.
"""

import argparse
import importlib.util
import json
import logging
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from measure import compare_rounds, conditions, rotate, write_result
from torch import Tensor, nn

import halfstep as hs

BATCH_SIZE = 64
LEARNING_RATE = 1e-3
FULL_SAMPLES = 60_000
WARMUP_EPOCHS = 2  # programs are compiled for what has come some 20 times
LAYER_SIZES = [(784, 512), (512, 512), (512, 10)]  # inputs, outputs

# Ways that need a package.
PACKAGES = {"Lightning": "lightning", "Accelerate": "accelerate"}

READY_LINE = "ready"

Batches = list[tuple[Tensor, Tensor]]
Epoch = Callable[[Batches], object]


class Measurement(NamedTuple):
    """One epoch."""

    seconds: float
    faults_per_step: float  # page faults


# Data.


def store_data(folder: Path, steps: int) -> None:
    """Writes Fashion-MNIST as floats, in order.

    Where the shipped sample is all there is, it is repeated.
    """
    with warnings.catch_warnings(action="ignore", category=hs.Notice):
        images, labels = next(iter(hs.data.load("fashion-mnist").batch(1 << 20)))
    count = min(BATCH_SIZE * steps, max(FULL_SAMPLES, len(labels)))
    indices = torch.arange(count) % len(labels)
    np.save(folder / "x.npy", (images.view(-1, 1, 28, 28)[indices].float() / 255).numpy())
    np.save(folder / "y.npy", labels[indices].numpy())


def load_batches(folder: Path, steps: int) -> Batches:
    """The batches, mapped and not read.

    What a process has freed before its first step decides what malloc does in it.
    """
    x = torch.from_numpy(np.load(folder / "x.npy", mmap_mode="c"))
    y = torch.from_numpy(np.load(folder / "y.npy", mmap_mode="c"))
    return list(zip(x.split(BATCH_SIZE), y.split(BATCH_SIZE), strict=True))[:steps]


# Ways to train an epoch.


def build_parts() -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = hs.nets.mlp()
    return net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)


def floor_epoch() -> Epoch:
    """Eight products and p -= lr·g, with nothing allocated and nothing else done."""
    weights = [torch.randn(n, m) * 0.01 for m, n in LAYER_SIZES]
    biases = [torch.zeros(n) for _, n in LAYER_SIZES]
    weight_grads = [torch.empty_like(weight) for weight in weights]
    bias_grads = [torch.zeros_like(bias) for bias in biases]
    output_buffers = [torch.empty(BATCH_SIZE, n) for _, n in LAYER_SIZES]
    grad_buffers = [torch.empty(BATCH_SIZE, m) for m, _ in LAYER_SIZES]
    loss_grad = torch.randn(BATCH_SIZE, 10) * 1e-3

    def epoch(batches: Batches) -> None:
        for images, _ in batches:
            n = len(images)
            inputs = [images.view(n, 784), output_buffers[0][:n], output_buffers[1][:n]]
            for i in range(3):
                torch.addmm(biases[i], inputs[i], weights[i].t(), out=output_buffers[i][:n])
            grad = loss_grad[:n]
            for i in (2, 1, 0):
                torch.mm(grad.t(), inputs[i], out=weight_grads[i])
                if i:
                    grad = torch.mm(grad, weights[i], out=grad_buffers[i][:n])
            params = [*weights, *biases]
            grads = [*weight_grads, *bias_grads]
            torch._foreach_add_(params, grads, alpha=-LEARNING_RATE)

    return torch.no_grad()(epoch)


def torch_epoch(*, compiled: bool = False, use_accelerate: bool = False) -> Epoch:
    """The loop everybody writes."""
    net, loss_fn, optimizer = build_parts()
    backward = Tensor.backward
    if use_accelerate:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        net, optimizer = accelerator.prepare(net, optimizer)
        backward = accelerator.backward
    forward = torch.compile(net) if compiled else net

    def epoch(batches: Batches) -> object:
        loss_sum = torch.zeros(())
        for x, y in batches:
            optimizer.zero_grad()
            loss = loss_fn(forward(x), y)
            backward(loss)
            optimizer.step()
            loss_sum += loss.detach()
        return loss_sum.item()

    return epoch


def lightning_epoch() -> Epoch:
    from lightning import LightningModule, Trainer

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    net, loss_fn, optimizer = build_parts()

    # Lightning takes a plain list for several loaders.
    class Loader(list[tuple[Tensor, Tensor]]):
        pass

    class Classifier(LightningModule):
        def training_step(self, batch: Any, _: int) -> Tensor:
            return loss_fn(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    module = Classifier()
    module.net = net

    def epoch(batches: Batches) -> None:
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            enable_model_summary=False,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        trainer.fit(module, Loader(batches))

    return epoch


def halfstep_epoch(precision: str = "fp32", **options: Any) -> Epoch:
    """halfstep over the same list of batches."""
    net, loss_fn, optimizer = build_parts()
    model = hs.Model(net, loss_fn, optimizer, precision, **options)
    return lambda batches: model.fit(1, batches, progress=False)


def halfstep_shuffled_epoch(**options: Any) -> Epoch:
    """halfstep over a data set of its own, in a new order each epoch."""
    net, loss_fn, optimizer = build_parts()
    model = hs.Model(net, loss_fn, optimizer, "fp32", **options)
    data: hs.data.Dataset | None = None

    def epoch(batches: Batches) -> object:
        nonlocal data
        if data is None:
            x, y = (torch.cat(column) for column in zip(*batches, strict=True))
            data = hs.data.Dataset((x, y)).shuffle().batch(BATCH_SIZE)
        return model.fit(1, data, progress=False)

    return epoch


WAYS: dict[str, Callable[[], Epoch]] = {
    "floor": floor_epoch,
    "torch": torch_epoch,
    "torch compiled": lambda: torch_epoch(compiled=True),
    "Lightning": lightning_epoch,
    "Accelerate": lambda: torch_epoch(use_accelerate=True),
    "halfstep": halfstep_epoch,
    "halfstep compiled": lambda: halfstep_epoch(compile=True),
    "halfstep, Dataset shuffled": halfstep_shuffled_epoch,
    "halfstep compiled, Dataset shuffled": lambda: halfstep_shuffled_epoch(compile=True),
    "halfstep fp16": lambda: halfstep_epoch("fp16"),
    "halfstep O1": lambda: halfstep_epoch("O1"),
    "halfstep O2": lambda: halfstep_epoch("O2"),
}


# A process for each way.


def serve_way(name: str, folder: Path, args: argparse.Namespace) -> None:
    """In the process of a way: runs and times an epoch for every line that comes."""
    torch.set_num_threads(args.threads)
    clock = time.perf_counter if args.clock == "wall" else time.process_time
    batches = load_batches(folder, args.steps)
    epoch = WAYS[name]()
    for _ in range(WARMUP_EPOCHS):
        epoch(batches)
    print(READY_LINE, flush=True)
    for _ in sys.stdin:
        faults_before = count_page_faults()
        start = clock()
        epoch(batches)
        seconds = clock() - start
        faults = count_page_faults() - faults_before
        print(json.dumps([seconds, faults / args.steps]), flush=True)


def count_page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def start_way(name: str, folder: str) -> subprocess.Popen[str] | None:
    """The process of a way, warmed up; None, with a printed reason, where it cannot run here."""
    if name in PACKAGES and importlib.util.find_spec(PACKAGES[name]) is None:
        print(f"{name}: not installed, left out")
        return None
    command = [sys.executable, *sys.argv, "--way", name, "--folder", folder]
    with open(Path(folder) / "errors", "w+") as errors:
        process = subprocess.Popen(
            command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
        if process.stdout.readline().strip() == READY_LINE:
            return process
        process.communicate()
        errors.seek(0)
        lines = errors.read().strip().splitlines() or ["it ended"]
        print(f"{name}: left out, {lines[-1]}")
        return None


def measure_ways(names: list[str], rounds: int, steps: int) -> dict[str, list[Measurement]]:
    """An epoch of every way, round by round; another way begins each round."""
    processes = {}
    with tempfile.TemporaryDirectory() as folder:
        store_data(Path(folder), steps)
        for name in names:
            process = start_way(name, folder)
            if process is not None:
                processes[name] = process

    measurements: dict[str, list[Measurement]] = {name: [] for name in processes}
    for round_number in range(rounds):
        for name in rotate(list(processes), round_number):
            process = processes[name]
            print(file=process.stdin, flush=True)
            measurements[name].append(Measurement(*json.loads(process.stdout.readline())))
    for process in processes.values():
        process.communicate()
    return measurements


def summarize(measurements: dict[str, list[Measurement]]) -> list[dict[str, Any]]:
    """Prints the table. Returns its rows."""
    seconds = {name: [m.seconds for m in epochs] for name, epochs in measurements.items()}
    rows = []
    print(f"{'way':36} {'s':>7} {'faults/step':>12} {'× floor':>20} {'× torch':>20}")
    for name, epochs in measurements.items():
        row: dict[str, Any] = {
            "way": name,
            "seconds": statistics.median(seconds[name]),
            "faults_per_step": statistics.median(m.faults_per_step for m in epochs),
        }
        ratios_text = ""
        for base in ("floor", "torch", "halfstep"):
            if base not in seconds:
                continue
            ratio = compare_rounds(seconds, name, base)
            row[f"to_{base}"] = {"median": ratio.median, "quartiles": [ratio.low, ratio.high]}
            if base != "halfstep":
                ratios_text += f"  {ratio.median:6.2f} ({ratio.low:.2f}–{ratio.high:.2f})"
        print(f"{name:36} {row['seconds']:7.3f} {row['faults_per_step']:12.1f} {ratios_text}")
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
        serve_way(args.way, args.folder, args)
        return
    names = args.only.split(";") if args.only else list(WAYS)
    rows = summarize(measure_ways(names, args.rounds, args.steps))
    result = {
        "conditions": conditions(torch.device("cpu")),
        "rounds": args.rounds,
        "steps": args.steps,
        "clock": args.clock,
        "rows": rows,
    }
    write_result(args.json, result)


if __name__ == "__main__":
    main()
