"""The update cycle: many small batches, one update, the very result of the big batch.

System: PyTorch (training notes, the update cycle). Its network, its 63 samples, its loss of shape (1,), AdamW.

    python examples/update_cycle.py

Dividing each loss by the length of the cycle is right only when all micro-batches are equally full. 63 samples in
batches of 8 end with one of 7, and the result drifts. TrainStep weights every batch by what it holds.

Target: every way of cutting gives the big batch's weights and loss within 1e-12 (float64); the division does not.
"""

import argparse

import torch
from torch import Tensor

import halfstep as hs

Y = torch.arange(1, 64, dtype=torch.float64)[:, None]
X = torch.cat([torch.zeros_like(Y), Y.log(), 5 * Y], dim=1)
EPOCHS = 10


def loss_fn(output: Tensor, label: Tensor) -> Tensor:
    return torch.mean((label - output) ** 2, dim=0)


def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = hs.nets.ffnn(inputs=3, hidden=(5, 5), outputs=1).double()
    for p in net.parameters():
        torch.nn.init.uniform_(p)
    return net, torch.optim.AdamW(net.parameters())


def cycle(batch: int, accumulate: int, seed: int) -> tuple[Tensor, float, int]:
    """All weights in one tensor, the last update's loss, and the number of updates."""
    net, optimizer = build(seed)
    step = hs.TrainStep(
        net, loss_fn, optimizer, precision="fp64", accumulate=accumulate, count=lambda b: len(b[0])
    )
    for _ in range(EPOCHS):
        for x, y in zip(X.split(batch), Y.split(batch), strict=True):
            record = step(x, y)
        step.flush()  # a tail that does not fill a cycle is an update of its own
    weights = torch.nn.utils.parameters_to_vector(net.parameters()).detach()
    return weights, record.cycle_loss.item(), int(step.state.updates)


def divided(batch: int, accumulate: int, seed: int) -> Tensor:
    """The same by hand, each loss divided by the length of the cycle."""
    net, optimizer = build(seed)
    for _ in range(EPOCHS):
        for i, (x, y) in enumerate(zip(X.split(batch), Y.split(batch), strict=True), start=1):
            (loss_fn(net(x), y) / accumulate).sum().backward()
            if i % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
    return torch.nn.utils.parameters_to_vector(net.parameters()).detach()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=42)
    seed = parser.parse_args().seed

    for whole, cuts in {63: [(8, 8), (16, 4), (7, 9)], 24: [(8, 3), (12, 2)]}.items():
        weights, loss, updates = cycle(whole, 1, seed)
        print(f"batch {whole:2}, no cycle:    {updates:3} updates, loss {loss:.6f}")
        for batch, k in cuts:
            same, again, count = cycle(batch, k, seed)
            off = (same - weights).abs().max().item()
            print(
                f"batch {batch:2}, cycle of {k:2}: {count:3} updates, loss {again:.6f}, weights off by {off:.0e}"
            )
            assert count == updates
            assert abs(again - loss) <= 1e-12 * loss
            assert off <= 1e-12
    drift = (divided(8, 8, seed) - cycle(63, 1, seed)[0]).abs().max().item()
    print(f"each loss divided by 8: weights off by {drift:.0e}")
    assert drift > 1e-10


if __name__ == "__main__":
    main()
