"""What storing weights in float16 costs, and what rounding well gives back.

    python benchmarks/rounding.py [--device cuda] [--epochs 5] [--data DIR] [--json FILE]

The benchmark MLP on full Fashion-MNIST: batch 64, SGD with learning rate 1e-3, one seed, the same
order for every precision, as in the torch-tpu guide's table.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from measure import conditions, write_result
from torch import Tensor, nn

import halfstep as hs
from halfstep.data import read_split

BATCH_SIZE = 64
TEST_BATCH_SIZE = 1000
LEARNING_RATE = 1e-3
DEBIAN_FOLDER = "/usr/share/datasets/fashion-mnist"
WAYS = {
    "fp32": hs.Precision("fp32"),
    "O1": hs.Precision("O1"),
    "O2": hs.Precision("O2"),
    "fp16 nearest": hs.Precision("fp16"),
    "fp16 stochastic": hs.Precision("fp16", rounding="stochastic"),
    "fp16 kahan": hs.Precision("fp16", rounding="kahan"),
    "bf16 nearest": hs.Precision("bf16"),
    "bf16 kahan": hs.Precision("bf16", rounding="kahan"),
}

Split = tuple[Tensor, Tensor]


def load_split(folder: Path, device: torch.device, *, train: bool) -> Split:
    """Float images [N, 1, 28, 28] in 0..1 and labels, on the device."""
    images, labels = read_split(folder, train=train)
    return images.to(device).float().div_(255).unsqueeze(1), labels.to(device)


def build_mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def measure(
    precision: hs.Precision, train_split: Split, test_split: Split, epochs: int, seed: int
) -> dict[str, float]:
    """Accuracy in percent and mean loss on the test set, and the seconds that training took."""
    # Train.
    images, labels = train_split
    net = build_mlp(seed).to(images.device)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    step = hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, precision=precision)
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    for _ in range(epochs):
        order = torch.randperm(len(labels), generator=generator).to(images.device)
        for indices in order.split(BATCH_SIZE):
            step(images[indices], labels[indices])
    seconds = time.perf_counter() - start

    # Evaluate.
    test_images, test_labels = test_split
    evaluate = step.evaluator()
    correct = 0
    loss_sum = 0.0
    test_batches = zip(
        test_images.split(TEST_BATCH_SIZE), test_labels.split(TEST_BATCH_SIZE), strict=True
    )
    for x, y in test_batches:
        record = evaluate(x, y)
        correct += int((record.outputs.argmax(1) == y).sum())
        loss_sum += float(record.loss) * int(record.count)
    return {
        "accuracy": 100 * correct / len(test_labels),
        "loss": loss_sum / len(test_labels),
        "seconds": seconds,
        "skipped": int(step.state.skips),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument(
        "--data",
        default=os.environ.get("HALFSTEP_DATA", DEBIAN_FOLDER),
        help="folder of the four idx .gz files",
    )
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    device = torch.device(args.device)
    train_split = load_split(Path(args.data), device, train=True)
    test_split = load_split(Path(args.data), device, train=False)

    rows: list[dict[str, Any]] = []
    result = {
        "conditions": conditions(device),
        "epochs": args.epochs,
        "seed": args.seed,
        "batch": BATCH_SIZE,
        "lr": LEARNING_RATE,
        "rows": rows,
    }
    print(f"{'precision':16} {'accuracy':>9} {'loss':>9} {'seconds':>8}")
    for name in args.ways.split(","):
        row = measure(WAYS[name], train_split, test_split, args.epochs, args.seed)
        print(
            f"{name:16} {row['accuracy']:8.2f}% {row['loss']:9.6f} {row['seconds']:8.1f}",
            flush=True,
        )
        rows.append({"precision": name, **row})
    write_result(args.json, result)


if __name__ == "__main__":
    main()
