"""A data set of your own: anything with `__len__` and `__getitem__`, or a DataLoader you have.

System: PyTorch (a Dataset class and a DataLoader around it).

    python examples/own_dataset.py

Targets: as `hs.data.Dataset` it is shuffled anew every pass, each sample once, and goes on exactly
where a stopped run left it; as a DataLoader it trains to the same bits as a plain loop over that
loader; and the network finds the function that made the samples.
"""

import argparse
import tempfile
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import halfstep as hs


class Waves(Dataset[tuple[Tensor, Tensor]]):
    """Two numbers, and the height of a wave there. Sample i is made when it is asked for."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(2, generator=torch.Generator().manual_seed(i)) * 2 - 1
        return x, (3 * x[:1]).sin() * x[1:]


def build_model(seed: int) -> hs.Model:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, foreach=True)
    return hs.Model(net, nn.MSELoss(), optimizer, metrics={"error": lambda out, y: (out - y).abs()})


def build_loader(seed: int) -> DataLoader[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(Waves(500), batch_size=50, shuffle=True, generator=generator)


def train_by_hand(loader: DataLoader[tuple[Tensor, Tensor]], seed: int) -> nn.Module:
    """One pass in plain torch."""
    model = build_model(seed)
    for x, y in loader:
        model.optimizer.zero_grad()
        nn.functional.mse_loss(model.net(x), y).backward()
        model.optimizer.step()
    return model.net


def have_equal_weights(net: nn.Module, other: nn.Module) -> bool:
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return all(torch.equal(p, q) for p, q in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed

    # The network finds the wave. `load` reads every sample once and keeps them in memory.
    waves = hs.data.Dataset(Waves(2_000), ["x", "height"], seed=seed)
    data = waves.load().shuffle().batch(50)
    valid = hs.data.Dataset(Waves(2_300), ["x", "height"]).skip(2_000).batch(100)
    model = build_model(seed)
    run = model.fit(5, data, valid=valid)
    errors = [entry["valid_error"] for entry in run.history]
    print("mean error by epoch:", " ".join(f"{error:.4f}" for error in errors))
    assert errors[-1] < 0.06 < errors[0], "the wave is about 0.35 high on average"

    # Three passes: another order each time, every sample once.
    passes = [torch.cat([x for x, _ in data]) for _ in range(3)]
    assert not any(torch.equal(a, b) for a, b in pairwise(passes)), "another order each pass"
    sorted_passes = [samples.sort(0).values for samples in passes]
    for samples in sorted_passes:
        assert torch.equal(samples, sorted_passes[0]), "every sample once"

    # Stopped after two epochs, then started again with a new model.
    with tempfile.TemporaryDirectory() as folder:
        for epochs in (2, 5):
            data.seek(0)
            resumed_model = build_model(seed)
            resumed_model.fit(epochs, data, callbacks=[hs.Checkpoint(folder)], resume="auto")
    same_bits = have_equal_weights(model.net, resumed_model.net)
    print("stopped and gone on: the same bits?", same_bits)
    assert same_bits

    # A DataLoader, by fit and by hand.
    model = build_model(seed)
    model.fit(1, build_loader(seed))
    same_bits = have_equal_weights(model.net, train_by_hand(build_loader(seed), seed))
    print("a DataLoader, by fit and by a plain loop: the same bits?", same_bits)
    assert same_bits


if __name__ == "__main__":
    main()
