"""What storing weights in float16 costs, and what rounding well gives back: the seed MLP on full Fashion-MNIST.

    python benchmarks/rounding.py [--device cuda] [--epochs 5] [--data DIR] [--json FILE]

Batch 64, SGD with learning rate 1e-3, one seed, the same order for every precision, as in the torch-tpu guide's table.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from measure import conditions, write
from torch import Tensor, nn

import halfstep as hs
from halfstep.data import read_split

WAYS = {
    "fp32": hs.Precision("fp32"), "O1": hs.Precision("O1"), "O2": hs.Precision("O2"),
    "fp16 nearest": hs.Precision("fp16"), "fp16 stochastic": hs.Precision("fp16", rounding="stochastic"),
    "fp16 kahan": hs.Precision("fp16", rounding="kahan"), "bf16 nearest": hs.Precision("bf16"),
    "bf16 kahan": hs.Precision("bf16", rounding="kahan"),
}  # fmt: skip
DEBIAN = "/usr/share/datasets/fashion-mnist"


def load(folder: Path, device: torch.device, *, train: bool) -> tuple[Tensor, Tensor]:
    images, labels = read_split(folder, train=train)
    return images.to(device).float().div_(255).unsqueeze(1), labels.to(device)


def mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )


def train(
    precision: hs.Precision,
    data: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
    epochs: int,
    seed: int,
) -> dict[str, float]:
    """Accuracy and mean loss on the test set, and the seconds that training took."""
    images, labels = data
    net = mlp(seed).to(images.device)
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=1e-3), precision=precision
    )
    order, start = torch.Generator().manual_seed(seed), time.perf_counter()
    for _ in range(epochs):
        for index in torch.randperm(len(labels), generator=order).to(images.device).split(64):
            step(images[index], labels[index])
    seconds = time.perf_counter() - start
    evaluate, right, loss = step.evaluator(), 0, 0.0
    for x, y in zip(test[0].split(1000), test[1].split(1000), strict=True):
        out = evaluate(x, y)
        right += int((out.outputs.argmax(1) == y).sum())
        loss += float(out.loss) * int(out.count)
    return {
        "accuracy": 100 * right / len(test[1]),
        "loss": loss / len(test[1]),
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
        default=os.environ.get("HALFSTEP_DATA", DEBIAN),
        help="folder of the four idx .gz files",
    )
    parser.add_argument("--json", help="write the figures here")
    args = parser.parse_args()
    device, folder = torch.device(args.device), Path(args.data)
    data, test = load(folder, device, train=True), load(folder, device, train=False)
    result = {
        "conditions": conditions(device),
        "epochs": args.epochs,
        "seed": args.seed,
        "batch": 64,
        "lr": 1e-3,
        "rows": [],
    }
    print(f"{'precision':16} {'accuracy':>9} {'loss':>9} {'seconds':>8}")
    for name in args.ways.split(","):
        row = train(WAYS[name], data, test, args.epochs, args.seed)
        print(
            f"{name:16} {row['accuracy']:8.2f}% {row['loss']:9.6f} {row['seconds']:8.1f}",
            flush=True,
        )
        result["rows"].append({"precision": name, **row})
    write(args.json, result)


if __name__ == "__main__":
    main()
