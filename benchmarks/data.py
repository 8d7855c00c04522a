"""The data path: samples per second of each way to get batches, the cost of transforms in a step, and of the order.

python benchmarks/data.py [--json FILE] [--data FOLDER] [--samples N]
"""

import argparse
import resource
import statistics
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from measure import conditions, write
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from halfstep import data as hd
from halfstep.errors import Notice

BATCH, ROUNDS = 64, 5
AUGMENTED = "pad-crop, flip, resize to 224, normalise, captured"
LIMITS_MS = {"1,000 batches of 64, captured": 2.0, AUGMENTED: 0.35, f"{AUGMENTED}, float16": 0.35}


class PerSample(TorchDataset[tuple[Tensor, int]]):
    """The usual hand-written data set: one sample at a time, augmented with Python's own calls."""

    def __init__(self, images: Tensor, labels: Tensor, augment: bool) -> None:
        self.images, self.labels, self.augment = images, labels, augment

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image = self.images[i].permute(2, 0, 1).float() / 255
        if self.augment:
            image = torch.nn.functional.pad(image, (4, 4, 4, 4))
            top, left = torch.randint(0, 9, (2,)).tolist()
            image = image[:, top : top + 32, left : left + 32]
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
        return image, int(self.labels[i])


def pipeline(images: Tensor, labels: Tensor, augment: bool) -> hd.Dataset:
    chain = [hd.PadCrop(32, 4), hd.Flip()] if augment else []
    chain += [hd.ToCHW(), hd.Rescale(1 / 255)]
    return hd.Dataset({"image": images, "label": labels}).map(chain, "image").shuffle().batch(BATCH)


def ways(
    images: Tensor, labels: Tensor, augment: bool, device: torch.device
) -> dict[str, Iterable[Any]]:
    ours = pipeline(images, labels, augment)
    theirs = PerSample(images, labels, augment)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        found: dict[str, Iterable[Any]] = {
            "halfstep, resident": ours.to_device(device),
            "halfstep, streamed": ours.to_device(device, budget=0),
            "halfstep, streamed, 2 workers": ours.workers(2).to_device(device, budget=0),
        }
    for workers in (0, 2):
        name = f"torch DataLoader, per-sample code, {workers} workers"
        pin = device.type == "cuda"
        kept = workers > 0
        loader = DataLoader(
            theirs,
            BATCH,
            shuffle=True,
            num_workers=workers,
            pin_memory=pin,
            persistent_workers=kept,
        )
        found[name] = Moved(loader, device)
    found["per-sample code, a plain loop"] = PlainLoop(theirs, device)
    return found


class Moved:
    """A loader's batches on the device, as a careful user moves them."""

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self.loader, self.device = loader, device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for image, label in self.loader:
            yield image.to(self.device, non_blocking=True), label.to(self.device, non_blocking=True)


class PlainLoop:
    def __init__(self, samples: PerSample, device: torch.device) -> None:
        self.samples, self.device = samples, device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for numbers in torch.randperm(len(self.samples)).split(BATCH):
            parts = [self.samples[i] for i in numbers.tolist()]
            images, labels = torch.stack([p[0] for p in parts]), torch.tensor([p[1] for p in parts])
            yield images.to(self.device), labels.to(self.device)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def one_pass(batches: Iterable[Any], device: torch.device, samples: int) -> float:
    """Samples per second of a whole pass."""
    wait(device)
    start, count = time.perf_counter(), 0
    for _, label in batches:
        count += len(label)
    wait(device)
    assert count == samples
    return count / (time.perf_counter() - start)


def throughput(
    images: Tensor, labels: Tensor, augment: bool, device: torch.device
) -> dict[str, Any]:
    """All ways take turns, round by round; the first round, which starts workers and warms up, is left out."""
    each = ways(images, labels, augment, device)
    rates: dict[str, list[float]] = {name: [] for name in each}
    for _ in range(ROUNDS + 1):
        for name, batches in each.items():
            rates[name].append(one_pass(batches, device, len(labels)))
    result = {name: statistics.median(values[1:]) for name, values in rates.items()}
    base = result["torch DataLoader, per-sample code, 2 workers"]
    print(
        f"\n{'augmented' if augment else 'plain'}: {len(labels)} samples, batch {BATCH}, {device}, median of {ROUNDS}"
    )
    for name, rate in result.items():
        print(f"  {name:<46} {rate:>12,.0f} samples/s  {rate / base:>7.1f} ×")
    return {
        name: {"samples_per_s": round(rate), "rounds": [round(r) for r in rates[name][1:]]}
        for name, rate in result.items()
    }


def timed(work: Callable[[], object], device: torch.device, repeat: int = 20) -> dict[str, float]:
    """Milliseconds of a call: median and quartiles."""
    times = []
    for _ in range(repeat + 3):
        wait(device)
        start = time.perf_counter()
        work()
        wait(device)
        times.append((time.perf_counter() - start) * 1e3)
    low, middle, high = statistics.quantiles(times[3:], n=4)
    return {"ms": round(middle, 4), "quartiles": [round(low, 4), round(high, 4)]}


def captured(work: Callable[[], object]) -> Callable[[], object]:
    """The same work as a CUDA graph, after a warm-up on a side stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = work()
    return lambda: (graph.replay(), kept)


def order_times(device: torch.device) -> dict[str, Any]:
    """Seek and a million indices at 10^9 samples, and the indices of 1,000 batches of 64 of Fashion-MNIST."""
    billion, small = hd.Order(10**9, 1), hd.Order(60_000, 1)
    plan = hd.Dataset({"i": torch.zeros(64_000, dtype=torch.uint8)}).shuffle().batch(64).plan
    result = {
        "seek to the last batch of 64, 10^9 samples": timed(
            lambda: billion.indices(3, 10**9 - 64, 64, device), device
        ),
        "1,000,000 indices, 10^9 samples": timed(
            lambda: billion.indices(3, 5 * 10**8, 10**6, device), device, 5
        ),
        "torch.randperm(1,000,000)": timed(lambda: torch.randperm(10**6, device=device), device, 5),
        "1,000 batches of 64": timed(lambda: plan.tokens(3, 0, 1000, device), device),
    }
    if device.type == "cuda":
        epochs, places = (
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.arange(64_000, device=device) % 60_000,
        )
        result["1,000 batches of 64, captured"] = timed(
            captured(lambda: small.at(epochs, places)), device
        )
    tracemalloc.start()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    billion.indices(3, 10**9 - 64, 64)
    result["memory of a seek, 10^9 samples"] = {
        "python_bytes": tracemalloc.get_traced_memory()[1],
        "rss_growth_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
    }
    tracemalloc.stop()
    return result


def transform_times(device: torch.device) -> dict[str, Any]:
    """The augmentation of the ResNet-50 lab on one resident batch of 256, gather included."""
    images = torch.randint(0, 256, (10_000, 32, 32, 3), dtype=torch.uint8, device=device)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    chain = [
        hd.PadCrop(32, 4),
        hd.Flip(),
        hd.Resize(224),
        hd.ToCHW(channels_last=True),
        hd.Rescale(1 / 255),
        hd.Normalize(mean, std),
    ]
    size = 256 if device.type == "cuda" else 32
    plan, half = (
        hd.Dataset({"image": images}).map(links, "image").batch(size).plan
        for links in (chain, [*chain, hd.Cast("float16")])
    )
    numbers, epochs = (
        torch.arange(size, device=device),
        torch.zeros(size, dtype=torch.int64, device=device),
    )
    result = {f"eager, batch {size}": timed(lambda: plan.fetch(numbers, epochs), device)}
    if device.type == "cuda":
        result[AUGMENTED] = timed(captured(lambda: plan.fetch(numbers, epochs)), device)
        result[f"{AUGMENTED}, float16"] = timed(
            captured(lambda: half.fetch(numbers, epochs)), device
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", help="write the figures and their conditions here")
    parser.add_argument(
        "--samples", type=int, default=50_000, help="size of the data set of the throughput table"
    )
    args = parser.parse_args()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(
        0, 256, (args.samples, 32, 32, 3), dtype=torch.uint8, generator=generator
    )
    labels = torch.randint(0, 10, (args.samples,), generator=generator)
    result: dict[str, Any] = {
        "conditions": conditions(device),
        "batch": BATCH,
        "samples": args.samples,
        "limits_ms": LIMITS_MS,
    }
    result["order"], result["transforms"] = order_times(device), transform_times(device)
    for table in ("order", "transforms"):
        print(f"\n{table}")
        for name, figure in result[table].items():
            print(f"  {name:<52} {figure}")
    for augment in (False, True):
        result["augmented" if augment else "plain"] = throughput(images, labels, augment, device)
    write(args.json, result)


if __name__ == "__main__":
    main()
