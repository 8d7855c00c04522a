"""GradScaler in both gears, and by torch's protocol: three spellings, the same bits.

System: MegEngine (automatic mixed precision, GradScaler with GradManager), torch-tpu (scale, step,
update).

    python examples/grad_scaler.py                          # the shipped sample: seconds
    HALFSTEP_DATA=… python examples/grad_scaler.py --full   # all of Fashion-MNIST, one pass

Target: weights, losses and scales of the three are equal bit by bit, the skipped updates included.
"""

import argparse
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import halfstep as hs
from halfstep import amp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH_SIZE = 64

Step = Callable[[Tensor, Tensor], Tensor]
StepBuilder = Callable[[nn.Module, torch.optim.Optimizer, amp.GradScaler], Step]
Batches = list[tuple[Tensor, Tensor]]


class TrainingResult(NamedTuple):
    losses: list[Tensor]
    scales: list[Tensor]
    weights: list[Tensor]


def automatic(net: nn.Module, optimizer: torch.optim.Optimizer, scaler: amp.GradScaler) -> Step:
    """MegEngine's automatic gear: `scaler.backward` does everything about the scale."""
    grad_manager = hs.GradManager().attach(net.parameters())

    @amp.autocast()
    def step(x: Tensor, y: Tensor) -> Tensor:
        with grad_manager:
            loss = cross_entropy(net(x), y)
            # Scale, backward, unscale, update of the scale; on overflow no gradient is left.
            scaler.backward(grad_manager, loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def manual(net: nn.Module, optimizer: torch.optim.Optimizer, scaler: amp.GradScaler) -> Step:
    """MegEngine's manual gear: gradients can be edited between backward and the optimizer."""
    grad_manager = hs.GradManager().attach(net.parameters())

    @amp.autocast()
    def step(x: Tensor, y: Tensor) -> Tensor:
        with grad_manager:
            loss = cross_entropy(net(x), y)
            grad_manager.backward(loss, dy=scaler.scale_factor)
        # Gradients can be edited here, times the scale; after unscale() they are true.
        scaler.unscale(grad_manager.attached_tensors())
        scaler.update()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def torchs(net: nn.Module, optimizer: torch.optim.Optimizer, scaler: amp.GradScaler) -> Step:
    """torch's protocol: scale, step, update."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        with amp.autocast():
            loss = cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def train(name: str, build_step: StepBuilder, data: Batches, seed: int) -> TrainingResult:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).to(DEVICE)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    # The first scale is too high: the first updates are skipped.
    scaler = amp.GradScaler(init_scale=2.0**24, growth_interval=20)
    step = build_step(net, optimizer, scaler)

    losses = []
    scales = []
    for x, y in data:
        scales.append(scaler.scale_factor)  # a copy that stays on the device
        losses.append(step(x, y))
    print(
        f"{name:>10}: loss {losses[-1]:.6f}, scale {scales[-1]:g}, "
        f"{scaler.skipped} of {len(losses)} skipped"
    )
    assert 0 < scaler.skipped < len(losses)
    return TrainingResult(losses, scales, [p.detach() for p in net.parameters()])


def load_batches(full: bool) -> Batches:
    if full:
        images, labels = hs.data.read_split(hs.data.find("fashion-mnist").folder)
    else:
        images, labels = (column[:6_400] for column in hs.data.sample())
    batches = zip(images.split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True)
    return [(x.to(DEVICE) / 255, y.to(DEVICE)) for x, y in batches]


def all_equal(tensors: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--full", action="store_true", help="all of Fashion-MNIST, from HALFSTEP_DATA"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    data = load_batches(args.full)

    first = train("automatic", automatic, data, args.seed)
    for name, build_step in (("manual", manual), ("torchs", torchs)):
        other = train(name, build_step, data, args.seed)
        assert all_equal(first.losses, other.losses)
        assert all_equal(first.scales, other.scales)
        assert all_equal(first.weights, other.weights)
    assert sum(loss.item() for loss in first.losses[-20:]) / 20 < 0.9


if __name__ == "__main__":
    main()
