"""ResNet-50 on CIFAR-10 as the seed trains it: 10 epochs, batch 32, SGD with momentum 0.9, the poly schedule.

    python benchmarks/cifar.py --archive cifar10-jpeg-q75.tar.xz [--precisions tf32 O2 O3] [--seeds 0 1 2] [--json FILE]

The archive holds JPEGs as split/class/number; they are decoded once, into --cache, and processes that start together
share that. Images are cropped, flipped and resized to 224 on the device, in the step. The network starts as
torchvision's; --variant seed starts as MindSpore's lab does, from weights of 0.01 · normal, and learns more slowly.
Step and epoch times leave evaluation out; accuracy is over all 10,000 test images. Try it out: --epochs 1 --steps 20.
Runs of several processes become one table with --merge FILE …
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
from rows import Table, checks, first_line
from torch import Tensor, nn

import halfstep as hs
from halfstep.engine import Callback, Run

BATCH, MOMENTUM = 32, 0.9
LR, START, WARM = (
    0.1,
    0.01,
    0.5,
)  # the seed's: from 0.01 up to 0.1 over half of all updates, then down as a square
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
TARGET, WITHIN = 0.848, 0.005
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
Split = tuple[Tensor, Tensor]


def decode(archive: Path) -> dict[str, tuple[list[np.ndarray], list[int]]]:
    """Images and labels by split, in the order of (number, class), so that any part of them holds every class."""
    from PIL import Image

    found: dict[str, dict[tuple[int, int], np.ndarray]] = {"train": {}, "test": {}}
    with tarfile.open(archive) as tar:
        for member in tar:
            file = tar.extractfile(member)
            if file is None:
                continue  # a folder
            split, name, number = member.name.split("/")[-3:]
            with Image.open(io.BytesIO(file.read())) as image:
                found[split][int(number.split(".")[0]), CLASSES.index(name)] = np.asarray(
                    image.convert("RGB")
                )
    return {
        s: ([each[k] for k in sorted(each)], [k[1] for k in sorted(each)])
        for s, each in found.items()
    }


def load(archive: str, cache: Path) -> tuple[Split, Split]:
    """Both splits as uint8 [N, 32, 32, 3] and int64; the first process decodes, others wait for it."""
    cache.mkdir(parents=True, exist_ok=True)
    done = (
        cache / f"done-{Path(archive).stat().st_size}"
    )  # of this archive, not of another one before it
    with open(cache / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            for split, (images, labels) in decode(Path(archive)).items():
                np.save(cache / f"{split}-images.npy", np.stack(images))
                np.save(cache / f"{split}-labels.npy", np.array(labels, np.int64))
            done.touch()
    train, test = (
        tuple(
            torch.from_numpy(np.load(cache / f"{split}-{part}.npy"))
            for part in ("images", "labels")
        )
        for split in ("train", "test")
    )
    return (train[0], train[1]), (test[0], test[1])


def pipeline(
    split: Split, device: torch.device, side: int, seed: int, *, train: bool
) -> hs.data.Dataset:
    chain = [hs.data.PadCrop(32, 4), hs.data.Flip()] if train else []
    chain += [hs.data.Resize(side), hs.data.Rescale(1 / 255), hs.data.Normalize(MEAN, STD)]
    data = hs.data.Dataset({"image": split[0], "label": split[1]}, seed=seed)
    data = data.map([*chain, hs.data.ToCHW(channels_last=True)], "image")
    data = data.shuffle().batch(BATCH, drop_remainder=True) if train else data.batch(250)
    return data.to_device(device)


class Epochs(Callback):
    """Each epoch's time and test accuracy, printed and written down when it ends."""

    def __init__(self, row: dict[str, Any], table: Table) -> None:
        self.row, self.table = row, table

    def epoch_end(self, run: Run) -> None:
        last = {
            "epoch": run.epoch,
            "seconds": run.seconds,
            "ms": run.seconds / run.step * 1e3,
            **(run.scores or {}),
        }
        self.row["epochs"].append(last)
        self.table.add(self.row)
        scores = f"accuracy {last['acc']:.4f}  loss {last['loss']:.4f}  " if run.scores else ""
        said = f"{scores}{last['ms']:7.2f} ms/step  {last['seconds']:6.1f} s"
        print(f"{self.row['row']}: epoch {run.epoch:2}  {said}", flush=True)


def train(
    precision: str, seed: int, data: tuple[Split, Split], args: argparse.Namespace, table: Table
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
        fit(precision, seed, data, args, Epochs(row, table))
        settled = row["epochs"][1:] or row["epochs"]  # the first one captures and compiles
        row["ms"] = statistics.median(epoch["ms"] for epoch in settled)
        row["epoch_s"] = statistics.median(epoch["seconds"] for epoch in settled)
        row["accuracy"] = row["epochs"][-1]["acc"]
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {first_line(error)}"
    if args.device.startswith("cuda"):
        row["allocated_gib"] = torch.cuda.max_memory_allocated() / 2**30
        row["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    row["total_s"] = time.perf_counter() - start
    table.add(row)
    print(show(row), flush=True)


def fit(
    precision: str, seed: int, data: tuple[Split, Split], args: argparse.Namespace, log: Epochs
) -> None:
    device = torch.device(args.device)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    images = pipeline(data[0], device, args.side, seed, train=True)
    images = images.take(args.steps) if args.steps else images
    test = pipeline(data[1], device, args.side, seed, train=False)
    test = test.take(args.test_batches) if args.test_batches else test
    torch.manual_seed(seed)
    net = hs.nets.load(args.net, classes=10, variant=args.variant).to(device)
    optimizer = torch.optim.SGD(
        net.parameters(), lr=LR, momentum=MOMENTUM, fused=device.type == "cuda" or None
    )
    updates = args.epochs * images.size
    schedule = hs.schedules.poly(LR, updates, warmup=int(WARM * updates), start=START)
    options: dict[str, Any] = {} if args.compile is None else {"compile": args.compile == "yes"}
    metrics = {"acc": hs.metrics.Accuracy()}
    model = hs.Model(
        net,
        nn.CrossEntropyLoss(),
        optimizer,
        precision,
        metrics=metrics,
        schedule=schedule,
        **options,
    )
    model.fit(args.epochs, images, valid=test, valid_every=args.valid_every, callbacks=[log])


def show(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['row']:16} – after {len(row['epochs'])} epochs: {row['error']}"
    memory = f"{row['allocated_gib']:.2f} GiB" if "allocated_gib" in row else "– GiB"
    best = f"accuracy {row['accuracy']:.4f}"
    return f"{row['row']:16} {row['ms']:8.2f} ms/step {row['epoch_s']:8.1f} s/epoch  {memory:>10}  {best}"


def summary(table: Table) -> dict[str, Any]:
    """Per precision the mean accuracy over its seeds; the target is 84.8 %, and O2 within half a point of TF32."""
    found: dict[str, list[float]] = {}
    for row in table.rows.values():
        if "accuracy" in row:
            found.setdefault(row["precision"], []).append(row["accuracy"])
    means = {precision: statistics.mean(values) for precision, values in found.items()}
    for precision, values in found.items():
        apart = f", {means[precision] - means['tf32']:+.4f} against tf32" if "tf32" in means else ""
        each = ", ".join(f"{value:.4f}" for value in values)
        print(
            f"{precision:6} mean accuracy {means[precision]:.4f} of {len(values)} seeds ({each}){apart}"
        )
    limits = [
        (f"accuracy, {precision}", mean, TARGET, None, True) for precision, mean in means.items()
    ]
    if {"O2", "tf32"} <= set(means):
        limits.append(
            (
                "accuracy, O2 against tf32, apart",
                abs(means["O2"] - means["tf32"]),
                WITHIN,
                None,
                False,
            )
        )
    return {"accuracies": found, "means": means, "checks": checks(limits)}


def parse() -> argparse.Namespace:
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


def merge(files: list[str], path: str) -> None:
    """The rows of several tables in one, under the conditions of the first."""
    found = [json.loads(Path(file).read_text()) for file in files]
    head = {key: value for key, value in found[0].items() if key not in ("rows", "summary")}
    table = Table(path, head, {row["row"]: row for each in found for row in each["rows"]})
    table.save(summary=summary(table))


def main() -> None:
    args = parse()
    if args.merge:
        return merge(args.merge, args.json)
    data = load(args.archive, args.cache)
    kept = {
        "net": args.net,
        "batch": BATCH,
        "epochs": args.epochs,
        "steps": args.steps,
        "variant": args.variant,
        "side": args.side,
        "note": args.note,
    }
    table = Table(args.json, {"conditions": conditions(torch.device(args.device)), **kept})
    for seed in args.seeds:
        for precision in args.precisions:
            train(precision, seed, data, args, table)
    table.save(summary=summary(table))


if __name__ == "__main__":
    main()
