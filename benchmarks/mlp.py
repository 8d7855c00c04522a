"""The benchmark MLP against the peers: 784-512-512-10, batch 64, SGD, Fashion-MNIST's shape.

    python benchmarks/mlp.py [--json FILE] [--ways halfstep Lightning …]
                             [--precisions fp32 fp16 mixed] [--seconds 110]

An epoch is 938 steps. Steady: seconds for 5 epochs after a warm-up in the same process (halfstep's
own is 6 epochs: a run is polished after 5,000 replays), median of 3; peers that need more than a
second are timed over 1 epoch, times 5, and say so. Cold: a fresh process, from the call of fit to
its return, capture included; CUDA's context exists. All read float images (half for pure fp16) that
lie on the device, nothing to convert; with --bytes halfstep reads uint8 and rescales in its step. A
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
from peers import Clock, TrainingJob
from rows import Figures, Limit, ResultTable
from torch import Tensor, nn

import halfstep as hs

# The seed's.
LEARNING_RATE = 1e-3
BATCH_SIZE = 64
FULL_SAMPLES = 60_000
FULL_EPOCHS = 5

# Precision of a row → halfstep's name for it.
PRECISION_NAMES = {"fp32": "fp32", "fp16": "fp16", "mixed": "O1"}

COLD_WAYS = [f"cold {i}" for i in (1, 2, 3)]
EMPTY_CACHE_WAYS = [f"cold, caches empty {i}" for i in (1, 2, 3)]
WAYS = [
    "halfstep",
    "halfstep fused",
    "halfstep best",
    "Lightning",
    *COLD_WAYS,
    "CUDA graph by hand",
    "torch eager",
    "Accelerate",
    "torch.compile",
    *EMPTY_CACHE_WAYS,
]
SLOW_WAYS = ("Lightning", "Accelerate", "torch eager", "torch.compile")  # 1 epoch a round
NOTES = {
    "halfstep": "as given: torch.optim.SGD(lr=1e-3), fit(5, data)",
    "halfstep fused": "SGD(fused=True)",
    "halfstep best": "SGD(fused=True), compile=True, polish=True, sink=a whole epoch",
}

# Warm-up of halfstep, in epochs: a run is polished after 5,000 replays, "best" is at once.
WARMUP_EPOCHS = 6
BEST_WARMUP_EPOCHS = 2

# Limits for an H200, in seconds.
BEST_MUST_S = {"fp32": 0.35, "fp16": 0.28, "mixed": 0.36}
BEST_AIM_S = {"fp32": 0.30, "fp16": 0.22, "mixed": 0.28}
DEFAULTS_MUST_S = {"fp32": 0.55, "fp16": 0.38, "mixed": 0.58}
COLD_MUST_S = 2.0
COLD_AIM_S = 1.0

Split = tuple[Tensor, Tensor]


def load_split(samples: int) -> Split:
    """uint8 images [N, 1, 28, 28] and labels.

    Fashion-MNIST or MNIST where this machine has it in full, otherwise noise of that shape.
    """
    names = ("fashion-mnist", "mnist") if samples == FULL_SAMPLES else ()
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                images, labels = hs.data.read_split(hs.data.find(name).folder, train=True)
        except (OSError, ValueError):
            continue
        if len(labels) == FULL_SAMPLES:
            return images.unsqueeze(1), labels
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (samples, 1, 28, 28), dtype=torch.uint8, generator=generator)
    return images, torch.randint(0, 10, (samples,), generator=generator)


def image_dtype(precision: str) -> torch.dtype:
    return torch.float16 if precision == "fp16" else torch.float32


def build_job(precision: str, split: Split, device: torch.device) -> TrainingJob:
    """The job of a peer."""
    images, labels = split
    return TrainingJob(
        build=hs.nets.mlp,
        images=(images.to(device).float() / 255).to(image_dtype(precision)),
        labels=labels.to(device),
        batch_size=BATCH_SIZE,
        steps=-(-len(images) // BATCH_SIZE),
        precision=precision,
        lr=LEARNING_RATE,
    )


def build_data(
    split: Split, precision: str, device: torch.device, as_bytes: bool
) -> hs.data.Dataset:
    """The data of halfstep: floats, or bytes that are rescaled in the step."""
    images, labels = split
    if as_bytes:
        data = hs.data.Dataset({"image": images, "label": labels}, seed=0)
        data = data.map(hs.data.Rescale(1 / 255), "image")
    else:
        floats = (images.float() / 255).to(image_dtype(precision))
        data = hs.data.Dataset({"image": floats, "label": labels}, seed=0)
    return data.shuffle().batch(BATCH_SIZE).to_device(device)


def build_model(way: str, precision: str, device: torch.device) -> hs.Model:
    torch.manual_seed(0)
    net = hs.nets.mlp().to(device)
    has_fused_optimizer = way in ("halfstep fused", "halfstep best") and device.type == "cuda"
    optimizer = torch.optim.SGD(
        net.parameters(), lr=LEARNING_RATE, fused=has_fused_optimizer or None
    )
    options: dict[str, Any] = {}
    if way == "halfstep best":
        options = {"compile": True, "polish": True}
    return hs.Model(net, nn.CrossEntropyLoss(), optimizer, PRECISION_NAMES[precision], **options)


def halfstep_clock(way: str, precision: str, data: hs.data.Dataset, device: torch.device) -> Clock:
    """halfstep's fit, warmed up unless it is to be measured cold."""
    model = build_model(way, precision, device)
    is_best = way == "halfstep best"
    sink = data.size if is_best else None
    if not way.startswith("cold"):
        model.fit(BEST_WARMUP_EPOCHS if is_best else WARMUP_EPOCHS, data, sink=sink, progress=False)
        model.fit(1, data, sink=sink, progress=False)
    return peers.clock_of(lambda passes: model.fit(passes, data, sink=sink, progress=False), device)


def measure(way: str, precision: str, split: Split, args: argparse.Namespace) -> Figures:
    """One row, in a process of its own."""
    device = torch.device(args.device)
    is_cold = way.startswith("cold")
    passes = 1 if way in SLOW_WAYS else args.epochs
    rounds = 1 if is_cold else args.rounds
    if way in peers.PEERS:
        peers.set_torch_flags(precision, convolutions=False)
        clock = peers.PEERS[way](build_job(precision, split, device))
    else:
        data = build_data(split, precision, device, args.bytes)
        clock = halfstep_clock(way, precision, data, device)
    times_s = clock(rounds, passes)

    note = "one process, defaults" if is_cold else NOTES.get(way, "")
    if passes != args.epochs:
        note = f"{args.epochs} × the median of {rounds} single epochs"
    return {
        "way": way,
        "precision": precision,
        "seconds": statistics.median(times_s) * args.epochs / passes,
        "rounds": times_s,
        "epochs_per_round": passes,
        "note": note,
    }


def format_row(figures: Figures) -> str:
    if "error" in figures:
        return f"{figures['row']:32} {'–':>8}  {figures['error']}"
    rounds = ", ".join(f"{seconds:.3f}" for seconds in figures["rounds"])
    note = f"; {figures['note']}" if figures["note"] else ""
    return f"{figures['row']:32} {figures['seconds']:8.3f} s  (rounds {rounds}{note})"


def print_summary(table: ResultTable, precisions: list[str], ways: list[str]) -> None:
    """Seconds for all epochs, and how many times Lightning's at the same precision."""
    header = "".join(f"{precision:>22}" for precision in precisions)
    print(f"\n{'seconds (× faster than Lightning)':32}{header}")
    for way in ways:
        cells = ""
        for precision in precisions:
            seconds = table.value(f"{precision} {way}")
            speedup = rows.divide(table.value(f"{precision} Lightning"), seconds)
            cell = "–" if seconds is None else f"{seconds:.3f}"
            if speedup:
                cell += f" ({speedup:.1f} ×)"
            cells += f"{cell:>22}"
        print(f"{way:32}{cells}")


def list_limits(table: ResultTable) -> list[Limit]:
    limits = []
    for precision in PRECISION_NAMES:
        best_s = table.value(f"{precision} halfstep best")
        defaults_s = table.value(f"{precision} halfstep")
        lightning_s = table.value(f"{precision} Lightning")
        limits += [
            Limit(
                f"best configuration, {precision}, s",
                best_s,
                BEST_MUST_S[precision],
                BEST_AIM_S[precision],
            ),
            Limit(f"defaults, {precision}, s", defaults_s, DEFAULTS_MUST_S[precision]),
        ]
        for name, ways in (
            ("cold defaults", COLD_WAYS),
            ("cold defaults, caches empty", EMPTY_CACHE_WAYS),
        ):
            cold_s = table.values(f"{precision} {way}" for way in ways)
            median_s = statistics.median(cold_s) if cold_s else None
            limits.append(Limit(f"{name}, {precision}, s", median_s, COLD_MUST_S, COLD_AIM_S))
        limits.append(
            Limit(
                f"× faster than Lightning, {precision}",
                rows.divide(lightning_s, best_s),
                must=15,
                aim=30,
                larger_is_better=True,
            )
        )
    mixed_to_fp32 = rows.divide(
        table.value("mixed halfstep best"), table.value("fp32 halfstep best")
    )
    limits.append(Limit("best configuration, mixed / fp32", mixed_to_fp32, 1.05))
    return limits


def parse_arguments() -> argparse.Namespace:
    parser = rows.build_parser(__doc__, seconds=110, row_seconds=60)
    parser.add_argument(
        "--ways", nargs="+", default=WAYS, choices=WAYS, metavar="WAY", help=", ".join(WAYS)
    )
    precisions = list(PRECISION_NAMES)
    parser.add_argument("--precisions", nargs="+", default=precisions, choices=precisions)
    parser.add_argument("--samples", type=int, default=FULL_SAMPLES)
    parser.add_argument("--epochs", type=int, default=FULL_EPOCHS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--bytes", action="store_true", help="halfstep reads uint8 images and rescales in its step"
    )
    return parser.parse_args()


def run_child(args: argparse.Namespace) -> None:
    """One row. What it does not have to pay for comes before it is ready."""
    precision, _, way = args.row.partition(" ")
    peers.import_peer(way)
    rows.create_cuda_context(torch.device(args.device))
    split = load_split(args.samples)
    with tempfile.TemporaryDirectory(prefix="halfstep-caches-") as folder:
        if way in EMPTY_CACHE_WAYS:
            os.environ["TRITON_CACHE_DIR"] = f"{folder}/triton"
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/inductor"
        rows.serve_row(args.row, lambda: measure(way, precision, split, args), wait=args.wait)


def main() -> None:
    args = parse_arguments()
    if args.row:
        run_child(args)
        return
    names = []
    for way in args.ways:
        for precision in args.precisions:
            if way == "Accelerate" and precision == "fp16":
                continue  # it has no training in pure float16
            names.append(f"{precision} {way}")
    table = ResultTable.open(
        args,
        batch=BATCH_SIZE,
        lr=LEARNING_RATE,
        samples=args.samples,
        epochs=args.epochs,
        bytes=args.bytes,
    )
    rows.measure_missing_rows([__file__, *sys.argv[1:]], names, table, args, format_row)
    print_summary(table, args.precisions, args.ways)

    is_full_size = args.samples == FULL_SAMPLES and args.epochs == FULL_EPOCHS
    if args.device.startswith("cuda") and is_full_size:
        table.save(checks=rows.check_limits(list_limits(table)))
    else:
        table.save(checks="limits hold for an H200 at full size")


if __name__ == "__main__":
    main()
