"""ResNet-50 on CIFAR-10 as the seed trains it: 10 epochs, batch 32, momentum 0.9, poly schedule.

    python benchmarks/cifar.py --archive cifar10-jpeg-q75.tar.xz [--precisions tf32 O2 O3]
                               [--seeds 0 1 2] [--json FILE]

The archive holds JPEGs as split/class/number; they are decoded once, into --cache, and processes
that start together share that. Images are cropped, flipped and resized to 224 on the device, in the
step. The network starts as torchvision's; --variant seed starts as MindSpore's lab does, from
weights of 0.01 · normal, and learns more slowly. Step and epoch times leave evaluation out;
accuracy is over all 10,000 test images. Try it out: --epochs 1 --steps 20. Runs of several
processes become one table with --merge FILE …
"""

import argparse
import fcntl
import io
import json
import statistics
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import conditions
from rows import Limit, ResultTable, check_limits, describe_error
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine import Callback, Run

BATCH_SIZE = 32
TEST_BATCH_SIZE = 250
MOMENTUM = 0.9

# The seed's schedule: from 0.01 up to 0.1 over half of all updates, then down as a square.
LEARNING_RATE = 0.1
START_LEARNING_RATE = 0.01
WARMUP_FRACTION = 0.5

MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2023, 0.1994, 0.2010)
TARGET_ACCURACY = 0.848
MAX_DIFFERENCE = 0.005  # of accuracy, O2 from tf32
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
GIB = 2**30

Split = tuple[Tensor, Tensor]


def decode_archive(archive: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Images and labels by split, sorted by (number, class): any part of them has every class."""
    from PIL import Image

    images: dict[str, dict[tuple[int, int], np.ndarray]] = {"train": {}, "test": {}}
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is None:
                continue  # a folder
            split, class_name, file_name = member.name.split("/")[-3:]
            number = int(file_name.split(".")[0])
            label = CLASSES.index(class_name)
            with Image.open(io.BytesIO(file.read())) as image:
                images[split][number, label] = np.asarray(image.convert("RGB"))

    splits = {}
    for split, images_by_key in images.items():
        keys = sorted(images_by_key)
        labels = [label for _, label in keys]
        stacked = np.stack([images_by_key[key] for key in keys])
        splits[split] = (stacked, np.array(labels, np.int64))
    return splits


def load_splits(archive: str, cache: Path) -> tuple[Split, Split]:
    """Train and test as uint8 [N, 32, 32, 3] and int64. One process decodes, others wait for it."""
    cache.mkdir(parents=True, exist_ok=True)
    # Of this archive, not of another one before it.
    done_mark = cache / f"done-{Path(archive).stat().st_size}"
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done_mark.exists():
            for split, (images, labels) in decode_archive(Path(archive)).items():
                np.save(cache / f"{split}-images.npy", images)
                np.save(cache / f"{split}-labels.npy", labels)
            done_mark.touch()
    return read_split(cache, "train"), read_split(cache, "test")


def read_split(cache: Path, split: str) -> Split:
    images = torch.from_numpy(np.load(cache / f"{split}-images.npy"))
    labels = torch.from_numpy(np.load(cache / f"{split}-labels.npy"))
    return images, labels


def build_data(
    split: Split, device: torch.device, side: int, seed: int, *, train: bool
) -> hs.data.Dataset:
    images, labels = split
    augment = [hs.data.PadCrop(32, 4), hs.data.Flip()] if train else []
    prepare = [
        hs.data.Resize(side),
        hs.data.Rescale(1 / 255),
        hs.data.Normalize(MEAN, DEVIATION),
        hs.data.ToCHW(channels_last=True),
    ]
    data = hs.data.Dataset({"image": images, "label": labels}, seed=seed)
    data = data.map([*augment, *prepare], "image")
    if train:
        data = data.shuffle().batch(BATCH_SIZE, drop_remainder=True)
    else:
        data = data.batch(TEST_BATCH_SIZE)
    return data.to_device(device)


class EpochLog(Callback):
    """Each epoch's time and test accuracy, printed and written down when it ends."""

    def __init__(self, row: dict[str, Any], table: ResultTable) -> None:
        self.row = row
        self.table = table

    def epoch_end(self, run: Run) -> None:
        epoch = {
            "epoch": run.epoch,
            "seconds": run.seconds,
            "ms": run.seconds / run.step * 1e3,
            **(run.scores or {}),
        }
        self.row["epochs"].append(epoch)
        self.table.add(self.row)
        scores = ""
        if run.scores:
            scores = f"accuracy {epoch['acc']:.4f}  loss {epoch['loss']:.4f}  "
        print(
            f"{self.row['row']}: epoch {run.epoch:2}  "
            f"{scores}{epoch['ms']:7.2f} ms/step  {epoch['seconds']:6.1f} s",
            flush=True,
        )


def measure_run(
    precision: str,
    seed: int,
    splits: tuple[Split, Split],
    args: argparse.Namespace,
    table: ResultTable,
) -> None:
    """One run; its row holds an error where it failed, with the epochs before it."""
    row: dict[str, Any] = {
        "row": f"{precision} seed {seed}",
        "precision": precision,
        "seed": seed,
        "epochs": [],
    }
    start = time.perf_counter()
    try:
        train(precision, seed, splits, args, EpochLog(row, table))
        # The first epoch captures and compiles.
        steady_epochs = row["epochs"][1:] or row["epochs"]
        row["ms"] = statistics.median(epoch["ms"] for epoch in steady_epochs)
        row["epoch_s"] = statistics.median(epoch["seconds"] for epoch in steady_epochs)
        row["accuracy"] = row["epochs"][-1]["acc"]
    except Exception as error:
        row["error"] = describe_error(error)
    if args.device.startswith("cuda"):
        row["allocated_gib"] = torch.cuda.max_memory_allocated() / GIB
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    row["total_s"] = time.perf_counter() - start
    table.add(row)
    print(format_row(row), flush=True)


def train(
    precision: str,
    seed: int,
    splits: tuple[Split, Split],
    args: argparse.Namespace,
    log: EpochLog,
) -> None:
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    train_split, test_split = splits
    train_data = build_data(train_split, device, args.side, seed, train=True)
    if args.steps:
        train_data = train_data.take(args.steps)
    test_data = build_data(test_split, device, args.side, seed, train=False)
    if args.test_batches:
        test_data = test_data.take(args.test_batches)

    torch.manual_seed(seed)
    net = hs.nets.load(args.net, classes=10, variant=args.variant).to(device)
    optimizer = torch.optim.SGD(
        net.parameters(),
        lr=LEARNING_RATE,
        momentum=MOMENTUM,
        fused=True if device.type == "cuda" else None,
    )
    updates = args.epochs * train_data.size
    options: dict[str, Any] = {}
    if args.compile is not None:
        options["compile"] = args.compile == "yes"
    model = hs.Model(
        net,
        nn.CrossEntropyLoss(),
        optimizer,
        precision,
        metrics={"acc": hs.metrics.Accuracy()},
        schedule=hs.schedules.poly(
            LEARNING_RATE,
            updates,
            warmup=int(WARMUP_FRACTION * updates),
            start=START_LEARNING_RATE,
        ),
        **options,
    )
    model.fit(
        args.epochs,
        train_data,
        valid=test_data,
        valid_every=args.valid_every,
        callbacks=[log],
        progress=False,
    )


def format_row(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['row']:16} – after {len(row['epochs'])} epochs: {row['error']}"
    memory = f"{row['allocated_gib']:.2f} GiB" if "allocated_gib" in row else "– GiB"
    return (
        f"{row['row']:16} {row['ms']:8.2f} ms/step {row['epoch_s']:8.1f} s/epoch  "
        f"{memory:>10}  accuracy {row['accuracy']:.4f}"
    )


def summarize(table: ResultTable) -> dict[str, Any]:
    """The mean accuracy of each precision over its seeds, printed, with the limits that hold."""
    accuracies: dict[str, list[float]] = {}
    for row in table.rows.values():
        if "accuracy" in row:
            accuracies.setdefault(row["precision"], []).append(row["accuracy"])
    means = {precision: statistics.mean(values) for precision, values in accuracies.items()}

    for precision, values in accuracies.items():
        values_text = ", ".join(f"{value:.4f}" for value in values)
        difference = ""
        if "tf32" in means:
            difference = f", {means[precision] - means['tf32']:+.4f} against tf32"
        print(
            f"{precision:6} mean accuracy {means[precision]:.4f} of {len(values)} seeds "
            f"({values_text}){difference}"
        )

    limits = [
        Limit(f"accuracy, {precision}", mean, TARGET_ACCURACY, larger_is_better=True)
        for precision, mean in means.items()
    ]
    if "O2" in means and "tf32" in means:
        difference_of_means = abs(means["O2"] - means["tf32"])
        limits.append(
            Limit("accuracy, O2 against tf32, apart", difference_of_means, MAX_DIFFERENCE)
        )
    return {"accuracies": accuracies, "means": means, "checks": check_limits(limits)}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--archive", default="cifar10-jpeg-q75.tar.xz", help="the JPEG copy of CIFAR-10"
    )
    parser.add_argument(
        "--cache", type=Path, default=Path("/tmp/halfstep-cifar10"), help="where decoded arrays go"
    )
    parser.add_argument("--precisions", nargs="+", default=["tf32", "O2", "O3"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=0, help="steps of an epoch (0: all 1,562)")
    parser.add_argument(
        "--test-batches", type=int, default=0, help="of 250 test images (0: all 40)"
    )
    parser.add_argument(
        "--valid-every",
        type=int,
        default=1,
        help="epochs between two evaluations; the last has one",
    )
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--net", default="resnet50")
    parser.add_argument(
        "--variant", default="common", choices=["seed", "common"], help="of the network"
    )
    parser.add_argument("--compile", choices=["yes", "no"], help="left to halfstep unless given")
    parser.add_argument("--json", help="written after every epoch")
    parser.add_argument("--note", default="", help="kept in the JSON: what ran beside it, for one")
    parser.add_argument(
        "--merge", nargs="+", metavar="FILE", help="train nothing: the rows of these into --json"
    )
    return parser.parse_args()


def merge_tables(files: list[str], path: str) -> None:
    """The rows of several tables in one, under the conditions of the first."""
    tables = [json.loads(Path(file).read_text()) for file in files]
    head = {key: value for key, value in tables[0].items() if key not in ("rows", "summary")}
    rows = {row["row"]: row for table in tables for row in table["rows"]}
    merged = ResultTable(path, head, rows)
    merged.save(summary=summarize(merged))


def main() -> None:
    args = parse_arguments()
    if args.merge:
        merge_tables(args.merge, args.json)
        return
    splits = load_splits(args.archive, args.cache)
    head = {
        "conditions": conditions(torch.device(args.device)),
        "net": args.net,
        "batch": BATCH_SIZE,
        "epochs": args.epochs,
        "steps": args.steps,
        "variant": args.variant,
        "side": args.side,
        "note": args.note,
    }
    table = ResultTable(args.json, head)
    for seed in args.seeds:
        for precision in args.precisions:
            measure_run(precision, seed, splits, args, table)
    table.save(summary=summarize(table))


if __name__ == "__main__":
    main()
