"""One MLP, the same seed and batch order, in several precisions: `python -m halfstep.demo`."""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import halfstep as hs
from halfstep.data import read_split, sample

BATCH = 64
LR = 0.005  # small on purpose: many updates fall below half a unit in the last place of an fp16 weight
HEADER = ("precision", "ms/step", "test loss", "accuracy", "skipped", "final scale")


@dataclass(frozen=True)
class Split:
    """A data set on the device, whole."""

    images: Tensor
    labels: Tensor

    def batches(self, order: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Float32 images in 0..1 and labels, in the given order; the last batch may be short."""
        for indices in torch.split(order.to(self.labels.device), BATCH):
            yield self.images[indices].float() / 255, self.labels[indices]


@dataclass(frozen=True)
class Score:
    """What one evaluation of the test split found."""

    loss: float
    accuracy: float


@dataclass(frozen=True)
class Result:
    """One row of the final table."""

    precision: str
    ms_per_step: float
    score: Score
    skipped: int
    scale: float

    def cells(self) -> tuple[str, ...]:
        scale = "-" if self.scale == 1 else f"{self.scale:g}"
        score = (f"{self.score.loss:.4f}", f"{self.score.accuracy:.2%}")
        return self.precision, f"{self.ms_per_step:.2f}", *score, str(self.skipped), scale


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def train(precision: str, train_data: Split, test_data: Split, *, epochs: int, seed: int) -> Result:
    """Train from `seed` and report; the step time is that of the fastest epoch, least disturbed by other load."""
    torch.manual_seed(seed)
    net = mlp().to(train_data.images.device)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=LR), precision=precision)
    orders = torch.Generator().manual_seed(seed)
    times, skipped = [], 0
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        order = torch.randperm(len(train_data.labels), generator=orders)
        records = [step(x, y) for x, y in train_data.batches(order)]
        step.flush()
        skipped += int(torch.stack([record.skipped for record in records]).sum())  # waits for the device
        times.append(1e3 * (time.perf_counter() - start) / len(records))
        score = measure(step.evaluator(), test_data)
        line = f"{precision:>5}  epoch {epoch:>2}/{epochs}  loss {score.loss:.4f}  accuracy {score.accuracy:.2%}"
        print(line, flush=True)
    return Result(precision, min(times), score, skipped, float(records[-1].scale))


def measure(evaluate: hs.EvalStep, data: Split) -> Score:
    """Mean loss and accuracy over all samples: batches count by their size."""
    loss = correct = torch.zeros((), device=data.labels.device)
    for x, y in data.batches(torch.arange(len(data.labels))):
        out = evaluate(x, y)
        loss = loss + out.loss * len(y)
        correct = correct + (out.outputs.argmax(1) == y).sum()
    return Score(float(loss) / len(data.labels), float(correct) / len(data.labels))


def show(results: list[Result]) -> None:
    """The table, drawn by rich on a terminal that has it, as plain columns anywhere else."""
    rows = [result.cells() for result in results]
    if not (sys.stdout.isatty() and _show_rich(rows)):
        widths = [max(map(len, column)) for column in zip(HEADER, *rows, strict=True)]
        for row in (HEADER, *rows):
            print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _show_rich(rows: list[tuple[str, ...]]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    table = Table()
    for name in HEADER:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    return True


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m halfstep.demo", description=__doc__)
    parser.add_argument("--epochs", type=_positive, default=15, help="passes over the data (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the batch order (default: %(default)s)")
    parser.add_argument(
        "--precisions", type=_names, default="fp32,fp16,O1", help="separated by commas (default: %(default)s)"
    )
    parser.add_argument("--data", type=Path, help="folder with MNIST-family idx files (default: the shipped sample)")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, received {value}")
    return value


def _names(text: str) -> list[str]:
    """The names as given; one that is no precision is refused before anything is trained."""
    names = [name.strip() for name in text.split(",")]
    try:
        return [name for name in names if hs.Precision(name)]
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pairs = [read_split(args.data, train=part) if args.data else sample(part) for part in (True, False)]
    train_data, test_data = (Split(images.to(device), labels.to(device)) for images, labels in pairs)
    print(f"MLP 784-512-512-10, {len(train_data.labels):,} training images, batch {BATCH}, SGD {LR}, seed {args.seed}")
    print(f"torch {torch.__version__} on {device} with {torch.get_num_threads()} CPU threads")
    results = [train(name, train_data, test_data, epochs=args.epochs, seed=args.seed) for name in args.precisions]
    print()
    show(results)
    print("ms/step: mean of the fastest epoch, batch preparation included")


if __name__ == "__main__":
    main()
