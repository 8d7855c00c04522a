"""LeNet-5 on MNIST as the seed trains it: epochs of 1,000 steps of 32.

    HALFSTEP_DATA=… python benchmarks/lenet.py [--json FILE] [--precisions fp32 O2] [--epochs 10]

The data goes on where the last epoch stopped.
"""

import argparse
import time
from typing import Any, Literal

import torch
from measure import conditions, write_result
from torch import nn

import halfstep as hs
from halfstep.engine import Callback, Row, Run

# The seed's.
BATCH_SIZE = 32
STEPS_PER_EPOCH = 1000
LEARNING_RATE = 0.01
MOMENTUM = 0.9
TARGET_ACCURACY = 0.985


class LastLosses(Callback):
    """The loss of each epoch's last step, as the seed prints it."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def step(self, run: Run, row: Row) -> None:
        if row.step == STEPS_PER_EPOCH:
            self.losses.append(row.loss)

    def epoch_end(self, run: Run) -> None:
        print(f"epoch: {run.epoch} step: {run.step}, loss is {self.losses[-1]:.7g}", flush=True)


def load_data(split: Literal["train", "test"], device: torch.device) -> hs.data.Dataset:
    """The seed's pipeline: resize to 32, scale to 0..1, normalise, channels first.

    Training data is shuffled in a window of 10,000.
    """
    transforms = [
        hs.data.Resize(32),
        hs.data.Rescale(1 / 255),
        hs.data.Rescale(1 / 0.3081, -0.1307 / 0.3081),
        hs.data.ToCHW(),
    ]
    data = hs.data.load("mnist", split).map(transforms, "image")
    if split == "train":
        data = data.shuffle(10_000).batch(BATCH_SIZE, drop_remainder=True)
    else:
        data = data.batch(500)
    return data.to_device(device)


def train(precision: str, epochs: int, device: torch.device) -> dict[str, Any]:
    torch.manual_seed(0)
    net = hs.nets.lenet5().to(device)
    model = hs.Model(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM),
        precision,
        metrics={"acc": hs.metrics.Accuracy()},
    )
    last_losses = LastLosses()
    start = time.perf_counter()
    model.fit(
        epochs,
        load_data("train", device),
        callbacks=[last_losses],
        progress=False,
        steps_per_epoch=STEPS_PER_EPOCH,
        sink=STEPS_PER_EPOCH,
    )
    seconds = time.perf_counter() - start
    scores = model.evaluate(load_data("test", device))
    print(
        f"{precision}: accuracy {scores['acc']:.2%}, loss {scores['loss']:.4f}, {seconds:.1f} s",
        flush=True,
    )
    return {
        "losses": last_losses.losses,
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
    result = {
        "conditions": conditions(device),
        "batch": BATCH_SIZE,
        "steps_per_epoch": STEPS_PER_EPOCH,
        "target": TARGET_ACCURACY,
        **runs,
    }
    write_result(args.json, result)


if __name__ == "__main__":
    main()
