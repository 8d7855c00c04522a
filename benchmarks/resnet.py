"""ResNet-50 at 224 × 224 against the peers: ms a step and memory, batches 32 and 256, SGD with momentum 0.9 (fused).

    python benchmarks/resnet.py [--json FILE] [--batches 32 256] [--ways "halfstep O2" …] [--seconds 140]

Each row in a fresh process; the data, two batches of it, lies on the device. Median of 3 rounds of 100 steps (30 at
batch 256, 10 for strict fp32 there), wall time with the device waited for. Memory is the peak of the whole row, warm-up
and capture included, and what stays reserved after it. "augmented" reads uint8 images of 32 × 32 and crops, flips and
resizes them in the step. The whole table takes longer than --seconds, most of it for compiling: a second call with the
same --json goes on.
"""

import argparse
import statistics
import sys
import time
from functools import partial
from typing import Any

import peers
import rows
import torch
from peers import Clock, Work
from torch import Tensor, nn

import halfstep as hs

LR, MOMENTUM, READY = 0.01, 0.9, 2  # batches that lie on the device
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
OURS: dict[str, tuple[str, dict[str, Any]]] = {
    "halfstep O2": ("O2", {"compile": False}), "halfstep O2 augmented": ("O2", {"compile": False}),
    "halfstep tf32": ("tf32", {"compile": False}), "halfstep fp32": ("fp32", {"compile": False}),
    "halfstep O2 compiled": ("O2", {"compile": True}), "halfstep O2 compiled augmented": ("O2", {"compile": True}),
}  # fmt: skip
POLISH = {"polish": True}  # at once: a long run comes to it by itself
THEIRS = {
    "Lightning 16-mixed": ("Lightning", "mixed"), "torch eager AMP": ("torch eager", "mixed"),
    "torch eager TF32": ("torch eager", "tf32"), "torch eager fp32": ("torch eager", "fp32"),
    "CUDA graph by hand AMP": ("CUDA graph by hand", "mixed"), "Accelerate fp16": ("Accelerate", "mixed"),
    "torch.compile AMP": ("torch.compile", "mixed"),
}  # fmt: skip
WAYS = [
    "halfstep O2", "halfstep O2 augmented", "Lightning 16-mixed", "torch eager AMP", "halfstep tf32",
    "halfstep O2 compiled", "halfstep fp32", "CUDA graph by hand AMP", "torch eager TF32", "torch eager fp32",
    "Accelerate fp16", "halfstep O2 compiled augmented", "torch.compile AMP",
]  # fmt: skip
GIB = 2**30


def noise(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Images [N, height, width, channels] of float32, between 0 and 1."""
    torch.manual_seed(1)
    return torch.rand(shape, device=device)


def job(batch: int, precision: str, args: argparse.Namespace) -> Work:
    """Strict fp32 stays channels-first: no tensor core convolves it."""
    device, last = torch.device(args.device), precision != "fp32"
    images = noise((READY * batch, args.side, args.side, 3), device).permute(0, 3, 1, 2)
    return Work(
        build=partial(hs.nets.load, args.net, classes=10), images=images if last else images.contiguous(),
        labels=torch.arange(READY * batch, device=device) % 10, batch=batch, steps=args.steps, precision=precision,
        lr=LR, momentum=MOMENTUM, warm=min(11, args.steps), shuffled=False, channels_last=last,
    )  # fmt: skip


def pipeline(batch: int, augmented: bool, args: argparse.Namespace) -> hs.data.Dataset:
    """As many steps a pass as the peers have; the same few images again and again."""
    device, count = torch.device(args.device), READY * batch
    labels = torch.arange(count, device=device) % 10
    if augmented:
        images = (noise((count, 32, 32, 3), device) * 255).to(torch.uint8)
        chain = [hs.data.PadCrop(32, 4), hs.data.Flip(), hs.data.Resize(args.side)]
        chain += [hs.data.Rescale(1 / 255), hs.data.Normalize(MEAN, STD)]
    else:
        images, chain = noise((count, args.side, args.side, 3), device), []
    made = hs.data.Dataset({"image": images, "label": labels}, seed=0)
    made = made.map([*chain, hs.data.ToCHW(channels_last=True)], "image")
    return (
        made.shuffle()
        .batch(batch)
        .repeat(-(-args.steps // READY))
        .take(args.steps)
        .to_device(device)
    )


def ours(way: str, batch: int, args: argparse.Namespace) -> Clock:
    precision, options = OURS[way]
    device, data = torch.device(args.device), pipeline(batch, "augmented" in way, args)
    torch.manual_seed(0)
    net = hs.nets.load(args.net, classes=10).to(device)
    fused = device.type == "cuda"
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, momentum=MOMENTUM, fused=fused or None)
    model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, precision, **options, **POLISH)

    def train(steps: int) -> None:
        part = data if steps == args.steps else data.take(steps)
        model.fit(1, part, sink=steps)

    train(min(11, args.steps))
    train(args.steps)
    return peers.clocked(lambda passes: train(args.steps), device)


def theirs(way: str, batch: int, args: argparse.Namespace) -> Clock:
    peer, precision = THEIRS[way]
    peers.switches(precision, convolutions=True)
    return peers.PEERS[peer](job(batch, precision, args))


def measure(way: str, batch: int, args: argparse.Namespace) -> rows.Figures:
    """One row, in a process of its own."""
    start = time.perf_counter()
    if batch * args.side**2 > 64 * 224**2:
        args.steps = min(
            args.steps, 10 if way.endswith("fp32") else 30
        )  # strict fp32 takes about 300 ms a step
    clock = (ours if way in OURS else theirs)(way, batch, args)
    warm_s = time.perf_counter() - start
    times = clock(args.rounds, 1)
    each = [seconds / args.steps * 1e3 for seconds in times]
    return {
        "way": way, "batch": batch, "ms": statistics.median(each), "rounds": each, "steps": args.steps,
        "images_per_s": round(batch / statistics.median(each) * 1e3), "warm_s": round(warm_s, 1),
        **memory(torch.device(args.device)),
    }  # fmt: skip


def memory(device: torch.device) -> dict[str, float | None]:
    if device.type != "cuda":
        return {"allocated_gib": None, "reserved_gib": None, "stays_gib": None}
    allocated, reserved = (
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
    )
    torch.cuda.empty_cache()  # what a captured graph needs stays
    stays = torch.cuda.memory_reserved(device)
    return {
        "allocated_gib": allocated / GIB,
        "reserved_gib": reserved / GIB,
        "stays_gib": stays / GIB,
    }


def show(figures: rows.Figures) -> str:
    if "error" in figures:
        return f"{figures['row']:36} {'–':>8}     {figures['error']}"
    low, high = min(figures["rounds"]), max(figures["rounds"])
    held = [figures[key] for key in ("allocated_gib", "reserved_gib", "stays_gib")]
    gib = " / ".join("–" if value is None else f"{value:.2f}" for value in held)
    steps = f"{figures['steps']} steps, {low:.2f}–{high:.2f}"
    return f"{figures['row']:36} {figures['ms']:8.2f} ms  {figures['images_per_s']:>6} img/s  {gib:>20} GiB  ({steps})"


def limits(
    table: rows.Table, batches: list[int]
) -> list[tuple[str, float | None, float, float | None, bool]]:
    def ms(batch: int, *ways: str) -> float | None:
        found = [v for way in ways if (v := table.value(f"{batch} {way}", "ms")) is not None]
        return min(found) if found else None

    both = ("halfstep O2", "halfstep O2 compiled")
    gib = table.value("32 halfstep O2", "allocated_gib")
    eager = table.value("32 torch eager AMP", "allocated_gib")
    found = [
        ("b32, O2, ms", ms(32, *both), 7.3, 6.0, False),
        ("b32, O2, × faster than Lightning", rows.ratio(ms(32, "Lightning 16-mixed"), ms(32, *both)), 2.9, None, True),
        ("b32, O2, GiB allocated", gib, 2.3, eager, False),
        ("b256, O2, ms", ms(256, *both), 36.0, 30.0, False),
        ("b256, O2 × faster than strict fp32", rows.ratio(ms(256, "halfstep fp32"), ms(256, *both)), 6.0, None, True),
        ("b256, O2 × faster than TF32", rows.ratio(ms(256, "halfstep tf32"), ms(256, *both)), 2.2, None, True),
    ]  # fmt: skip
    for batch in batches:
        for way in both:
            more = rows.ratio(ms(batch, f"{way} augmented"), ms(batch, way))
            percent = None if more is None else (more - 1) * 100
            found.append((f"b{batch}, {way}: augmentation, %", percent, 1.0, None, False))
    return found


def parse() -> argparse.Namespace:
    parser = rows.arguments(__doc__, seconds=140, row_seconds=110)
    parser.add_argument(
        "--ways", nargs="+", default=WAYS, choices=WAYS, metavar="WAY", help=", ".join(WAYS)
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 256])
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--net", default="resnet50")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.row:
        batch, _, way = args.row.partition(" ")
        peers.prepare(THEIRS.get(way, ("torch.compile" if "compiled" in way else "",))[0])
        rows.context(torch.device(args.device))
        return rows.serve(args.row, lambda: measure(way, int(batch), args), wait=args.wait)
    table = rows.Table.open(args, net=args.net, lr=LR, momentum=MOMENTUM, side=args.side)
    names = [f"{batch} {way}" for way in args.ways for batch in args.batches]
    print(f"{'':36} {'step':>11}  {'':>12}  {'allocated / reserved / stays':>24}")
    rows.drive([__file__, *sys.argv[1:]], names, table, args, show)
    full = args.device.startswith("cuda") and (args.net, args.side, args.steps) == (
        "resnet50",
        224,
        100,
    )
    table.save(
        checks=rows.checks(limits(table, args.batches))
        if full
        else "limits hold for an H200 at full size"
    )


if __name__ == "__main__":
    main()
