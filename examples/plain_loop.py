"""The plain loop with parameter groups, written in torch and with one step of halfstep: the same bits.

System: PyTorch (training notes: gradients that add up and are cleared, parameter groups, train and eval mode).

    python examples/plain_loop.py                          # the shipped sample: seconds
    HALFSTEP_DATA=… python examples/plain_loop.py --full   # all of Fashion-MNIST, one pass

Target: weights, BatchNorm statistics and momentum of both loops are equal bit by bit, dropout included.
"""

import argparse

import torch
from torch import Tensor, nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOSS = nn.CrossEntropyLoss()


class Net(nn.Module):
    """Two parts, so that each can have a learning rate of its own; BatchNorm and Dropout, so that the mode matters."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(
            nn.Flatten(), nn.Linear(784, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.1)
        )
        self.classifier = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.base(x))


def build(seed: int) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net().to(DEVICE)
    groups = [
        {"params": net.base.parameters()},
        {"params": net.classifier.parameters(), "lr": 1e-3},
    ]
    return net, torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


def with_torch(data: hs.data.Dataset, seed: int) -> tuple[Net, torch.optim.Optimizer]:
    net, optimizer = build(seed)
    net.train()
    for x, y in data:
        loss = LOSS(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net, optimizer


def with_halfstep(data: hs.data.Dataset, seed: int) -> tuple[Net, torch.optim.Optimizer]:
    net, optimizer = build(seed)
    step = hs.TrainStep(
        net, LOSS, optimizer
    )  # precision="O2" here is all that mixed precision takes
    for batch, (x, y) in enumerate(data):
        record = step(x, y)
        if batch % 20 == 0:  # reading a record is what waits for the device
            rates = ", ".join(f"{rate:g}" for rate in record.lr.tolist())
            print(f"loss: {record.loss:>7f}  [{batch * len(x):>5d}]  rates {rates}")
    return net, optimizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="all of Fashion-MNIST, from HALFSTEP_DATA"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    images, labels = (
        hs.data.sample()
        if not args.full
        else hs.data.read_split(hs.data.find("fashion-mnist").folder)
    )
    data = (
        hs.data.Dataset((images, labels))
        .map(hs.data.Rescale(1 / 255), "x")
        .take(60_000 if args.full else 6_400)
    )
    data = data.shuffle().batch(64).to_device(DEVICE)
    plain, one = with_torch(data, args.seed)
    data.seek(0)  # the same pass again
    net, two = with_halfstep(data, args.seed)

    x, y = (t.to(DEVICE) for t in hs.data.sample(train=False))
    out = hs.EvalStep(net, LOSS)(
        x / 255, y
    )  # eval mode without gradients for this call; the mode comes back
    accuracy = (out.outputs.argmax(1) == y).double().mean().item()
    print(f"test accuracy {accuracy:.1%}, loss {out.loss:.4f}")

    assert net.training, "evaluation leaves the mode as it was"
    assert all(p.grad is None for p in net.parameters()), "the step clears gradients itself"
    assert all(
        torch.equal(a, b)
        for a, b in zip(plain.state_dict().values(), net.state_dict().values(), strict=True)
    )
    assert all(
        torch.equal(one.state[p]["momentum_buffer"], two.state[q]["momentum_buffer"])
        for p, q in zip(plain.parameters(), net.parameters(), strict=True)
    )
    assert accuracy > 0.75


if __name__ == "__main__":
    main()
