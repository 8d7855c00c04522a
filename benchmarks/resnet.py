"""ResNet-50 at 224 × 224 against the peers: ms a step and memory, batches 32 and 256.

    python benchmarks/resnet.py [--json FILE] [--batches 32 256] [--ways "halfstep O2" …]
                                [--seconds 140]

SGD with momentum 0.9, fused. Each row in a fresh process; the data, two batches of it, lies on the
device. Median of 3 rounds of 100 steps (30 at batch 256, 10 for strict fp32 there), wall time with
the device waited for. Memory is the peak of the whole row, warm-up and capture included, and what
stays reserved after it. "augmented" reads uint8 images of 32 × 32 and crops, flips and resizes them
in the step. The whole table takes longer than --seconds, most of it for compiling: a second call
with the same --json goes on.
"""

import argparse
import statistics
import sys
import time
from functools import partial
from typing import NamedTuple

import peers
import rows
import torch
from peers import Clock, TrainingJob
from rows import Figures, Limit, ResultTable
from torch import Tensor, nn

import halfstep as hs

LEARNING_RATE = 0.01
MOMENTUM = 0.9
RESIDENT_BATCHES = 2  # batches that lie on the device
WARMUP_STEPS = 11
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2023, 0.1994, 0.2010)
GIB = 2**30

# A step at more pixels than this is long: fewer steps are measured.
LONG_STEP_PIXELS = 64 * 224**2
LONG_STEPS = 30
LONG_FP32_STEPS = 10  # strict fp32 takes about 300 ms a step


class HalfstepWay(NamedTuple):
    precision: str
    compiles: bool
    augments: bool = False


class PeerWay(NamedTuple):
    peer: str
    precision: str


HALFSTEP_WAYS = {
    "halfstep O2": HalfstepWay("O2", compiles=False),
    "halfstep O2 augmented": HalfstepWay("O2", compiles=False, augments=True),
    "halfstep tf32": HalfstepWay("tf32", compiles=False),
    "halfstep fp32": HalfstepWay("fp32", compiles=False),
    "halfstep O2 compiled": HalfstepWay("O2", compiles=True),
    "halfstep O2 compiled augmented": HalfstepWay("O2", compiles=True, augments=True),
}
PEER_WAYS = {
    "Lightning 16-mixed": PeerWay("Lightning", "mixed"),
    "torch eager AMP": PeerWay("torch eager", "mixed"),
    "torch eager TF32": PeerWay("torch eager", "tf32"),
    "torch eager fp32": PeerWay("torch eager", "fp32"),
    "CUDA graph by hand AMP": PeerWay("CUDA graph by hand", "mixed"),
    "Accelerate fp16": PeerWay("Accelerate", "mixed"),
    "torch.compile AMP": PeerWay("torch.compile", "mixed"),
}

# In the order in which they are measured: the time may not be enough for all.
WAYS = [
    "halfstep O2",
    "halfstep O2 augmented",
    "Lightning 16-mixed",
    "torch eager AMP",
    "halfstep tf32",
    "halfstep O2 compiled",
    "halfstep fp32",
    "CUDA graph by hand AMP",
    "torch eager TF32",
    "torch eager fp32",
    "Accelerate fp16",
    "halfstep O2 compiled augmented",
    "torch.compile AMP",
]


def random_images(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Images [N, height, width, channels] of float32, between 0 and 1."""
    torch.manual_seed(1)
    return torch.rand(shape, device=device)


def build_job(batch_size: int, precision: str, args: argparse.Namespace) -> TrainingJob:
    """The job of a peer. Strict fp32 stays channels-first: no tensor core convolves it."""
    device = torch.device(args.device)
    channels_last = precision != "fp32"
    count = RESIDENT_BATCHES * batch_size
    images = random_images((count, args.side, args.side, 3), device).permute(0, 3, 1, 2)
    if not channels_last:
        images = images.contiguous()
    return TrainingJob(
        build=partial(hs.nets.load, args.net, classes=10),
        images=images,
        labels=torch.arange(count, device=device) % 10,
        batch_size=batch_size,
        steps=args.steps,
        precision=precision,
        lr=LEARNING_RATE,
        momentum=MOMENTUM,
        warmup_steps=min(WARMUP_STEPS, args.steps),
        shuffled=False,
        channels_last=channels_last,
    )


def build_data(batch_size: int, augments: bool, args: argparse.Namespace) -> hs.data.Dataset:
    """The data of halfstep: as many steps a pass as the peers have, of the same few images."""
    device = torch.device(args.device)
    count = RESIDENT_BATCHES * batch_size
    labels = torch.arange(count, device=device) % 10
    transforms = []
    if augments:
        images = (random_images((count, 32, 32, 3), device) * 255).to(torch.uint8)
        transforms = [
            hs.data.PadCrop(32, 4),
            hs.data.Flip(),
            hs.data.Resize(args.side),
            hs.data.Rescale(1 / 255),
            hs.data.Normalize(MEAN, DEVIATION),
        ]
    else:
        images = random_images((count, args.side, args.side, 3), device)
    data = hs.data.Dataset({"image": images, "label": labels}, seed=0)
    data = data.map([*transforms, hs.data.ToCHW(channels_last=True)], "image")
    passes = -(-args.steps // RESIDENT_BATCHES)
    return data.shuffle().batch(batch_size).repeat(passes).take(args.steps).to_device(device)


def halfstep_clock(way: HalfstepWay, batch_size: int, args: argparse.Namespace) -> Clock:
    """halfstep's fit, warmed up. It is polished at once; a long run comes to it by itself."""
    device = torch.device(args.device)
    data = build_data(batch_size, way.augments, args)
    torch.manual_seed(0)
    net = hs.nets.load(args.net, classes=10).to(device)
    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=LEARNING_RATE,
        momentum=MOMENTUM,
        fused=True if device.type == "cuda" else None,
    )
    model = hs.Model(
        net,
        nn.CrossEntropyLoss(),
        optimizer,
        way.precision,
        compile=way.compiles,
        polish=True,
    )

    def train(steps: int) -> None:
        part = data if steps == args.steps else data.take(steps)
        model.fit(1, part, sink=steps, progress=False)

    train(min(WARMUP_STEPS, args.steps))
    train(args.steps)
    return peers.clock_of(lambda passes: train(args.steps), device)


def peer_clock(way: PeerWay, batch_size: int, args: argparse.Namespace) -> Clock:
    peers.set_torch_flags(way.precision, convolutions=True)
    return peers.PEERS[way.peer](build_job(batch_size, way.precision, args))


def measure(way: str, batch_size: int, args: argparse.Namespace) -> Figures:
    """One row, in a process of its own."""
    start = time.perf_counter()
    if batch_size * args.side**2 > LONG_STEP_PIXELS:
        max_steps = LONG_FP32_STEPS if way.endswith("fp32") else LONG_STEPS
        args.steps = min(args.steps, max_steps)
    if way in HALFSTEP_WAYS:
        clock = halfstep_clock(HALFSTEP_WAYS[way], batch_size, args)
    else:
        clock = peer_clock(PEER_WAYS[way], batch_size, args)
    warmup_s = time.perf_counter() - start

    rounds_ms = [seconds / args.steps * 1e3 for seconds in clock(args.rounds, 1)]
    step_ms = statistics.median(rounds_ms)
    return {
        "way": way,
        "batch": batch_size,
        "ms": step_ms,
        "rounds": rounds_ms,
        "steps": args.steps,
        "images_per_s": round(batch_size / step_ms * 1e3),
        "warm_s": round(warmup_s, 1),
        **measure_memory(torch.device(args.device)),
    }


def measure_memory(device: torch.device) -> dict[str, float | None]:
    """Peaks of this process in GiB, and what stays reserved: what a captured graph needs."""
    if device.type != "cuda":
        return {"allocated_gib": None, "reserved_gib": None, "stays_gib": None}
    allocated = torch.cuda.max_memory_allocated(device)
    reserved = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    stays = torch.cuda.memory_reserved(device)
    return {
        "allocated_gib": allocated / GIB,
        "reserved_gib": reserved / GIB,
        "stays_gib": stays / GIB,
    }


def format_row(figures: Figures) -> str:
    if "error" in figures:
        return f"{figures['row']:36} {'–':>8}     {figures['error']}"
    low = min(figures["rounds"])
    high = max(figures["rounds"])
    memory = [figures[key] for key in ("allocated_gib", "reserved_gib", "stays_gib")]
    memory_text = " / ".join("–" if gib is None else f"{gib:.2f}" for gib in memory)
    return (
        f"{figures['row']:36} {figures['ms']:8.2f} ms  {figures['images_per_s']:>6} img/s  "
        f"{memory_text:>20} GiB  ({figures['steps']} steps, {low:.2f}–{high:.2f})"
    )


def list_limits(table: ResultTable, batch_sizes: list[int]) -> list[Limit]:
    """Limits for an H200. O2 is the faster of its two ways, compiled or not."""
    o2_ways = ("halfstep O2", "halfstep O2 compiled")

    def step_ms(batch_size: int, *ways: str) -> float | None:
        return min(table.values((f"{batch_size} {way}" for way in ways), "ms"), default=None)

    o2_32_ms = step_ms(32, *o2_ways)
    o2_256_ms = step_ms(256, *o2_ways)
    lightning_32_ms = step_ms(32, "Lightning 16-mixed")
    limits = [
        Limit("b32, O2, ms", o2_32_ms, 7.3, 6.0),
        Limit(
            "b32, O2, × faster than Lightning",
            rows.divide(lightning_32_ms, o2_32_ms),
            must=2.9,
            larger_is_better=True,
        ),
        Limit(
            "b32, O2, GiB allocated",
            table.value("32 halfstep O2", "allocated_gib"),
            must=2.3,
            aim=table.value("32 torch eager AMP", "allocated_gib"),
        ),
        Limit("b256, O2, ms", o2_256_ms, 36.0, 30.0),
        Limit(
            "b256, O2 × faster than strict fp32",
            rows.divide(step_ms(256, "halfstep fp32"), o2_256_ms),
            must=6.0,
            larger_is_better=True,
        ),
        Limit(
            "b256, O2 × faster than TF32",
            rows.divide(step_ms(256, "halfstep tf32"), o2_256_ms),
            must=2.2,
            larger_is_better=True,
        ),
    ]
    for batch_size in batch_sizes:
        for way in o2_ways:
            ratio = rows.divide(step_ms(batch_size, f"{way} augmented"), step_ms(batch_size, way))
            percent = None if ratio is None else (ratio - 1) * 100
            limits.append(Limit(f"b{batch_size}, {way}: augmentation, %", percent, 1.0))
    return limits


def parse_arguments() -> argparse.Namespace:
    parser = rows.build_parser(__doc__, seconds=140, row_seconds=110)
    parser.add_argument(
        "--ways", nargs="+", default=WAYS, choices=WAYS, metavar="WAY", help=", ".join(WAYS)
    )
    parser.add_argument("--batches", nargs="+", type=int, default=[32, 256])
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--net", default="resnet50")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def run_child(args: argparse.Namespace) -> None:
    """One row. What it does not have to pay for comes before it is ready."""
    batch_size, _, way = args.row.partition(" ")
    if way in PEER_WAYS:
        peers.import_peer(PEER_WAYS[way].peer)
    elif "compiled" in way:
        peers.import_peer("torch.compile")
    rows.create_cuda_context(torch.device(args.device))
    rows.serve_row(args.row, lambda: measure(way, int(batch_size), args), wait=args.wait)


def main() -> None:
    args = parse_arguments()
    if args.row:
        run_child(args)
        return
    table = ResultTable.open(
        args, net=args.net, lr=LEARNING_RATE, momentum=MOMENTUM, side=args.side
    )
    names = [f"{batch_size} {way}" for way in args.ways for batch_size in args.batches]
    print(f"{'':36} {'step':>11}  {'':>12}  {'allocated / reserved / stays':>24}")
    rows.measure_missing_rows([__file__, *sys.argv[1:]], names, table, args, format_row)

    is_full_size = args.net == "resnet50" and args.side == 224 and args.steps == 100
    if args.device.startswith("cuda") and is_full_size:
        table.save(checks=rows.check_limits(list_limits(table, args.batches)))
    else:
        table.save(checks="limits hold for an H200 at full size")


if __name__ == "__main__":
    main()
