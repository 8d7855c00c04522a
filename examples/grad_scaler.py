"""GradScaler in both gears, and by torch's protocol: three spellings, the same bits.

System: MegEngine (automatic mixed precision, GradScaler with GradManager), torch-tpu (scale, step, update).

    python examples/grad_scaler.py                          # the shipped sample: seconds
    HALFSTEP_DATA=… python examples/grad_scaler.py --full   # all of Fashion-MNIST, one pass

Target: weights, losses and scales of the three are equal bit by bit, the skipped updates included.
"""

import argparse
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import halfstep as hs
from halfstep import amp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Step = Callable[[Tensor, Tensor], Tensor]


def automatic(net: nn.Module, opt: torch.optim.Optimizer, scaler: amp.GradScaler) -> Step:
    gm = hs.GradManager().attach(net.parameters())

    @amp.autocast()
    def step(x: Tensor, y: Tensor) -> Tensor:
        with gm:
            loss = cross_entropy(net(x), y)
            scaler.backward(
                gm, loss
            )  # scale, backward, unscale, update; on overflow no gradient is left
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def manual(net: nn.Module, opt: torch.optim.Optimizer, scaler: amp.GradScaler) -> Step:
    gm = hs.GradManager().attach(net.parameters())

    @amp.autocast()
    def step(x: Tensor, y: Tensor) -> Tensor:
        with gm:
            loss = cross_entropy(net(x), y)
            gm.backward(loss, dy=scaler.scale_factor)
        # gradients can be edited here, times the scale; after unscale() they are true
        scaler.unscale(gm.attached_tensors())
        scaler.update()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def torchs(net: nn.Module, opt: torch.optim.Optimizer, scaler: amp.GradScaler) -> Step:
    def step(x: Tensor, y: Tensor) -> Tensor:
        with amp.autocast():
            loss = cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        return loss.detach()

    return step


def train(
    gear: Callable[..., Step], data: Iterable[tuple[Tensor, Tensor]], seed: int
) -> tuple[list[Tensor], ...]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).to(DEVICE)
    scaler = amp.GradScaler(
        init_scale=2.0**24, growth_interval=20
    )  # too high: the first updates are skipped
    step = gear(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), scaler)
    losses, scales = [], []
    for x, y in data:
        scales.append(scaler.scale_factor)  # a copy that stays on the device
        losses.append(step(x, y))
    skipped = f"{scaler.skipped} of {len(losses)} skipped"
    print(f"{gear.__name__:>10}: loss {losses[-1]:.6f}, scale {scales[-1]:g}, {skipped}")
    assert 0 < scaler.skipped < len(losses)
    return losses, scales, [p.detach() for p in net.parameters()]


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
        hs.data.read_split(hs.data.find("fashion-mnist").folder) if args.full else hs.data.sample()
    )
    n = len(labels) if args.full else 6_400
    data = [
        (x.to(DEVICE) / 255, y.to(DEVICE))
        for x, y in zip(images[:n].split(64), labels[:n].split(64), strict=True)
    ]
    one, *others = (train(gear, data, args.seed) for gear in (automatic, manual, torchs))
    for other in others:
        for mine, theirs in zip(one, other, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert sum(loss.item() for loss in one[0][-20:]) / 20 < 0.9


if __name__ == "__main__":
    main()
