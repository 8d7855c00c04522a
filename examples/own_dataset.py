"""A data set of your own: anything with `__len__` and `__getitem__`, or the DataLoader you already have.

System: PyTorch (a Dataset class and a DataLoader around it).

    python examples/own_dataset.py

Targets: as `hs.data.Dataset` it is shuffled anew every pass, each sample once, and goes on exactly where a stopped
run left it; as a DataLoader it trains to the same bits as a plain loop over that loader; and the network finds
the function that made the samples.
"""

import argparse
import tempfile
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import halfstep as hs


class Waves(Dataset[tuple[Tensor, Tensor]]):
    """Sample i is made when it is asked for: two numbers, and the height of a wave there."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(2, generator=torch.Generator().manual_seed(i)) * 2 - 1
        return x, (3 * x[:1]).sin() * x[1:]


def build(seed: int) -> hs.Model:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, foreach=True)
    return hs.Model(net, nn.MSELoss(), optimizer, metrics={"error": lambda out, y: (out - y).abs()})


def plain(loader: DataLoader[tuple[Tensor, Tensor]], seed: int) -> nn.Module:
    model = build(seed)
    for x, y in loader:
        model.optimizer.zero_grad()
        nn.functional.mse_loss(model.net(x), y).backward()
        model.optimizer.step()
    return model.net


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed

    data = (
        hs.data.Dataset(Waves(2_000), ["x", "height"], seed=seed).load().shuffle().batch(50)
    )  # load: read once
    valid = hs.data.Dataset(Waves(2_300), ["x", "height"]).skip(2_000).batch(100)
    straight = build(seed)
    run = straight.fit(5, data, valid=valid)
    errors = [row["valid_error"] for row in run.history]
    print("mean error by epoch:", " ".join(f"{error:.4f}" for error in errors))
    assert errors[-1] < 0.06 < errors[0], "the wave is about 0.35 high on average"

    passes = [torch.cat([x for x, _ in data]) for _ in range(3)]
    assert not any(torch.equal(a, b) for a, b in pairwise(passes)), "another order each pass"
    assert all(torch.equal(p.sort(0).values, passes[0].sort(0).values) for p in passes), (
        "every sample once"
    )

    with tempfile.TemporaryDirectory() as folder:
        for last in (2, 5):  # stopped after two epochs, then started again
            data.seek(0)
            resumed = build(seed)
            resumed.fit(last, data, callbacks=[hs.Checkpoint(folder)], resume="auto")
    print("stopped and gone on: the same bits?", equal(straight.net, resumed.net))
    assert equal(straight.net, resumed.net)

    def loader() -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(
            Waves(500), batch_size=50, shuffle=True, generator=torch.Generator().manual_seed(seed)
        )

    model = build(seed)
    model.fit(1, loader())
    same = equal(model.net, plain(loader(), seed))
    print("a DataLoader, by fit and by a plain loop: the same bits?", same)
    assert same


if __name__ == "__main__":
    main()
