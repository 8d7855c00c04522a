"""The seed MLP against the peers: 784-512-512-10, batch 64, SGD, 938 steps × 5 epochs of Fashion-MNIST's shape.

    python benchmarks/mlp.py [--json FILE] [--ways halfstep Lightning …] [--precisions fp32 fp16 mixed] [--seconds 110]

Steady: seconds for 5 epochs after a warm-up in the same process (halfstep's own is 6 epochs: a run is polished after
5,000 replays), median of 3; peers that need more than a second are timed over 1 epoch, times 5, and say so. Cold: a
fresh process, from the call of fit to its return, capture included; CUDA's context exists. All read float images (half
for pure fp16) that lie on the device, nothing to convert; with --bytes halfstep reads uint8 and rescales in its step. A
second call with the same --json measures what the first left out.
"""

import argparse
import os
import statistics
import sys
import tempfile
import warnings
from typing import Any

import peers
import rows
import torch
from peers import Clock, Work
from torch import Tensor, nn

import halfstep as hs

LR, BATCH, FULL = 1e-3, 64, 60_000  # the seed's
NAMES = {"fp32": "fp32", "fp16": "fp16", "mixed": "O1"}
COLD = [f"cold {i}" for i in (1, 2, 3)]
EMPTY = [f"cold, caches empty {i}" for i in (1, 2, 3)]
OURS = ["halfstep", "halfstep fused", "halfstep best"]
WAYS = [
    *OURS,
    "Lightning",
    *COLD,
    "CUDA graph by hand",
    "torch eager",
    "Accelerate",
    "torch.compile",
    *EMPTY,
]
NOTES = {
    "halfstep": "as given: torch.optim.SGD(lr=1e-3), fit(5, data)", "halfstep fused": "SGD(fused=True)",
    "halfstep best": "SGD(fused=True), compile=True, polish=True, sink=a whole epoch",
}  # fmt: skip
SLOW = ("Lightning", "Accelerate", "torch eager", "torch.compile")  # 1 epoch a round
BEST = {"fp32": (0.35, 0.30), "fp16": (0.28, 0.22), "mixed": (0.36, 0.28)}  # seconds: must, aim
DEFAULTS = {"fp32": 0.55, "fp16": 0.38, "mixed": 0.58}


def load(samples: int) -> tuple[Tensor, Tensor]:
    """Fashion-MNIST or MNIST where this machine has it, otherwise noise of that shape: uint8 [N, 1, 28, 28]."""
    for name in ("fashion-mnist", "mnist") if samples == FULL else ():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                images, labels = hs.data.read_split(hs.data.find(name).folder, train=True)
        except (OSError, ValueError):
            continue
        if len(labels) == FULL:
            return images.unsqueeze(1), labels
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (samples, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, 10, (samples,), generator=generator)


def job(precision: str, data: tuple[Tensor, Tensor], device: torch.device) -> Work:
    images = (data[0].to(device).float() / 255).to(
        torch.float16 if precision == "fp16" else torch.float32
    )
    steps = -(-len(images) // BATCH)
    return Work(
        build=hs.nets.mlp, images=images, labels=data[1].to(device), batch=BATCH, steps=steps, precision=precision,
        lr=LR,
    )  # fmt: skip


def pipeline(
    data: tuple[Tensor, Tensor], precision: str, device: torch.device, raw: bool
) -> hs.data.Dataset:
    images, labels = data
    if not raw:
        floats = (images.float() / 255).to(torch.float16 if precision == "fp16" else torch.float32)
        made = hs.data.Dataset({"image": floats, "label": labels}, seed=0)
    else:
        made = hs.data.Dataset({"image": images, "label": labels}, seed=0).map(
            hs.data.Rescale(1 / 255), "image"
        )
    return made.shuffle().batch(BATCH).to_device(device)


def model(way: str, precision: str, device: torch.device) -> hs.Model:
    torch.manual_seed(0)
    net = hs.nets.mlp().to(device)
    fused = way != "halfstep" and not way.startswith("cold") and device.type == "cuda"
    optimizer = torch.optim.SGD(net.parameters(), lr=LR, fused=fused or None)
    options: dict[str, Any] = {"compile": True, "polish": True} if way == "halfstep best" else {}
    return hs.Model(net, nn.CrossEntropyLoss(), optimizer, NAMES[precision], **options)


def ours(way: str, precision: str, data: hs.data.Dataset, device: torch.device) -> Clock:
    made = model(way, precision, device)
    sink = data.size if way == "halfstep best" else None
    if not way.startswith("cold"):
        made.fit(2 if way == "halfstep best" else 6, data, sink=sink)
        made.fit(1, data, sink=sink)
    return peers.clocked(lambda passes: made.fit(passes, data, sink=sink), device)


def measure(
    way: str, precision: str, data: tuple[Tensor, Tensor], args: argparse.Namespace
) -> rows.Figures:
    """One row, in a process of its own."""
    device = torch.device(args.device)
    passes = 1 if way in SLOW else args.epochs
    rounds = 1 if way.startswith("cold") else args.rounds
    if way in peers.PEERS:
        peers.switches(precision, convolutions=False)
        clock = peers.PEERS[way](job(precision, data, device))
    else:
        clock = ours(way, precision, pipeline(data, precision, device, args.bytes), device)
    times = clock(rounds, passes)
    note = NOTES.get(way, "one process, defaults" if way.startswith("cold") else "")
    if passes != args.epochs:
        note = f"{args.epochs} × the median of {rounds} single epochs"
    return {
        "way": way, "precision": precision, "seconds": statistics.median(times) * args.epochs / passes,
        "rounds": times, "epochs_per_round": passes, "note": note,
    }  # fmt: skip


def show(figures: rows.Figures) -> str:
    if "error" in figures:
        return f"{figures['row']:32} {'–':>8}  {figures['error']}"
    each = ", ".join(f"{s:.3f}" for s in figures["rounds"])
    note = f"; {figures['note']}" if figures["note"] else ""
    return f"{figures['row']:32} {figures['seconds']:8.3f} s  (rounds {each}{note})"


def summary(table: rows.Table, precisions: list[str], ways: list[str]) -> None:
    """Seconds for all epochs, and how many times Lightning's at the same precision."""
    print(f"\n{'seconds (× faster than Lightning)':32}" + "".join(f"{p:>22}" for p in precisions))
    for way in ways:
        cells = []
        for p in precisions:
            value = table.value(f"{p} {way}")
            times = rows.ratio(table.value(f"{p} Lightning"), value)
            cells.append(
                "–" if value is None else f"{value:.3f}" + (f" ({times:.1f} ×)" if times else "")
            )
        print(f"{way:32}" + "".join(f"{cell:>22}" for cell in cells))


def limits(table: rows.Table) -> list[tuple[str, float | None, float, float | None, bool]]:
    found: list[tuple[str, float | None, float, float | None, bool]] = []
    for p, (must, aim) in BEST.items():
        best = table.value(f"{p} halfstep best")
        found.append((f"best configuration, {p}, s", best, must, aim, False))
        found.append((f"defaults, {p}, s", table.value(f"{p} halfstep"), DEFAULTS[p], None, False))
        for name, each in (("cold defaults", COLD), ("cold defaults, caches empty", EMPTY)):
            values = [v for way in each if (v := table.value(f"{p} {way}")) is not None]
            found.append(
                (f"{name}, {p}, s", statistics.median(values) if values else None, 2.0, 1.0, False)
            )
        found.append(
            (
                f"× faster than Lightning, {p}",
                rows.ratio(table.value(f"{p} Lightning"), best),
                15,
                30,
                True,
            )
        )
    both = rows.ratio(table.value("mixed halfstep best"), table.value("fp32 halfstep best"))
    found.append(("best configuration, mixed / fp32", both, 1.05, None, False))
    return found


def parse() -> argparse.Namespace:
    parser = rows.arguments(__doc__, seconds=110, row_seconds=60)
    parser.add_argument(
        "--ways", nargs="+", default=WAYS, choices=WAYS, metavar="WAY", help=", ".join(WAYS)
    )
    parser.add_argument("--precisions", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--samples", type=int, default=FULL)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--bytes", action="store_true", help="halfstep reads uint8 images and rescales in its step"
    )
    return parser.parse_args()


def child(precision: str, way: str, args: argparse.Namespace) -> None:
    """One row: what it does not have to pay for comes before it is ready."""
    peers.prepare(way)
    rows.context(torch.device(args.device))
    data = load(args.samples)
    with tempfile.TemporaryDirectory(prefix="halfstep-caches-") as folder:
        if way in EMPTY:
            os.environ |= {
                "TRITON_CACHE_DIR": f"{folder}/triton",
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            }
        rows.serve(args.row, lambda: measure(way, precision, data, args), wait=args.wait)


def main() -> None:
    args = parse()
    if args.row:
        precision, _, way = args.row.partition(" ")
        return child(precision, way, args)
    names = [
        f"{p} {way}"
        for way in args.ways
        for p in args.precisions
        if (p, way) != ("fp16", "Accelerate")
    ]
    full = args.device.startswith("cuda") and (args.samples, args.epochs) == (FULL, 5)
    table = rows.Table.open(
        args, batch=BATCH, lr=LR, samples=args.samples, epochs=args.epochs, bytes=args.bytes
    )
    rows.drive([__file__, *sys.argv[1:]], names, table, args, show)
    summary(table, args.precisions, args.ways)
    table.save(
        checks=rows.checks(limits(table)) if full else "limits hold for an H200 at full size"
    )


if __name__ == "__main__":
    main()
