"""LeNet-5 on MNIST as the seed trains it: epochs of 1,000 steps of 32, the data going on where it stopped.

HALFSTEP_DATA=… python benchmarks/lenet.py [--json FILE] [--precisions fp32 O2] [--epochs 10]
"""

import argparse
import time
from typing import Any

import torch
from measure import conditions, write
from torch import nn

import halfstep as hs
from halfstep.engine import Callback, Row, Run
from halfstep.model import Model

BATCH, STEPS, LR, MOMENTUM = 32, 1000, 0.01, 0.9  # the seed's
TARGET = 0.985


class Losses(Callback):
    """The loss of each epoch's last step, as the seed prints it."""

    def __init__(self) -> None:
        self.last: list[float] = []

    def step(self, run: Run, row: Row) -> None:
        if row.step == STEPS:
            self.last.append(row.loss)

    def epoch_end(self, run: Run) -> None:
        print(f"epoch: {run.epoch} step: {run.step}, loss is {self.last[-1]:.7g}", flush=True)


def pipeline(split: Any, device: torch.device) -> hs.data.Dataset:
    """The seed's: resize to 32, scale to 0..1, normalise, channels first, a window of 10,000, batches of 32."""
    chain = [
        hs.data.Resize(32),
        hs.data.Rescale(1 / 255),
        hs.data.Rescale(1 / 0.3081, -0.1307 / 0.3081),
        hs.data.ToCHW(),
    ]
    data = hs.data.load("mnist", split).map(chain, "image")
    data = (
        data.shuffle(10_000).batch(BATCH, drop_remainder=True)
        if split == "train"
        else data.batch(500)
    )
    return data.to_device(device)


def train(precision: str, epochs: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    net = hs.nets.lenet5().to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM)
    model = Model(
        net, nn.CrossEntropyLoss(), optimizer, precision, metrics={"acc": hs.metrics.Accuracy()}
    )
    losses, start = Losses(), time.perf_counter()
    model.fit(
        epochs, pipeline("train", device), callbacks=[losses], steps_per_epoch=STEPS, sink=STEPS
    )
    seconds = time.perf_counter() - start
    scores = model.evaluate(pipeline("test", device))
    print(
        f"{precision}: accuracy {scores['acc']:.2%}, loss {scores['loss']:.4f}, {seconds:.1f} s",
        flush=True,
    )
    return {
        "losses": losses.last,
        "accuracy": scores["acc"],
        "loss": scores["loss"],
        "seconds": round(seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the figures and their conditions here")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "O2"])
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    runs = {precision: train(precision, args.epochs, device) for precision in args.precisions}
    write(
        args.json,
        {
            "conditions": conditions(device),
            "batch": BATCH,
            "steps_per_epoch": STEPS,
            "target": TARGET,
            **runs,
        },
    )


if __name__ == "__main__":
    main()
