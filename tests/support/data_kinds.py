"""Kinds of training data that users have, each small, and most with random augmentation.

Every builder makes new objects, as a new process would: 26 samples, seven batches in a pass.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data import Dataset as TorchDataset

import halfstep as hs

SIZE = 26
BATCH = 4
PASS = 7  # batches


def make_columns(seed: int = 1, size: int = SIZE) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=draw)
    return x, torch.randint(0, 3, (size,), generator=draw)


def make_noise() -> float:
    """From all three generators that users' code draws from."""
    numpys = float(np.random.randn())  # noqa: NPY002
    return 0.1 * (random.gauss(0, 1) + numpys + float(torch.randn(())))


class Augmented(TorchDataset[Any]):
    """Random augmentation in `__getitem__`."""

    def __init__(self) -> None:
        self.x, self.y = make_columns()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> Any:
        return self.x[i] + make_noise(), self.y[i]


class AugmentedByOwnGenerator(Augmented):
    """The same by generators of the data set's own, one of them deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.rng = np.random.default_rng(5)
        self.chain = [Jitter()]

    def __getitem__(self, i: int) -> Any:
        return self.chain[0](self.x[i] + float(self.rng.normal())), self.y[i]


class Jitter:
    def __init__(self) -> None:
        self.rng = random.Random(6)

    def __call__(self, x: Tensor) -> Tensor:
        return x * (1 + 0.1 * self.rng.random())


class AsDicts(Augmented):
    def __getitem__(self, i: int) -> Any:
        x, y = super().__getitem__(i)
        return {"x": x, "y": y}


class Stream(IterableDataset[Any]):
    """Samples of a shuffle drawn when a pass begins, dealt out to the workers."""

    def __init__(self, *, augment: bool = True) -> None:
        self.x, self.y = make_columns()
        self.augment = augment

    def __len__(self) -> int:
        return len(self.x)

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        numbers = list(range(len(self.x)))
        if info is None:
            random.shuffle(numbers)
        else:
            numbers = numbers[info.id :: info.num_workers]
        for i in numbers:
            noise = make_noise() if self.augment else 0.0
            yield self.x[i] + noise, self.y[i]


class BufferedStream(Stream):
    """A shuffle buffer that draws with every sample, from a generator given or the process's."""

    def __init__(self, rng: Any = None) -> None:
        super().__init__(augment=False)
        self.rng = rng

    def __iter__(self) -> Iterator[Any]:
        rng = self.rng or random
        buffer: list[int] = []
        for i in range(len(self.x)):
            buffer.append(i)
            if len(buffer) == 8:
                place = rng.randrange(8)
                yield self.x[buffer[place]], self.y[buffer[place]]
                buffer.pop(place)
        for i in buffer:
            yield self.x[i], self.y[i]


class LazySampler:
    """Draws each index when it is asked for it."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        self.draw_from = generator

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        for _ in range(SIZE):
            yield int(torch.randint(0, SIZE, (), generator=self.draw_from))


class ShuffledBatches:
    """A batch sampler that shuffles by Python's generator."""

    def __len__(self) -> int:
        return PASS

    def __iter__(self) -> Iterator[list[int]]:
        numbers = list(range(SIZE))
        random.shuffle(numbers)
        yield from (numbers[i : i + BATCH] for i in range(0, SIZE, BATCH))


class GeneratorFunction:
    """A generator function of the user's, wrapped so that it can be gone through again."""

    def __len__(self) -> int:
        return PASS

    def __iter__(self) -> Iterator[Any]:
        x, y = make_columns()
        order = torch.randperm(SIZE)
        for numbers in order.split(BATCH):
            yield x[numbers], y[numbers]


class AugmentingGenerator(GeneratorFunction):
    def __iter__(self) -> Iterator[Any]:
        for x, y in super().__iter__():
            yield x + make_noise(), y


def add_noise(x: Tensor) -> Tensor:
    return x + make_noise()


class KeepsGenerator:
    """A function with a generator of its own, which halfstep cannot seed for a batch."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng(8)

    def __call__(self, x: Tensor) -> Tensor:
        return x + float(self.rng.normal())


def plain() -> hs.data.Dataset:
    x, y = make_columns()
    return hs.data.Dataset({"x": x, "y": y}, seed=3)


def loader(data: Any = None, **options: Any) -> DataLoader[Any]:
    if "batch_sampler" not in options:
        options = {"batch_size": BATCH, **options}
    return DataLoader(Augmented() if data is None else data, **options)


def batch_list() -> list[Any]:
    x, y = make_columns()
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


def weights() -> Tensor:
    return torch.linspace(0.1, 1, SIZE)


# Every resumed run ends with equal bits.
EXACT: dict[str, Callable[[], Any]] = {
    "Dataset": lambda: plain().batch(BATCH),
    "Dataset, shuffle": lambda: plain().shuffle().batch(BATCH),
    "Dataset, shuffle buffer": lambda: plain().shuffle(5).batch(BATCH),
    "Dataset, random function": lambda: plain().map(add_noise, "x").shuffle().batch(BATCH),
    "Dataset, workers": lambda: plain().map(add_noise, "x").shuffle().batch(BATCH).workers(2),
    "Dataset of samples, workers": lambda: (
        hs.data.Dataset(Augmented(), ["x", "y"]).shuffle().batch(BATCH).workers(2)
    ),
    "Dataset, repeat": lambda: plain().shuffle().repeat(2).batch(BATCH),
    "DataLoader": lambda: loader(shuffle=True),
    "DataLoader, workers": lambda: loader(shuffle=True, num_workers=2),
    "DataLoader, generator=": lambda: loader(
        shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "DataLoader, generator=, workers": lambda: loader(
        shuffle=True, num_workers=2, generator=torch.Generator().manual_seed(4)
    ),
    "DataLoader, own generators": lambda: loader(AugmentedByOwnGenerator(), shuffle=True),
    "DataLoader, own generators, workers": lambda: loader(
        AugmentedByOwnGenerator(), shuffle=True, num_workers=2
    ),
    "DataLoader, RandomSampler": lambda: loader(
        sampler=RandomSampler(range(SIZE), replacement=True, num_samples=SIZE)
    ),
    "DataLoader, SubsetRandomSampler": lambda: loader(sampler=SubsetRandomSampler(range(SIZE))),
    "DataLoader, WeightedRandomSampler": lambda: loader(
        sampler=WeightedRandomSampler(weights().tolist(), SIZE)
    ),
    "DataLoader, batch_sampler": lambda: loader(batch_sampler=ShuffledBatches()),
    "DataLoader, lazy sampler, own generator": lambda: loader(
        sampler=LazySampler(torch.Generator().manual_seed(9))
    ),
    "DataLoader, dicts": lambda: loader(AsDicts(), shuffle=True),
    "DataLoader, stream, workers": lambda: loader(Stream(), num_workers=2),
    "DataLoader, stream, own generator": lambda: loader(BufferedStream(random.Random(7))),
    "list of tensors": batch_list,
    "generator function": GeneratorFunction,
    "TensorDataset, unshuffled": lambda: loader(TensorDataset(*make_columns())),
}

# What cannot be equal is announced: words of the notice.
ANNOUNCED: dict[str, tuple[Callable[[], Any], str]] = {
    "DataLoader, persistent workers": (
        lambda: loader(shuffle=True, num_workers=2, persistent_workers=True),
        "persistent_workers=True",
    ),
    "DataLoader, lazy sampler": (
        lambda: loader(sampler=LazySampler()),
        "from the random generators of the process while",
    ),
    "DataLoader, lazy sampler, workers": (
        lambda: loader(sampler=LazySampler(), num_workers=2),
        "from the random generators of the process while",
    ),
    "DataLoader, stream": (
        lambda: loader(Stream()),
        "from the random generators of the process while",
    ),
    "DataLoader, shuffle buffer": (
        lambda: loader(BufferedStream()),
        "from the random generators of the process while",
    ),
    "generator function that augments": (
        AugmentingGenerator,
        "from the random generators of the process while",
    ),
    "Dataset, function with a generator": (
        lambda: plain().map(KeepsGenerator(), "x").batch(BATCH),
        "KeepsGenerator.*rng is a random generator that code of yours keeps",
    ),
}
