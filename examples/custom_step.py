"""A one-step cell and a loop of your own, sunk: one look of the host per `EVERY` steps.

System: MindSpore (train, custom training loop: TrainOneStepCell with sens and gradients by parameter list, LeNet-5,
DatasetHelper with sink_size=100).

    python examples/custom_step.py                          # the shipped sample: seconds
    HALFSTEP_DATA=… python examples/custom_step.py --full   # MNIST, 2,000 steps from the guide's slow start

Targets: the sunk loop has the weights and losses of calling the cell batch by batch, bit for bit; a sens of 1024 under
a rate 1024 times smaller too (powers of two round nothing); and the loss falls.
"""

import argparse

import torch
from torch import Tensor, nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class TrainOneStep:
    """Loss, gradients of the listed parameters with a seed gradient, optimizer: a function of a batch."""

    def __init__(
        self, net: nn.Module, loss: nn.Module, optimizer: torch.optim.Optimizer, sens: float = 1.0
    ) -> None:
        self.net, self.loss, self.optimizer, self.sens = net, loss, optimizer, sens
        self.weights = [p for p in net.parameters() if p.requires_grad]
        self.grad = hs.GradOperation(get_by_list=True, sens_param=True)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        self.value: Tensor = self.loss(self.net(images), labels)
        return self.value

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        grads = self.grad(self.forward, self.weights)(images, labels, self.sens)
        for p, g in zip(self.weights, grads, strict=True):
            p.grad = g
        self.optimizer.step()
        return self.value.detach()


def pipeline(full: bool) -> hs.data.Dataset:
    images, labels = hs.data.sample()
    data = (
        hs.data.load("mnist")
        if full
        else hs.data.Dataset({"image": images[..., None], "label": labels})
    )
    chain = [
        hs.data.Resize(32),
        hs.data.Rescale(1 / 255),
        hs.data.Normalize([0.1307], [0.3081]),
        hs.data.ToCHW(),
    ]
    data = data.map(chain, "image").shuffle(10_000).batch(32, drop_remainder=True)
    return data.repeat(2).take(2_000) if full else data.take(60)


def cell(full: bool, seed: int, sens: float = 1.0) -> TrainOneStep:
    torch.manual_seed(seed)
    net = hs.nets.lenet5().to(DEVICE)
    if not full:  # the guide's start (σ = 0.02) takes about 900 steps to leave its plateau
        for p in net.parameters():
            if p.ndim > 1:
                nn.init.kaiming_normal_(p)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01 / sens, momentum=0.9, fused=True)
    return TrainOneStep(net, nn.CrossEntropyLoss(), optimizer, sens)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="MNIST, from HALFSTEP_DATA")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    every, data = 100 if args.full else 20, pipeline(args.full)
    sunk, by_hand, scaled = (cell(args.full, args.seed, sens) for sens in (1.0, 1.0, 1024.0))
    losses: list[float] = []
    for visit, records in enumerate(hs.sink(sunk, data, every=every, device=DEVICE), start=1):
        losses += records.loss.tolist()
        mean = records.loss.mean()
        print(
            f"visit {visit}: step {len(losses)}, loss {losses[-1]:.6f}, mean since the last visit {mean:.4f}"
        )

    check = 2 * every  # steps repeated by hand
    data.seek(0)
    for i, (x, y) in zip(range(check), data, strict=False):
        assert by_hand(x.to(DEVICE), y.to(DEVICE)).item() == losses[i]
        scaled(x.to(DEVICE), y.to(DEVICE))
    for p, q in zip(by_hand.weights, scaled.weights, strict=True):
        assert torch.equal(p, q), "a sens of 2^10 under a rate of 0.01 / 2^10"
    last = sum(losses[-every:]) / every
    assert last < (0.3 if args.full else 1.3), f"mean loss of the last visit {last}"


if __name__ == "__main__":
    main()
