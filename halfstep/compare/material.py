"""The data of a comparison, by name, by folder or by a function of the user's: training and test samples, unbatched."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep import data
from halfstep.again.build import builder
from halfstep.compare.settings import Settings
from halfstep.data import Dataset
from halfstep.data.get.catalog import CATALOG
from halfstep.data.read.idx import read_split


@dataclass(frozen=True)
class Material:
    """Samples ready for the network, in the order they were read; the shuffle comes with the seed."""

    train: Dataset
    test: Dataset
    classes: int | None
    """None when the data does not say."""
    shape: tuple[int, ...]
    """Of one input, as the network gets it."""

    def batches(self, seed: int, batch: int) -> Dataset:
        """One order per seed, whatever the precision."""
        return self.train.shuffle(seed=seed).batch(batch)

    def check_batches(self, batch: int) -> Dataset:
        return self.test.batch(max(batch, 500))  # no gradients to keep: larger batches are faster


def material(settings: Settings) -> Material:
    """Read, cut to the numbers asked for, and prepared: uint8 images become [C, H, W] in 0..1, other data stays."""
    train, test = _pair(settings.data, settings.path)
    classes = len(train.classes) or None
    chain = _prepared(train, settings.net)
    parts = []
    for whole, count in ((train, settings.samples), (test, settings.test_samples)):
        part = whole if count is None else whole.take(count)
        parts.append(part.map(chain, part.columns[0]) if chain else part)
    first = next(iter(parts[0].take(1).batch(1)))
    if len(first) < 2 or not isinstance(first[0], Tensor):
        raise ValueError(f"data: expected samples of an input and a label, got the columns {list(parts[0].columns)}")
    return Material(parts[0], parts[1], classes, tuple(first[0].shape[1:]))


def _pair(name: str, path: str | None) -> tuple[Dataset, Dataset]:
    if name in CATALOG:
        train, test = (data.load(name, split, path=path) for split in ("train", "test"))
        return train, test
    if path is not None:
        raise ValueError(f"path: expected with a data set of {', '.join(CATALOG)}, got data {name!r}")
    if name == "sample":
        return _dataset(data.sample(True), 10), _dataset(data.sample(False), 10)
    if ":" in name and "://" not in name and not os.path.exists(name):
        return _own(name)
    return _folder(name)


def _own(name: str) -> tuple[Dataset, Dataset]:
    """The user's function: (train, test), each a Dataset without batches, a torch data set, or columns (x, y)."""
    found = builder(name)()
    if not isinstance(found, Sequence) or len(found) != 2:
        kind = type(found).__name__
        raise TypeError(f"data: expected {name!r} to return (training data, test data), got {kind}")
    train, test = (each if isinstance(each, Dataset) else Dataset(each) for each in found)
    if train.plan.batch or test.plan.batch:
        raise ValueError(f"data: expected {name!r} to return samples, got batches; leave .batch() to the comparison")
    return train, test


def _folder(name: str) -> tuple[Dataset, Dataset]:
    """MNIST-family files, CIFAR's, or one folder of images per class under train/ and test/ (or val/)."""
    root = Path(name).expanduser()
    known = f"sample, {', '.join(CATALOG)}, a folder, or a function of yours as package.module:function"
    if not root.is_dir():
        raise ValueError(f"data: expected {known}; got {name!r}, and there is no such folder")
    held = {path.name for path in root.iterdir()}
    if any(each.startswith("train-images-idx3") for each in held):
        train, test = (_dataset(read_split(root, train=part), 10) for part in (True, False))
        return train, test
    if "data_batch_1.bin" in held:
        train, test = (_dataset(data.read_cifar(root, train=part), 10) for part in (True, False))
        return train, test
    other = next((part for part in ("test", "val", "valid") if part in held), None)
    if "train" in held and other is not None:
        train, test = (Dataset(data.ImageFolder(root / part), ["image", "label"]) for part in ("train", other))
        return train, test
    raise ValueError(
        f"data: {root} holds neither idx files (train-images-idx3-ubyte …), CIFAR-10's data_batch_1.bin …, nor folders "
        "train and test with one folder of images per class"
    )


def _dataset(pair: tuple[Tensor, Tensor], classes: int) -> Dataset:
    images, labels = pair
    images = images[..., None] if images.dim() == 3 else images
    return Dataset({"image": images, "label": labels}, classes=[str(i) for i in range(classes)])


def _prepared(train: Dataset, net: str) -> list[Any]:
    """What uint8 images need; LeNet-5 takes 32×32 only."""
    first = next(iter(train.take(1).batch(1)))[0]
    if not isinstance(first, Tensor) or first.dtype != torch.uint8 or first.dim() != 4:
        return []
    resize = [data.Resize(32)] if net == "lenet5" and first.shape[1:3] != (32, 32) else []
    return [*resize, data.ToCHW(), data.Rescale(1 / 255)]
