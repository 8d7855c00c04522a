"""The data path: samples per second of each way to get batches, the cost of transforms and order.

python benchmarks/data.py [--json FILE] [--samples N]
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
from measure import conditions, wait_for_device, write_result
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from halfstep import data as hd
from halfstep.errors import Notice

BATCH_SIZE = 64
ROUNDS = 5
WARMUP_CALLS = 3
BILLION = 10**9
MEAN = (0.4914, 0.4822, 0.4465)
DEVIATION = (0.2023, 0.1994, 0.2010)

# Limits for an H200, in milliseconds, by the names of the figures.
CAPTURED_INDICES = "1,000 batches of 64, captured"
CAPTURED_AUGMENT = "pad-crop, flip, resize to 224, normalise, captured"
LIMITS_MS = {
    CAPTURED_INDICES: 2.0,
    CAPTURED_AUGMENT: 0.35,
    f"{CAPTURED_AUGMENT}, float16": 0.35,
}


# Ways to get batches.


class PerSampleDataset(TorchDataset[tuple[Tensor, int]]):
    """The usual hand-written data set: one sample at a time, augmented with Python's own calls."""

    def __init__(self, images: Tensor, labels: Tensor, augment: bool) -> None:
        self.images = images
        self.labels = labels
        self.augment = augment

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


class LoaderOnDevice:
    """A loader's batches on the device, as a careful user moves them."""

    def __init__(self, loader: Iterable[Any], device: torch.device) -> None:
        self.loader = loader
        self.device = device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for image, label in self.loader:
            yield image.to(self.device, non_blocking=True), label.to(self.device, non_blocking=True)


class PlainLoop:
    """Samples drawn, stacked and moved in a plain Python loop."""

    def __init__(self, samples: PerSampleDataset, device: torch.device) -> None:
        self.samples = samples
        self.device = device

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for indices in torch.randperm(len(self.samples)).split(BATCH_SIZE):
            samples = [self.samples[i] for i in indices.tolist()]
            images = torch.stack([image for image, _ in samples])
            labels = torch.tensor([label for _, label in samples])
            yield images.to(self.device), labels.to(self.device)


def build_dataset(images: Tensor, labels: Tensor, augment: bool) -> hd.Dataset:
    transforms = [hd.PadCrop(32, 4), hd.Flip()] if augment else []
    transforms += [hd.ToCHW(), hd.Rescale(1 / 255)]
    dataset = hd.Dataset({"image": images, "label": labels}).map(transforms, "image")
    return dataset.shuffle().batch(BATCH_SIZE)


def build_ways(
    images: Tensor, labels: Tensor, augment: bool, device: torch.device
) -> dict[str, Iterable[Any]]:
    dataset = build_dataset(images, labels, augment)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        ways: dict[str, Iterable[Any]] = {
            "halfstep, resident": dataset.to_device(device),
            "halfstep, streamed": dataset.to_device(device, budget=0),
            "halfstep, streamed, 2 workers": dataset.workers(2).to_device(device, budget=0),
        }
    per_sample = PerSampleDataset(images, labels, augment)
    for workers in (0, 2):
        loader = DataLoader(
            per_sample,
            BATCH_SIZE,
            shuffle=True,
            num_workers=workers,
            pin_memory=device.type == "cuda",
            persistent_workers=workers > 0,
        )
        name = f"torch DataLoader, per-sample code, {workers} workers"
        ways[name] = LoaderOnDevice(loader, device)
    ways["per-sample code, a plain loop"] = PlainLoop(per_sample, device)
    return ways


def measure_pass(batches: Iterable[Any], device: torch.device, samples: int) -> float:
    """Samples per second of a whole pass."""
    wait_for_device(device)
    start = time.perf_counter()
    count = 0
    for _, label in batches:
        count += len(label)
    wait_for_device(device)
    assert count == samples
    return count / (time.perf_counter() - start)


def measure_throughput(
    images: Tensor, labels: Tensor, augment: bool, device: torch.device
) -> dict[str, Any]:
    """Samples per second of all ways, which take turns.

    The first round, which starts workers and warms up, is left out.
    """
    ways = build_ways(images, labels, augment, device)
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(ROUNDS + 1):
        for name, batches in ways.items():
            rate = measure_pass(batches, device, len(labels))
            if round_number > 0:
                rates[name].append(rate)

    medians = {name: statistics.median(values) for name, values in rates.items()}
    base = medians["torch DataLoader, per-sample code, 2 workers"]
    title = "augmented" if augment else "plain"
    print(f"\n{title}: {len(labels)} samples, batch {BATCH_SIZE}, {device}, median of {ROUNDS}")
    for name, rate in medians.items():
        print(f"  {name:<46} {rate:>12,.0f} samples/s  {rate / base:>7.1f} ×")
    return {
        name: {"samples_per_s": round(rate), "rounds": [round(r) for r in rates[name]]}
        for name, rate in medians.items()
    }


# Times of single calls.


def time_call(work: Callable[[], object], device: torch.device, repeat: int = 20) -> dict[str, Any]:
    """Milliseconds of a call: median and quartiles."""
    times_ms = []
    for _ in range(repeat + WARMUP_CALLS):
        wait_for_device(device)
        start = time.perf_counter()
        work()
        wait_for_device(device)
        times_ms.append((time.perf_counter() - start) * 1e3)
    low, median, high = statistics.quantiles(times_ms[WARMUP_CALLS:], n=4)
    return {"ms": round(median, 4), "quartiles": [round(low, 4), round(high, 4)]}


def capture(work: Callable[[], object]) -> Callable[[], object]:
    """The same work as a CUDA graph, after a warm-up on a side stream."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream):
        for _ in range(WARMUP_CALLS):
            work()
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = work()

    def replay() -> object:
        graph.replay()
        return output  # so that the graph's memory stays alive

    return replay


def measure_order(device: torch.device) -> dict[str, Any]:
    """Seek and a million indices at 10^9 samples, and the indices of 1,000 batches of 64."""
    large_order = hd.Order(BILLION, 1)
    small_order = hd.Order(60_000, 1)
    plan = hd.Dataset({"i": torch.zeros(64_000, dtype=torch.uint8)}).shuffle().batch(64).plan
    result = {
        "seek to the last batch of 64, 10^9 samples": time_call(
            lambda: large_order.indices(3, BILLION - 64, 64, device), device
        ),
        "1,000,000 indices, 10^9 samples": time_call(
            lambda: large_order.indices(3, BILLION // 2, 10**6, device), device, repeat=5
        ),
        "torch.randperm(1,000,000)": time_call(
            lambda: torch.randperm(10**6, device=device), device, repeat=5
        ),
        "1,000 batches of 64": time_call(lambda: plan.sample_indices(3, 0, 1000, device), device),
    }
    if device.type == "cuda":
        epochs = torch.zeros(1, dtype=torch.int64, device=device)
        positions = torch.arange(64_000, device=device) % 60_000
        captured = capture(lambda: small_order.at(epochs, positions))
        result[CAPTURED_INDICES] = time_call(captured, device)

    tracemalloc.start()
    rss_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    large_order.indices(3, BILLION - 64, 64)
    _, python_bytes = tracemalloc.get_traced_memory()
    rss_growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - rss_before
    tracemalloc.stop()
    result["memory of a seek, 10^9 samples"] = {
        "python_bytes": python_bytes,
        "rss_growth_kib": rss_growth,
    }
    return result


def measure_transforms(device: torch.device) -> dict[str, Any]:
    """The augmentation of the ResNet-50 lab on one resident batch, gather included."""
    images = torch.randint(0, 256, (10_000, 32, 32, 3), dtype=torch.uint8, device=device)
    transforms = [
        hd.PadCrop(32, 4),
        hd.Flip(),
        hd.Resize(224),
        hd.ToCHW(channels_last=True),
        hd.Rescale(1 / 255),
        hd.Normalize(MEAN, DEVIATION),
    ]
    half_transforms = [*transforms, hd.Cast("float16")]
    batch_size = 256 if device.type == "cuda" else 32
    dataset = hd.Dataset({"image": images})
    plan = dataset.map(transforms, "image").batch(batch_size).plan
    half_plan = dataset.map(half_transforms, "image").batch(batch_size).plan
    indices = torch.arange(batch_size, device=device)
    epochs = torch.zeros(batch_size, dtype=torch.int64, device=device)

    def fetch() -> object:
        return plan.fetch(indices, epochs)

    def fetch_half() -> object:
        return half_plan.fetch(indices, epochs)

    result = {f"eager, batch {batch_size}": time_call(fetch, device)}
    if device.type == "cuda":
        result[CAPTURED_AUGMENT] = time_call(capture(fetch), device)
        result[f"{CAPTURED_AUGMENT}, float16"] = time_call(capture(fetch_half), device)
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
    shape = (args.samples, 32, 32, 3)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    labels = torch.randint(0, 10, (args.samples,), generator=generator)
    result: dict[str, Any] = {
        "conditions": conditions(device),
        "batch": BATCH_SIZE,
        "samples": args.samples,
        "limits_ms": LIMITS_MS,
        "order": measure_order(device),
        "transforms": measure_transforms(device),
    }
    for table in ("order", "transforms"):
        print(f"\n{table}")
        for name, figures in result[table].items():
            print(f"  {name:<52} {figures}")
    result["plain"] = measure_throughput(images, labels, augment=False, device=device)
    result["augmented"] = measure_throughput(images, labels, augment=True, device=device)
    write_result(args.json, result)


if __name__ == "__main__":
    main()
