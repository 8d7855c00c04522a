"""One MLP classifier in three precisions: fp32, pure fp16, mixed. What each costs and keeps.

System: torch-tpu (model training in FP32, FP16 and mixed precision).

    python examples/mlp_precisions.py                          # the shipped sample: seconds
    HALFSTEP_DATA=… python examples/mlp_precisions.py --full   # 60,000 images, 5 epochs, SGD 1e-3

The second is the guide's table. Mixed keeps fp32's result. Pure fp16 does not: a weight of float16
does not move by an update of less than half its last place, and at these learning rates most
updates are that small.
"""

import argparse
import math

import torch
from torch import nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PRECISIONS = ("fp32", "fp16", "O1")
SMALL_TRAIN_SAMPLES = 3_200
FULL_TRAIN_SAMPLES = 60_000


def load_data(full: bool, train: bool) -> hs.data.Dataset:
    """Pixels from 0 to 1, in batches of 64 for training and of 1,000 for the test."""
    if full:
        data = hs.data.load("fashion-mnist", "train" if train else "test", seed=1)
    else:
        images, labels = hs.data.sample(train)
        data = hs.data.Dataset({"image": images, "label": labels}, seed=1)
    data = data.map(hs.data.Rescale(1 / 255), "image")
    if not train:
        return data.batch(1_000)
    if not full:
        data = data.take(SMALL_TRAIN_SAMPLES)
    return data.shuffle().batch(64)


def train(precision: str, full: bool, seed: int) -> dict[str, float]:
    """The scores of the last epoch on the test data.

    Weights and order of batches are the same in every precision.
    """
    if full:
        epochs = 5
        lr = 1e-3
        progress = hs.ProgressLines(100, total=FULL_TRAIN_SAMPLES, accuracy="acc")
    else:
        epochs = 2
        lr = 4e-3
        progress = hs.ProgressLines(20, total=SMALL_TRAIN_SAMPLES, accuracy="acc")
    train_data = load_data(full, train=True)
    test_data = load_data(full, train=False)
    torch.manual_seed(seed)
    net = hs.nets.mlp().to(DEVICE)  # 784-512-512-10
    model = hs.Model(
        net,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(net.parameters(), lr=lr),
        hs.Precision(precision),
        metrics={"acc": hs.metrics.Accuracy()},
    )
    print(f"\n===== {precision}")
    run = model.fit(epochs, train_data, valid=test_data, callbacks=[progress])
    return run.history[-1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="all of Fashion-MNIST, from HALFSTEP_DATA"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    scores = {name: train(name, args.full, args.seed) for name in PRECISIONS}

    print(f"\n{'precision':>10} {'accuracy':>9} {'loss':>8}")
    for name, score in scores.items():
        print(f"{name:>10} {score['valid_acc']:>9.2%} {score['valid_loss']:>8.4f}")

    fp32 = scores["fp32"]
    fp16 = scores["fp16"]
    mixed = scores["O1"]
    assert abs(mixed["valid_loss"] - fp32["valid_loss"]) < 0.005, "mixed lands where fp32 does"
    if args.full:
        assert 0.64 < fp32["valid_acc"] < 0.66, "the guide's fp32: 64.7 %"
        assert 0.64 < mixed["valid_acc"] < 0.66, "the guide's mixed: 64.8 %"
        assert fp32["valid_acc"] - fp16["valid_acc"] > 0.10, "the guide's fp16: 34.6 %"
    else:
        # Ten equal guesses have a loss of ln 10. How far below that does each get?
        fp32_gain = math.log(10) - fp32["valid_loss"]
        fp16_gain = math.log(10) - fp16["valid_loss"]
        assert fp32_gain > 0.04, "fp32 learns"
        assert fp16_gain < 0.8 * fp32_gain, "fp16 loses a good part of the way"


if __name__ == "__main__":
    main()
