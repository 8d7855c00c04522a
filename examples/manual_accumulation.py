"""Several iterations, one update, in the manual gear.

Gradients add up scaled, are unscaled once, edited, applied.

System: MegEngine (automatic mixed precision, the manual gear: accumulate over several iterations).

    python examples/manual_accumulation.py                          # the shipped sample: seconds
    HALFSTEP_DATA=… python examples/manual_accumulation.py --full   # all of Fashion-MNIST, one pass

Targets: at the same scale the manual gear has the bits of the automatic one,
`TrainStep(accumulate=4)`; at 2^4, where MegEngine starts, float16 has lost small gradients; an
overflow in any of the four drops the update and nothing else.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import halfstep as hs
from halfstep import amp

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CYCLE = 4  # batches to an update
BATCH_SIZE = 32
CLIP_NORM = 1.0

Batches = list[tuple[Tensor, Tensor]]


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).to(DEVICE)
    return net, torch.optim.SGD(net.parameters(), lr=0.2)


def train_by_hand(data: Batches, seed: int, init_scale: float) -> tuple[nn.Module, amp.GradScaler]:
    """The manual gear: the user adds up, unscales, clips and applies the gradients."""
    net, optimizer = build(seed)
    grad_manager = hs.GradManager().attach(net.parameters())
    scaler = amp.GradScaler(init_scale=init_scale)
    for i, (x, y) in enumerate(data, start=1):
        with grad_manager:
            with amp.autocast():
                # Batches are of one size, so the mean of the means is the mean.
                loss = cross_entropy(net(x), y) / CYCLE
            scaler.backward(grad_manager, loss, unscale_grad=False)
        if i % CYCLE == 0:
            scaler.unscale(grad_manager.attached_tensors())
            scaler.update()
            # After unscale, so that the limit means the same at every scale.
            nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return net, scaler


def train_automatically(data: Batches, seed: int) -> nn.Module:
    """The same with one TrainStep."""
    net, optimizer = build(seed)
    step = hs.TrainStep(
        net,
        nn.CrossEntropyLoss(),
        optimizer,
        precision="O1",
        accumulate=CYCLE,
        clip_norm=CLIP_NORM,
    )
    batch_losses = [step(x, y).cycle_loss for x, y in data]
    losses = batch_losses[CYCLE - 1 :: CYCLE]
    first_losses = " ".join(f"{loss:.4f}" for loss in losses[:8])
    print("losses of the cycles:", first_losses, "…", f"{losses[-1]:.4f}")
    assert losses[-1] < 1.1
    return net


def max_difference(net: nn.Module, other: nn.Module) -> float:
    """The largest difference between two weights."""
    pairs = zip(net.parameters(), other.parameters(), strict=True)
    return max((p - q).abs().max().item() for p, q in pairs)


def load_batches(full: bool) -> Batches:
    """Whole cycles of 4 · 32 samples."""
    if full:
        images, labels = hs.data.read_split(hs.data.find("fashion-mnist").folder)
        count = 59_904
    else:
        images, labels = hs.data.sample()
        count = 5_120
    image_batches = images[:count].split(BATCH_SIZE)
    label_batches = labels[:count].split(BATCH_SIZE)
    batches = zip(image_batches, label_batches, strict=True)
    return [(x.to(DEVICE) / 255, y.to(DEVICE)) for x, y in batches]


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

    # At 2^18 the scaled loss is that of O1, which starts at 2^16: loss / 4 · 2^18 = loss · 2^16.
    automatic_net = train_automatically(data, args.seed)
    differences = {}
    for power in (4, 18):
        manual_net, _ = train_by_hand(data, args.seed, 2.0**power)
        differences[power] = max_difference(automatic_net, manual_net)
    for power, difference in differences.items():
        print(f"manual at a scale of 2^{power} against automatic: weights off by {difference:.1e}")
    if DEVICE == "cpu":
        assert differences[18] == 0, "the same scaled loss, the same bits"
    else:
        assert differences[18] < 1e-6, "the same scaled loss"
    assert differences[4] > 1e-5, "underflow: the smallest float16 is 6e-8"

    # An overflow in the third batch of a cycle.
    cycle = list(data[:CYCLE])
    x, y = cycle[2]
    cycle[2] = (x * torch.inf, y)
    net, scaler = train_by_hand(cycle, args.seed, 2.0**16)
    untrained_net, _ = build(args.seed)
    assert max_difference(net, untrained_net) == 0, "one overflow drops the update"
    assert scaler.skipped == 1
    assert scaler.get_scale() == 2.0**15


if __name__ == "__main__":
    main()
