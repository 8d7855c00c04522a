"""The data of a comparison, by name, by folder or by a function of the user's: training and test samples, unbatched."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from halfstep import data
from halfstep.data import Dataset
from halfstep.data.download.catalog import CATALOG
from halfstep.data.readers import split_folder as layout
from halfstep.errors import Notice
from halfstep.experiment.builders__build import builder
from halfstep.experiment.settings import Settings
from halfstep.utils.user_code import call

PARTS = ("training", "test")


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
    chain = _prepared(train, settings)
    parts = []
    for whole, count in ((train, settings.samples), (test, settings.test_samples)):
        part = whole if count is None else whole.take(count)
        parts.append(part.map(chain, part.columns[0]) if chain else part)
    first = next(iter(parts[0].take(1).batch(1)))
    if len(first) < 2 or not isinstance(first[0], Tensor):
        own = (
            ". A data function returns (train, test): (x, y), (x_test, y_test)"
            if ":" in settings.data
            else ""
        )
        came = f"the columns {list(parts[0].columns)} of {settings.data}"
        raise ValueError(f"data: expected samples of an input and a label, got {came}{own}")
    return Material(parts[0], parts[1], classes, tuple(first[0].shape[1:]))


def _pair(name: str, path: str | None) -> tuple[Dataset, Dataset]:
    if name in CATALOG:
        train, test = (data.load(name, split, path=path) for split in ("train", "test"))
        return train, test
    if path is not None:
        raise ValueError(
            f"path: expected with a data set of {', '.join(CATALOG)}, got data {name!r}"
        )
    if name == "sample":
        return _dataset(data.sample(True)), _dataset(data.sample(False))
    if ":" in name and "://" not in name and not os.path.exists(name):
        return _own(name)
    return _folder(name)


def _own(name: str) -> tuple[Dataset, Dataset]:
    """The user's function: (train, test), each a Dataset without batches, a torch data set, or columns (x, y)."""
    found = call(builder(name, "data"), "the data function", name)
    if not isinstance(found, Sequence) or len(found) != 2:
        kind = type(found).__name__
        raise TypeError(f"data: expected {name!r} to return (training data, test data), got {kind}")
    classes = _counted(found)
    train, test = (
        _part(each, name, which, classes) for each, which in zip(found, PARTS, strict=True)
    )
    return train, test


def _part(given: Any, name: str, which: str, classes: list[str]) -> Dataset:
    """One of the two, unbatched: the command batches and shuffles, so that every seed and size is one setting."""
    came = type(given).__name__
    if isinstance(given, Dataset):
        if not given.plan.batch:
            return given
        came = "batches; leave .batch() to the command"
    elif _is_empty(given):
        raise ValueError(
            f"data: expected at least one sample as the {which} data of {name!r}, got none"
        )
    elif _is_indexed(given):
        try:
            return Dataset(given, classes=classes)
        except (ValueError, TypeError) as error:
            raise type(error)(f"data: the {which} data of {name!r}: {error}") from error
    raise TypeError(
        f"data: expected samples as the {which} data of {name!r}, got {came}. Return (train, test), each of them "
        "columns (x, y), a data set with __len__ and __getitem__ (of a DataLoader: loader.dataset), or "
        "hs.data.Dataset(…) without .batch(…)."
    )


def _is_empty(given: Any) -> bool:
    parts = (
        given.values()
        if isinstance(given, Mapping)
        else given
        if isinstance(given, tuple)
        else (given,)
    )
    return any(
        hasattr(each, "__len__") and getattr(each, "shape", None) != () and not len(each)
        for each in parts
    )


def _is_indexed(given: Any) -> bool:
    if isinstance(given, DataLoader | IterableDataset):
        return False
    return isinstance(given, Mapping) or (
        hasattr(given, "__len__") and hasattr(given, "__getitem__")
    )


def _counted(found: Sequence[Any]) -> list[str]:
    """Classes by the labels, where both parts are columns that end with whole numbers; none where that is not known."""
    try:
        labels = [
            torch.as_tensor(each[-1]) for each in found if isinstance(each, tuple) and len(each) > 1
        ]
    except (TypeError, ValueError, RuntimeError):  # no numbers: told of the part that has them
        return []
    if len(labels) < 2 or any(
        y.dim() != 1 or y.is_floating_point() or not len(y) or y.min() < 0 for y in labels
    ):
        return []
    return [str(i) for i in range(max(int(y.max()) for y in labels) + 1)]


def _folder(name: str) -> tuple[Dataset, Dataset]:
    folder = layout.found(name)
    wrong = folder.mismatch()
    if wrong:
        raise ValueError(f"data: {wrong}")
    train, test = (folder.read(part) for part in folder.parts)
    return train, test


def _dataset(pair: tuple[Tensor, Tensor]) -> Dataset:
    images, labels = pair
    return Dataset(
        {"image": images[..., None], "label": labels}, classes=[str(i) for i in range(10)]
    )


def _prepared(train: Dataset, settings: Settings) -> list[Any]:
    """What uint8 images need; LeNet-5 takes 32×32 only. [H, W] can only be gray: it gets its channel, and a notice."""
    first = next(iter(train.take(1).batch(1)))[0]
    if not isinstance(first, Tensor) or first.dtype != torch.uint8:
        return []
    shape = list(first.shape[1:])
    if len(shape) not in (2, 3):
        raise ValueError(
            f"data: expected floats, or uint8 images of [H, W], [H, W, C] or [C, H, W], got uint8 {shape} from "
            f"{settings.data}. Return x / 255, or the images before they were flattened."
        )
    if len(shape) == 2:
        sides = " × ".join(map(str, shape))
        text = f"data: {settings.data} gives images of {sides} without channels: taken as gray, 1 × {sides}"
        warnings.warn(text, Notice, stacklevel=2)
    resize = [data.Resize(32)] if settings.net == "lenet5" and shape[:2] != [32, 32] else []
    return [*resize, data.ToCHW(), data.Rescale(1 / 255)]
