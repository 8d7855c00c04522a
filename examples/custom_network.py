"""A network and a loss of your own, one step at a time; a loss per sample is summed, as a sens of ones does it.

System: MindSpore (train, custom training network: ReLU, mean over the image, dense layer of ones, momentum).

    python examples/custom_network.py

Targets: the guide's printed losses (labels all zero: 32 zeros); with real labels the first update equals its closed
form in float64; then, in O2, the network learns its 32 random images by heart.
"""

import argparse

import torch
from torch import Tensor, nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LR = 0.1


class ReLUMeanDense(nn.Module):
    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.dense = nn.Linear(channels, classes)
        nn.init.ones_(self.dense.weight)
        nn.init.ones_(self.dense.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x.relu().mean(dim=(2, 3)))


def softmax_loss(logits: Tensor, onehot: Tensor) -> Tensor:
    """One number per sample, in the dtype of the logits: halfstep hands them over in float32 or wider."""
    return -(onehot * logits.log_softmax(dim=1)).sum(dim=1)


def build(precision: str = "fp32", lr: float = LR, momentum: float = 0.1) -> hs.TrainStep:
    net = ReLUMeanDense(2048, 1000).to(DEVICE)
    return hs.TrainStep(
        net,
        softmax_loss,
        torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum),
        precision=precision,
    )


def first_update(x: Tensor, onehot: Tensor) -> Tensor:
    """All weights are 1, so softmax is 1/1000 everywhere, and the summed loss has this gradient."""
    features = x.double().relu().mean(dim=(2, 3))
    return 1 - LR * (1 / 1000 - onehot.double()).T @ features


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    torch.manual_seed(parser.parse_args().seed)
    x = torch.randn(32, 2048, 7, 7, device=DEVICE)
    labels = torch.randint(1000, (32,), device=DEVICE)
    zeros, onehot = (
        torch.zeros(32, 1000, device=DEVICE),
        nn.functional.one_hot(labels, 1000).float(),
    )

    step = build()
    losses = softmax_loss(step.net(x), zeros).detach()
    print("losses with labels of zeros:", [f"{v:g}" for v in losses.abs().tolist()])
    record = step(x, zeros)
    assert not losses.any()
    assert record.loss == 0
    assert all((p == 1).all() for p in step.net.parameters()), "no gradient, no change"

    record = step(x, onehot)
    expected = first_update(x, onehot)
    off = (step.net.dense.weight - expected).abs().max().item()
    print(
        f"summed loss {record.loss:.4f} = 32 ln 1000; first update off its closed form by {off:.1e}"
    )
    assert abs(record.loss.item() / 32 - torch.tensor(1000.0).log().item()) < 1e-5
    assert off < 2e-5  # float32: weights near 1 and updates up to 0.1 · 32 · 0.5

    step = build("O2", lr=0.003)
    for i in range(40):
        record = step(x, onehot)
        if i % 10 == 0:
            print(
                f"O2 step {i:2}: mean loss {record.loss / 32:.4f}, scale {record.scale:g}, skipped {record.skipped}"
            )
    right = (step.evaluator()(x, onehot).outputs.argmax(1) == labels).sum().item()
    print(f"{right} of 32 known by heart")
    assert right == 32


if __name__ == "__main__":
    main()
