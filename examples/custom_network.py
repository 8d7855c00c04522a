"""A network and a loss of your own, one step at a time. A loss per sample is summed.

System: MindSpore (train, custom training network: ReLU, mean over the image, dense layer of ones,
momentum). There, a sens of ones sums the loss per sample.

    python examples/custom_network.py

Targets: the guide's printed losses (labels all zero: 32 zeros); with real labels the first update
equals its closed form in float64; then, in O2, the network learns its 32 random images by heart.
"""

import argparse

import torch
from torch import Tensor, nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LEARNING_RATE = 0.1
BATCH_SIZE = 32
CHANNELS = 2048
CLASSES = 1000


class ReLUMeanDense(nn.Module):
    """ReLU, the mean over the image, and a dense layer whose weights all start at one."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.dense = nn.Linear(channels, classes)
        nn.init.ones_(self.dense.weight)
        nn.init.ones_(self.dense.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x.relu().mean(dim=(2, 3)))


def softmax_loss(logits: Tensor, onehot: Tensor) -> Tensor:
    """One number per sample. halfstep hands the logits over in float32 or wider."""
    return -(onehot * logits.log_softmax(dim=1)).sum(dim=1)


def build_step(precision: str = "fp32", lr: float = LEARNING_RATE) -> hs.TrainStep:
    net = ReLUMeanDense(CHANNELS, CLASSES).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.1)
    return hs.TrainStep(net, softmax_loss, optimizer, precision=hs.Precision(precision))


def weights_after_first_update(x: Tensor, onehot: Tensor) -> Tensor:
    """The closed form, in float64.

    All weights are 1, so softmax is 1/1000 everywhere, and the summed loss has this gradient.
    """
    features = x.double().relu().mean(dim=(2, 3))
    return 1 - LEARNING_RATE * (1 / CLASSES - onehot.double()).T @ features


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    x = torch.randn(BATCH_SIZE, CHANNELS, 7, 7, device=DEVICE)
    labels = torch.randint(CLASSES, (BATCH_SIZE,), device=DEVICE)
    onehot = nn.functional.one_hot(labels, CLASSES).float()
    zeros = torch.zeros(BATCH_SIZE, CLASSES, device=DEVICE)

    # Labels of zeros, as in the guide: no loss, no gradient, no change.
    step = build_step()
    losses = softmax_loss(step.net(x), zeros).detach()
    print("losses with labels of zeros:", [f"{loss:g}" for loss in losses.abs().tolist()])
    record = step(x, zeros)
    assert not losses.any()
    assert record.loss == 0
    assert all((p == 1).all() for p in step.net.parameters()), "no gradient, no change"

    # Real labels: the first update against its closed form.
    record = step(x, onehot)
    expected = weights_after_first_update(x, onehot)
    error = (step.net.dense.weight - expected).abs().max().item()
    print(
        f"summed loss {record.loss:.4f} = 32 ln 1000; "
        f"first update off its closed form by {error:.1e}"
    )
    assert abs(record.loss.item() / BATCH_SIZE - torch.tensor(1000.0).log().item()) < 1e-5
    assert error < 2e-5  # float32: weights near 1 and updates up to 0.1 · 32 · 0.5

    # Mixed precision: the 32 images by heart.
    step = build_step("O2", lr=0.003)
    for i in range(40):
        record = step(x, onehot)
        if i % 10 == 0:
            print(
                f"O2 step {i:2}: mean loss {record.loss / BATCH_SIZE:.4f}, "
                f"scale {record.scale:g}, skipped {record.skipped}"
            )
    predictions = step.evaluator()(x, onehot).outputs.argmax(1)
    correct = (predictions == labels).sum().item()
    print(f"{correct} of 32 known by heart")
    assert correct == BATCH_SIZE


if __name__ == "__main__":
    main()
