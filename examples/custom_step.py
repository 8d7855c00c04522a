"""A step and a loop of your own, sunk: the host reads results once per `every` steps.

System: MindSpore (train, custom training loop: TrainOneStepCell with sens and gradients by
parameter list, LeNet-5, DatasetHelper with sink_size=100).

    python examples/custom_step.py                          # the shipped sample: seconds
    HALFSTEP_DATA=… python examples/custom_step.py --full   # MNIST, 2,000 steps, slow start

Targets: the sunk loop has the weights and losses of calling the step batch by batch, bit for bit; a
sens of 1024 under a rate 1024 times smaller too (powers of two round nothing); and the loss falls.
"""

import argparse

import torch
from torch import Tensor, nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SENS = 1024.0  # a seed gradient that is a power of two


class TrainOneStep:
    """One training step as a function of a batch: loss, gradients, optimizer.

    The gradients are those of the listed parameters, with `sens` as the seed gradient.
    """

    def __init__(
        self, net: nn.Module, loss_fn: nn.Module, optimizer: torch.optim.Optimizer, sens: float
    ) -> None:
        self.net = net
        self.loss_fn = loss_fn
        self.optimizer = optimizer
        self.sens = sens
        self.weights = [p for p in net.parameters() if p.requires_grad]
        self.grad = hs.GradOperation(get_by_list=True, sens_param=True)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        self.loss: Tensor = self.loss_fn(self.net(images), labels)
        return self.loss

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        grads = self.grad(self.forward, self.weights)(images, labels, self.sens)
        for weight, grad in zip(self.weights, grads, strict=True):
            weight.grad = grad
        self.optimizer.step()
        return self.loss.detach()


def load_data(full: bool) -> hs.data.Dataset:
    """Batches of 32, resized to 32 × 32, normalised, channels first."""
    if full:
        data = hs.data.load("mnist")
    else:
        images, labels = hs.data.sample()
        data = hs.data.Dataset({"image": images[..., None], "label": labels})
    transforms = [
        hs.data.Resize(32),
        hs.data.Rescale(1 / 255),
        hs.data.Normalize([0.1307], [0.3081]),
        hs.data.ToCHW(),
    ]
    data = data.map(transforms, "image").shuffle(10_000).batch(32, drop_remainder=True)
    return data.repeat(2).take(2_000) if full else data.take(60)


def build_step(full: bool, seed: int, sens: float = 1.0) -> TrainOneStep:
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
    every = 100 if args.full else 20  # steps between two reads of the results by the host
    data = load_data(args.full)

    # The sunk loop.
    sunk_step = build_step(args.full, args.seed)
    losses: list[float] = []
    for visit, records in enumerate(hs.sink(sunk_step, data, every=every, device=DEVICE), start=1):
        losses += records.loss.tolist()
        print(
            f"visit {visit}: step {len(losses)}, loss {losses[-1]:.6f}, "
            f"mean since the last visit {records.loss.mean():.4f}"
        )

    # The first two visits again, batch by batch: as they were, and with a sens.
    plain_step = build_step(args.full, args.seed)
    sens_step = build_step(args.full, args.seed, SENS)
    data.seek(0)
    for i, (x, y) in zip(range(2 * every), data, strict=False):
        assert plain_step(x.to(DEVICE), y.to(DEVICE)).item() == losses[i]
        sens_step(x.to(DEVICE), y.to(DEVICE))
    for weight, sens_weight in zip(plain_step.weights, sens_step.weights, strict=True):
        assert torch.equal(weight, sens_weight), "a sens of 2^10 under a rate of 0.01 / 2^10"

    last_mean = sum(losses[-every:]) / every
    limit = 0.3 if args.full else 1.3
    assert last_mean < limit, f"mean loss of the last visit {last_mean}"


if __name__ == "__main__":
    main()
