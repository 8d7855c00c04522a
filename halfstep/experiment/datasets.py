"""Training and test data of a run, by name, by folder or by a function of the user's; unbatched."""

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from halfstep import data
from halfstep.data import Dataset, TableEncoding, class_weights
from halfstep.data.class_weights import describe_imbalance
from halfstep.data.download.catalog import CATALOG
from halfstep.data.readers import split_folder
from halfstep.errors import Notice
from halfstep.experiment.builders import import_function
from halfstep.experiment.data_parts import DataParts
from halfstep.experiment.photos import labels_of, read_photos, refuse_split_settings
from halfstep.experiment.settings import Settings
from halfstep.experiment.table_data import is_table, read_table_data
from halfstep.utils.text import printable
from halfstep.utils.user_code import call_user_function

# Evaluation keeps no activations for a backward pass: larger batches fit, and are faster.
MIN_TEST_BATCH_SIZE = 500

# Settings that only one kind of data has.
IMAGE_SETTINGS = ("size", "skip_damaged")
TABLE_SETTINGS = ("target", "task", "drop")


@dataclass(frozen=True)
class TrainTestData:
    """Samples ready for the network, in the order they were read. A run's seed shuffles them."""

    train: Dataset
    test: Dataset
    classes: int | None
    """None when the data does not say."""
    shape: tuple[int, ...]
    """Of one input, as the network gets it."""
    chosen: dict[str, Any] = field(default_factory=dict)
    """Settings that were chosen by the data, by name."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What is noted with the run, to use the same data again."""
    encoding: TableEncoding | None = None
    """Of a table."""
    class_weights: Tensor | None = None
    """For the loss, where the settings say so."""

    @property
    def is_regression(self) -> bool:
        """Whether the target is a number and not a class."""
        return self.encoding is not None and self.encoding.task == "regression"

    def train_batches(self, seed: int, batch_size: int) -> Dataset:
        """In the seed's order, which is the same for every precision."""
        return self.train.shuffle(seed=seed).batch(batch_size)

    def test_batches(self, batch_size: int) -> Dataset:
        return self.test.batch(max(batch_size, MIN_TEST_BATCH_SIZE))


def load_train_test_data(
    settings: Settings,
    *,
    training: bool = False,
    split: bool = True,
    encoding: TableEncoding | None = None,
) -> TrainTestData:
    """Reads both parts, cuts them to the numbers in the settings, and prepares the inputs.

    uint8 images become [C, H, W] floats in 0..1; other inputs stay as they are. `training`: say
    what was chosen for the user, and decode images now. Without `split`, data that nobody has split
    is all of it in both parts. `encoding`: of the table that a run was trained on.
    """
    parts = _read_both_parts(settings, training=training, split=split, encoding=encoding)
    train, test = parts.train, parts.test
    classes = len(train.classes) or None
    weights = _class_weights(parts, settings)
    if training and weights is None:
        _warn_about_imbalance(parts)
    transforms = _image_transforms(train, settings)

    prepared: list[Dataset] = []
    for dataset, sample_count in ((train, settings.samples), (test, settings.test_samples)):
        if sample_count is not None:
            dataset = dataset.take(sample_count)
        if transforms:
            dataset = dataset.map(transforms, dataset.columns[0])
        prepared.append(dataset)
    train, test = prepared

    first_batch = next(iter(train.take(1).batch(1)))
    if len(first_batch) < 2 or not isinstance(first_batch[0], Tensor):
        advice = ""
        if ":" in settings.data:
            advice = ". A data function returns (train, test): (x, y), (x_test, y_test)"
        raise ValueError(
            "data: expected samples of an input and a label, "
            f"got the columns {list(train.columns)} of {settings.data}{advice}"
        )
    return TrainTestData(
        train,
        test,
        classes,
        shape=tuple(first_batch[0].shape[1:]),
        chosen=parts.chosen,
        facts=parts.facts,
        encoding=parts.encoding,
        class_weights=weights,
    )


def _read_both_parts(
    settings: Settings, *, training: bool, split: bool, encoding: TableEncoding | None
) -> DataParts:
    """Training and test data of a table, a folder, a known set, the sample or a function."""
    name = settings.data
    path = settings.path
    is_function = ":" in name and "://" not in name and not os.path.exists(name)
    if is_table(name):
        _refuse_settings(settings, IMAGE_SETTINGS, "a folder of images")
        if path is None:
            return read_table_data(settings, training=training, split=split, encoding=encoding)
    else:
        _refuse_settings(settings, TABLE_SETTINGS, "a table, csv:FILE")
    if name not in CATALOG and path is None and name != "sample" and not is_function:
        return _read_folder(settings, training=training, split=split)

    if not is_table(name):
        _refuse_settings(settings, IMAGE_SETTINGS, "a folder of images")
        refuse_split_settings(settings, f"{name} has a test part")
    if name in CATALOG:
        train = data.load(name, "train", path=path)
        test = data.load(name, "test", path=path)
        return DataParts(train, test)
    if path is not None:
        raise ValueError(
            f"path: expected with a data set of {', '.join(CATALOG)}, got data {name!r}"
        )
    if name == "sample":
        return DataParts(_sample_dataset(train=True), _sample_dataset(train=False))
    return DataParts(*_call_data_function(name))


def _refuse_settings(settings: Settings, names: Sequence[str], expected: str) -> None:
    """Raises a ValueError for settings that say something about another kind of data."""
    for name in names:
        if getattr(settings, name) is not None:
            raise ValueError(f"{name}: expected it with {expected}, got data {settings.data!r}")


def _sample_dataset(*, train: bool) -> Dataset:
    images, labels = data.sample(train)
    class_names = [str(i) for i in range(10)]
    return Dataset({"image": images[..., None], "label": labels}, classes=class_names)


def _read_folder(settings: Settings, *, training: bool, split: bool) -> DataParts:
    folder = split_folder.open_split_folder(settings.data)
    mismatch = folder.class_mismatch()
    if mismatch:
        raise ValueError(f"data: {mismatch}")
    if folder.kind in ("images", "unsplit"):
        return read_photos(folder, settings, training=training, split=split)
    _refuse_settings(settings, IMAGE_SETTINGS, "a folder of images")
    refuse_split_settings(settings, f"{settings.data} has a test part")
    train, test = (folder.read(part) for part in folder.parts)
    return DataParts(train, test)


# Classes of different sizes


def _class_weights(parts: DataParts, settings: Settings) -> Tensor | None:
    """The weights that the settings ask for, by the training labels that will be used."""
    if settings.class_weights is None:
        return None
    if parts.encoding is not None and parts.encoding.task == "regression":
        raise ValueError(
            f"class_weights: expected classes, and {parts.encoding.target!r} is a number"
        )
    labels = labels_of(parts.train)
    if labels is None:
        raise ValueError(
            "class_weights: expected labels as one column of whole numbers, which "
            f"{settings.data} does not have. Return columns (x, y) from a data function, or weigh "
            "in a builder: nn.CrossEntropyLoss(weight=hs.data.class_weights(labels))"
        )
    if settings.samples is not None:
        labels = labels[: settings.samples]
    return class_weights(labels, len(parts.train.classes) or None)


def _warn_about_imbalance(parts: DataParts) -> None:
    labels = labels_of(parts.train)
    names = parts.train.classes
    if labels is None or not names or int(labels.max()) >= len(names):
        return
    counts = torch.bincount(labels.long(), minlength=len(names)).tolist()
    text = describe_imbalance(names, counts)
    if text is not None:
        message = f"data: {printable(text)}. --class-weights balanced lets them count alike"
        warnings.warn(message, Notice, stacklevel=3)


# A function of the user's


def _call_data_function(name: str) -> tuple[Dataset, Dataset]:
    """(train, test), each a Dataset without batches, a torch data set, or columns (x, y)."""
    function = import_function(name, "data")
    parts = call_user_function(function, "the data function", name)
    if not isinstance(parts, Sequence) or len(parts) != 2:
        kind = type(parts).__name__
        raise TypeError(f"data: expected {name!r} to return (training data, test data), got {kind}")
    class_names = _class_names_from_labels(parts)
    train = _as_dataset(parts[0], name, "training", class_names)
    test = _as_dataset(parts[1], name, "test", class_names)
    return train, test


def _as_dataset(part: Any, name: str, which: str, class_names: list[str]) -> Dataset:
    """One part as an unbatched Dataset; batch size and shuffling are settings of the command."""
    received = type(part).__name__
    if isinstance(part, Dataset):
        if not part.plan.batch_size:
            return part
        received = "batches; leave .batch() to the command"
    elif _is_empty(part):
        raise ValueError(
            f"data: expected at least one sample as the {which} data of {name!r}, got none"
        )
    elif _can_be_indexed(part):
        try:
            return Dataset(part, classes=class_names)
        except (ValueError, TypeError) as error:
            raise type(error)(f"data: the {which} data of {name!r}: {error}") from error
    raise TypeError(
        f"data: expected samples as the {which} data of {name!r}, got {received}. "
        "Return (train, test), each of them columns (x, y), "
        "a data set with __len__ and __getitem__ (of a DataLoader: loader.dataset), "
        "or hs.data.Dataset(…) without .batch(…)."
    )


def _is_empty(part: Any) -> bool:
    """Whether a column, or the data set, has a length of 0. A 0-d tensor has no length."""
    columns: Any = (part,)
    if isinstance(part, Mapping):
        columns = part.values()
    elif isinstance(part, tuple):
        columns = part
    for column in columns:
        has_length = hasattr(column, "__len__") and getattr(column, "shape", None) != ()
        if has_length and len(column) == 0:
            return True
    return False


def _can_be_indexed(part: Any) -> bool:
    if isinstance(part, DataLoader | IterableDataset):
        return False
    if isinstance(part, Mapping):
        return True
    return hasattr(part, "__len__") and hasattr(part, "__getitem__")


def _class_names_from_labels(parts: Sequence[Any]) -> list[str]:
    """ "0", "1", … up to the largest label; none where the labels are not known to be classes.

    They are known where both parts are tuples of columns, of which the last has whole numbers.
    """
    try:
        labels = [
            torch.as_tensor(part[-1]) for part in parts if isinstance(part, tuple) and len(part) > 1
        ]
    except (TypeError, ValueError, RuntimeError):  # not numbers: reading that part says so
        return []
    if len(labels) < 2:
        return []
    for column in labels:
        if column.dim() != 1 or column.is_floating_point() or not len(column) or column.min() < 0:
            return []
    largest = max(int(column.max()) for column in labels)
    return [str(i) for i in range(largest + 1)]


# Images


def _image_transforms(train: Dataset, settings: Settings) -> list[Any]:
    """The transforms that uint8 images need; none for other inputs.

    Images of [H, W] can only be gray: they get a channel, and a notice says so.
    """
    first_input = next(iter(train.take(1).batch(1)))[0]
    if not isinstance(first_input, Tensor) or first_input.dtype != torch.uint8:
        return []
    shape = list(first_input.shape[1:])
    if len(shape) not in (2, 3):
        raise ValueError(
            "data: expected floats, or uint8 images of [H, W], [H, W, C] or [C, H, W], "
            f"got uint8 {shape} from {settings.data}. "
            "Return x / 255, or the images before they were flattened."
        )
    if len(shape) == 2:
        sides = " × ".join(map(str, shape))
        message = (
            f"data: {settings.data} gives images of {sides} without channels: "
            f"taken as gray, 1 × {sides}"
        )
        warnings.warn(message, Notice, stacklevel=2)

    transforms: list[Any] = [data.ToCHW(), data.Rescale(1 / 255)]
    if settings.net == "lenet5" and shape[:2] != [32, 32]:  # the only size that LeNet-5 takes
        transforms.insert(0, data.Resize(32))
    return transforms
