"""One MLP classifier in three precisions: fp32, pure fp16, mixed. What each costs and keeps.

System: torch-tpu (model training in FP32, FP16 and mixed precision).

    python examples/mlp_precisions.py                          # the shipped sample: seconds
    HALFSTEP_DATA=… python examples/mlp_precisions.py --full   # the guide's table: 60,000 images, 5 epochs, SGD 1e-3

Mixed keeps fp32's result. Pure fp16 does not: a weight of float16 does not move by an update of less than half its
last place, and at these learning rates most updates are that small.
"""

import argparse
import math

import torch
from torch import nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def load(full: bool, train: bool) -> hs.data.Dataset:
    """Pixels from 0 to 1, in batches of 64 for training and of 1,000 for the test."""
    images, labels = hs.data.sample(train)
    data = hs.data.Dataset({"image": images, "label": labels}, seed=1)
    if full:
        data = hs.data.load("fashion-mnist", "train" if train else "test", seed=1)
    data = data.map(hs.data.Rescale(1 / 255), "image")
    if not train:
        return data.batch(1_000)
    return data.shuffle().batch(64) if full else data.take(3_200).shuffle().batch(64)


def run(precision: str, full: bool, seed: int) -> dict[str, float]:
    """The last epoch's scores on the test data; weights and order of batches are the same in every precision."""
    epochs, lr = (5, 1e-3) if full else (2, 4e-3)
    train, test = load(full, train=True), load(full, train=False)
    torch.manual_seed(seed)
    net = hs.nets.mlp().to(DEVICE)  # 784-512-512-10
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    model = hs.Model(
        net, nn.CrossEntropyLoss(), optimizer, precision, metrics={"acc": hs.metrics.Accuracy()}
    )
    print(f"\n===== {precision}")
    lines = hs.ProgressLines(100 if full else 20, total=60_000 if full else 3_200, accuracy="acc")
    return model.fit(epochs, train, valid=test, callbacks=[lines]).history[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="all of Fashion-MNIST, from HALFSTEP_DATA"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    fp32, fp16, mixed = scores = [
        run(name, args.full, args.seed) for name in ("fp32", "fp16", "O1")
    ]

    print(f"\n{'precision':>10} {'accuracy':>9} {'loss':>8}")
    for name, score in zip(("fp32", "fp16", "O1"), scores, strict=True):
        print(f"{name:>10} {score['valid_acc']:>9.2%} {score['valid_loss']:>8.4f}")

    assert abs(mixed["valid_loss"] - fp32["valid_loss"]) < 0.005, "mixed lands where fp32 does"
    if args.full:
        assert 0.64 < fp32["valid_acc"] < 0.66, "the guide's fp32: 64.7 %"
        assert 0.64 < mixed["valid_acc"] < 0.66, "the guide's mixed: 64.8 %"
        assert fp32["valid_acc"] - fp16["valid_acc"] > 0.10, "the guide's fp16: 34.6 %"
    else:
        way = [
            math.log(10) - score["valid_loss"] for score in (fp32, fp16)
        ]  # from where ten equal guesses stand
        assert way[0] > 0.04, "fp32 learns"
        assert way[1] < 0.8 * way[0], "fp16 loses a good part of the way"


if __name__ == "__main__":
    main()
