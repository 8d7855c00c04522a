"""The plain loop with parameter groups, in torch and with one step of halfstep: the same bits.

System: PyTorch (training notes: gradients that add up and are cleared, parameter groups, train and
eval mode).

    python examples/plain_loop.py                          # the shipped sample: seconds
    HALFSTEP_DATA=… python examples/plain_loop.py --full   # all of Fashion-MNIST, one pass

Target: weights, BatchNorm statistics and momentum of both loops are equal bit by bit, dropout
included.
"""

import argparse

import torch
from torch import Tensor, nn

import halfstep as hs

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOSS_FN = nn.CrossEntropyLoss()


class Net(nn.Module):
    """Two parts, each with a learning rate of its own.

    BatchNorm and Dropout are in it so that the mode, train or eval, matters.
    """

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


def train_with_torch(data: hs.data.Dataset, seed: int) -> tuple[Net, torch.optim.Optimizer]:
    net, optimizer = build(seed)
    net.train()
    for x, y in data:
        loss = LOSS_FN(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return net, optimizer


def train_with_halfstep(data: hs.data.Dataset, seed: int) -> tuple[Net, torch.optim.Optimizer]:
    net, optimizer = build(seed)
    # precision="O2" here is all that mixed precision takes.
    step = hs.TrainStep(net, LOSS_FN, optimizer)
    for batch, (x, y) in enumerate(data):
        record = step(x, y)
        if batch % 20 == 0:  # reading a record is what waits for the device
            rates = ", ".join(f"{rate:g}" for rate in record.lr.tolist())
            print(f"loss: {record.loss:>7f}  [{batch * len(x):>5d}]  rates {rates}")
    return net, optimizer


def load_data(full: bool) -> hs.data.Dataset:
    if full:
        images, labels = hs.data.read_split(hs.data.find("fashion-mnist").folder)
        count = 60_000
    else:
        images, labels = hs.data.sample()
        count = 6_400
    data = hs.data.Dataset((images, labels)).map(hs.data.Rescale(1 / 255), "x")
    return data.take(count).shuffle().batch(64).to_device(DEVICE)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="all of Fashion-MNIST, from HALFSTEP_DATA"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    data = load_data(args.full)
    torch_net, torch_optimizer = train_with_torch(data, args.seed)
    data.seek(0)  # the same pass again
    net, optimizer = train_with_halfstep(data, args.seed)

    # EvalStep is in eval mode, without gradients, for this call; the mode comes back.
    x, y = (column.to(DEVICE) for column in hs.data.sample(train=False))
    result = hs.EvalStep(net, LOSS_FN)(x / 255, y)
    accuracy = (result.outputs.argmax(1) == y).double().mean().item()
    print(f"test accuracy {accuracy:.1%}, loss {result.loss:.4f}")
    assert net.training, "evaluation leaves the mode as it was"
    assert accuracy > 0.75

    # The same bits everywhere.
    assert all(p.grad is None for p in net.parameters()), "the step clears gradients itself"
    torch_state = torch_net.state_dict()
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, torch_state[name])
    for p, torch_p in zip(net.parameters(), torch_net.parameters(), strict=True):
        momentum = optimizer.state[p]["momentum_buffer"]
        assert torch.equal(momentum, torch_optimizer.state[torch_p]["momentum_buffer"])


if __name__ == "__main__":
    main()
