"""The update cycle: many small batches, one update, the very result of the big batch.

System: PyTorch (training notes, the update cycle). Its network, its 63 samples, its loss of shape
(1,), AdamW.

    python examples/update_cycle.py

Dividing each loss by the length of the cycle is right only when all micro-batches are equally full.
63 samples in batches of 8 end with one of 7, and the result drifts. TrainStep weights every batch
by what it holds.

Target: every way of cutting gives the big batch's weights and loss within 1e-12 (float64); the
division does not.
"""

import argparse
from typing import NamedTuple

import torch
from torch import Tensor

import halfstep as hs

Y = torch.arange(1, 64, dtype=torch.float64)[:, None]
X = torch.cat([torch.zeros_like(Y), Y.log(), 5 * Y], dim=1)
EPOCHS = 10

# Size of the big batch → the same samples as (batch size, batches to an update).
CUTS = {63: [(8, 8), (16, 4), (7, 9)], 24: [(8, 3), (12, 2)]}


class TrainingResult(NamedTuple):
    weights: Tensor  # all of them in one vector
    loss: float  # of the last update
    updates: int


def loss_fn(output: Tensor, label: Tensor) -> Tensor:
    return torch.mean((label - output) ** 2, dim=0)


def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = hs.nets.ffnn(inputs=3, hidden=(5, 5), outputs=1).double()
    for p in net.parameters():
        torch.nn.init.uniform_(p)
    return net, torch.optim.AdamW(net.parameters())


def weight_vector(net: torch.nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach()


def train_with_cycles(batch_size: int, accumulate: int, seed: int) -> TrainingResult:
    """An update for every `accumulate` batches, by halfstep."""
    net, optimizer = build(seed)
    step = hs.TrainStep(
        net,
        loss_fn,
        optimizer,
        precision="fp64",
        accumulate=accumulate,
        count=lambda batch: len(batch[0]),
    )
    for _ in range(EPOCHS):
        for x, y in zip(X.split(batch_size), Y.split(batch_size), strict=True):
            record = step(x, y)
        step.flush()  # a tail that does not fill a cycle is an update of its own
    return TrainingResult(weight_vector(net), record.cycle_loss.item(), int(step.state.updates))


def train_with_division(batch_size: int, accumulate: int, seed: int) -> Tensor:
    """The weights after the same by hand, with each loss divided by the length of the cycle."""
    net, optimizer = build(seed)
    for _ in range(EPOCHS):
        batches = zip(X.split(batch_size), Y.split(batch_size), strict=True)
        for i, (x, y) in enumerate(batches, start=1):
            (loss_fn(net(x), y) / accumulate).sum().backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return weight_vector(net)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=42)
    seed = parser.parse_args().seed

    for big_batch, cuts in CUTS.items():
        big = train_with_cycles(big_batch, 1, seed)
        print(f"batch {big_batch:2}, no cycle:    {big.updates:3} updates, loss {big.loss:.6f}")
        for batch_size, accumulate in cuts:
            cut = train_with_cycles(batch_size, accumulate, seed)
            error = (cut.weights - big.weights).abs().max().item()
            print(
                f"batch {batch_size:2}, cycle of {accumulate:2}: {cut.updates:3} updates, "
                f"loss {cut.loss:.6f}, weights off by {error:.0e}"
            )
            assert cut.updates == big.updates
            assert abs(cut.loss - big.loss) <= 1e-12 * big.loss
            assert error <= 1e-12

    expected = train_with_cycles(63, 1, seed).weights
    drift = (train_with_division(8, 8, seed) - expected).abs().max().item()
    print(f"each loss divided by 8: weights off by {drift:.0e}")
    assert drift > 1e-10


if __name__ == "__main__":
    main()
