"""Several iterations, one update, in the manual gear: gradients add up scaled, are unscaled once, edited, applied.

System: MegEngine (automatic mixed precision, the manual gear: accumulate over several iterations).

    python examples/manual_accumulation.py                          # the shipped sample: seconds
    HALFSTEP_DATA=… python examples/manual_accumulation.py --full   # all of Fashion-MNIST, one pass

Targets: at the same scale the manual gear has the bits of the automatic one, `TrainStep(accumulate=4)`; at 2^4, where
MegEngine starts, float16 has lost small gradients; an overflow in any of the four drops the update and nothing else.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import halfstep as hs
from halfstep import amp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CYCLE, CLIP = 4, 1.0
Batches = list[tuple[Tensor, Tensor]]


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).to(DEVICE)
    return net, torch.optim.SGD(net.parameters(), lr=0.2)


def by_hand(data: Batches, seed: int, scale: float) -> tuple[nn.Module, amp.GradScaler]:
    net, optimizer = build(seed)
    gm, scaler = hs.GradManager().attach(net.parameters()), amp.GradScaler(init_scale=scale)
    for i, (x, y) in enumerate(data, start=1):
        with gm:
            with amp.autocast():
                loss = (
                    cross_entropy(net(x), y) / CYCLE
                )  # equal batches: the mean of the means is the mean
            scaler.backward(gm, loss, unscale_grad=False)
        if i % CYCLE == 0:
            scaler.unscale(gm.attached_tensors())
            scaler.update()
            nn.utils.clip_grad_norm_(
                net.parameters(), CLIP
            )  # after unscale: the limit means the same at every scale
            optimizer.step()
            optimizer.zero_grad()
    return net, scaler


def automatic(data: Batches, seed: int) -> nn.Module:
    net, optimizer = build(seed)
    step = hs.TrainStep(
        net, nn.CrossEntropyLoss(), optimizer, precision="O1", accumulate=CYCLE, clip_norm=CLIP
    )
    losses = [step(x, y).cycle_loss for x, y in data][CYCLE - 1 :: CYCLE]
    print(
        "losses of the cycles:",
        " ".join(f"{loss:.4f}" for loss in losses[:8]),
        "…",
        f"{losses[-1]:.4f}",
    )
    assert losses[-1] < 1.1
    return net


def distance(a: nn.Module, b: nn.Module) -> float:
    return max(
        (p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True)
    )


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
    n = 59_904 if args.full else 5_120  # whole cycles of 4 · 32
    data = [
        (x.to(DEVICE) / 255, y.to(DEVICE))
        for x, y in zip(images[:n].split(32), labels[:n].split(32), strict=True)
    ]

    net = automatic(data, args.seed)
    off = {power: distance(net, by_hand(data, args.seed, 2.0**power)[0]) for power in (4, 18)}
    for power, far in off.items():
        print(f"manual at a scale of 2^{power} against automatic: weights off by {far:.1e}")
    assert off[18] == 0 if DEVICE == "cpu" else off[18] < 1e-6, (
        "loss / 4 · 2^18 is loss · 2^16, which O1 starts with"
    )
    assert off[4] > 1e-5, "underflow: the smallest float16 is 6e-8"

    bad = [(x * (torch.inf if i == 2 else 1), y) for i, (x, y) in enumerate(data[:CYCLE])]
    net, scaler = by_hand(bad, args.seed, 2.0**16)
    assert distance(net, build(args.seed)[0]) == 0, "one overflow drops the update"
    assert (scaler.skipped, scaler.get_scale()) == (1, 2.0**15)


if __name__ == "__main__":
    main()
