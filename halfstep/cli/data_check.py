"""Reads a whole data set: how many samples of which size and class, and what is damaged."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from halfstep import data
from halfstep.data import Dataset, ImageFolder
from halfstep.data.class_weights import describe_imbalance, weights_of_counts
from halfstep.data.download.catalog import CATALOG
from halfstep.data.download.find import find
from halfstep.data.download.local_copy import local_path
from halfstep.data.readers import split_folder
from halfstep.data.readers.image_folder import read_in_threads
from halfstep.data.readers.image_survey import ImageSurvey, survey_images
from halfstep.data.readers.split_folder import SplitFolder
from halfstep.data.splits import DEFAULT_TEST_SHARE
from halfstep.data.tables.typed_table import Column
from halfstep.experiment.photos import describe_duplicates, find_duplicates
from halfstep.experiment.reading_progress import reading_progress
from halfstep.experiment.table_data import is_table, parse_drop, table_path

MAX_DAMAGE_NAMED = 20  # damaged files that are named; the others are counted
FILES_AT_ONCE = 64
MAX_SIZES = 5  # the most frequent image sizes that are reported
PIXELS_AT_ONCE = 1 << 22  # bounds the memory of the counts: int64 copies of 4 million bytes


def read_dataset(name: str, path: str | None, split: Literal["train", "test"]) -> Dataset:
    """A data set by name or folder, as it is on the disk: uint8 images [H, W, C] and labels."""
    if name == "sample":
        images, labels = data.sample(split == "train")
        classes = CATALOG["fashion-mnist"].classes
        return Dataset({"image": images[..., None], "label": labels}, classes=classes)
    if name in CATALOG:
        return data.load(name, split, path=path)

    _refuse_path(name, path)
    if is_table(name):
        raise ValueError(f"data show: a table has no pictures. halfstep data check {name}")
    if _is_part(name):
        return Dataset(ImageFolder(_folder(name)), ["image", "label"])
    folder = split_folder.open_split_folder(name, allow_function=False)
    train_part, test_part = folder.parts
    return folder.read(train_part if split == "train" else test_part)


def check_dataset(name: str, path: str | None) -> dict[str, Any]:
    """Reads every part of a data set and describes it, as a dict for JSON.

    What cannot be read is listed as damage, not raised. `notes` say what would stop a training run
    on this data.
    """
    notes: list[str] = []
    if name == "sample":
        origin = "ships with the package"
        parts = _check_splits(name, path)
    elif name in CATALOG:
        origin = str(find(name, path).folder)
        parts = _check_splits(name, path)
    else:
        _refuse_path(name, path)
        origin, parts, notes = _check_folder(name)
    for part in parts:
        imbalance = describe_imbalance(list(part["classes"]), list(part["classes"].values()))
        if imbalance is not None:
            notes.append(f"{part['name']}: {imbalance}; halfstep train --class-weights balanced")
    return {"name": name, "origin": origin, "parts": parts, "notes": notes}


def _check_folder(name: str) -> tuple[str, list[dict[str, Any]], list[str]]:
    """What a folder is, its parts, and notes."""
    root = _folder(name)
    if _is_part(name):
        part, survey = _check_images("all", ImageFolder(root))
        return "a folder of images", [part], [_part_note(root), *_image_notes([survey])]
    folder = split_folder.open_split_folder(name, allow_function=False)
    if folder.classes_in is not None:
        part, survey = _check_images("all", ImageFolder(folder.classes_in))
        notes = [
            f"no test part: halfstep train and compare take {DEFAULT_TEST_SHARE:.0%} of each class "
            "for it; --test-share and --split-seed change that"
        ]
        notes += _image_notes([survey])
        return "a folder of images", [part], notes + _duplicate_notes(folder)
    if folder.kind == "images":
        checked = [_check_images(part, ImageFolder(folder.root / part)) for part in folder.parts]
        parts = [part for part, _ in checked]
        mismatch = folder.class_mismatch()
        if mismatch:
            parts[1]["damage"].append(mismatch)
        notes = _image_notes([survey for _, survey in checked])
        return "a folder of images", parts, notes + _duplicate_notes(folder)
    files = "MNIST-family files" if folder.kind == "idx" else "CIFAR-10 files"
    parts = [_check_files(part, partial(folder.read, part)) for part in folder.parts]
    return f"a folder of {files}", parts, []


def _check_splits(name: str, path: str | None) -> list[dict[str, Any]]:
    return [
        _check_files("train", partial(read_dataset, name, path, "train")),
        _check_files("test", partial(read_dataset, name, path, "test")),
    ]


def _check_files(part: str, read: Callable[[], Dataset]) -> dict[str, Any]:
    """Describes a part that is read as one: all of it is good, or all of it is damaged."""
    try:
        dataset = read()
        images, labels = next(iter(dataset.batch(dataset.size)))
        classes = dataset.classes
    except (ValueError, OSError, EOFError) as error:
        return _describe_part(part, damage=[str(error)])

    # A label beyond the names of the classes is named by its number.
    class_counts: Counter[str] = Counter()
    for label, count in enumerate(torch.bincount(labels, minlength=len(classes)).tolist()):
        name = classes[label] if label < len(classes) else label
        class_counts[str(name)] = count
    statistics = PixelStatistics()
    statistics.add(images)
    return _describe_part(
        part,
        sizes=Counter({tuple(images[0].shape): len(images)}),
        class_counts=class_counts,
        class_names=list(class_counts),
        statistics=statistics,
    )


def _check_images(part: str, images: ImageFolder) -> tuple[dict[str, Any], ImageSurvey]:
    """Describes a folder of image files; each file is good or damaged by itself."""
    sizes: Counter[tuple[int, ...]] = Counter()
    class_counts: Counter[str] = Counter()
    statistics = PixelStatistics()
    damage: list[str] = []

    def sample_or_error(index: int) -> tuple[Tensor, int] | str:
        try:
            return images[index]
        except (ValueError, OSError) as error:
            return str(error)

    with reading_progress(f"reading {part}", len(images), visible=True) as on_read:
        for start in range(0, len(images), FILES_AT_ONCE):
            indices = range(start, min(start + FILES_AT_ONCE, len(images)))
            for sample in read_in_threads(sample_or_error, indices):
                if isinstance(sample, str):
                    damage.append(sample)
                    continue
                image, label = sample
                sizes[tuple(image.shape)] += 1
                class_counts[images.classes[label]] += 1
                statistics.add(image[None])
            on_read(len(indices))
    description = _describe_part(
        part,
        sizes=sizes,
        class_counts=class_counts,
        class_names=images.classes,
        statistics=statistics,
        damage=damage,
    )
    return description, survey_images(images.files)


def _describe_part(
    name: str,
    *,
    sizes: Counter[tuple[int, ...]] | None = None,
    class_counts: Counter[str] | None = None,
    class_names: Sequence[str] = (),
    statistics: "PixelStatistics | None" = None,
    damage: Sequence[str] = (),
) -> dict[str, Any]:
    """The figures of one part, as they stand in the JSON."""
    sizes = sizes or Counter()
    class_counts = class_counts or Counter()
    mean: list[float] = []
    deviation: list[float] = []
    if statistics is not None and statistics.pixel_count:
        mean, deviation = statistics.mean_and_deviation()

    named_damage = list(damage[:MAX_DAMAGE_NAMED])
    if len(damage) > MAX_DAMAGE_NAMED:
        named_damage.append(f"and {len(damage) - MAX_DAMAGE_NAMED:,} more")
    return {
        "name": name,
        "samples": sum(sizes.values()),
        "sizes": sizes.most_common(MAX_SIZES),  # [(height, width, channels), count]
        "mean": mean,
        "deviation": deviation,
        "classes": {class_name: class_counts[class_name] for class_name in class_names},
        "class_weights": _class_weights(class_counts, class_names),
        "damage": named_damage,
    }


class PixelStatistics:
    """Mean and deviation of each channel of uint8 images, in 0..1.

    Sums are whole numbers of any size: nothing is rounded before the end.
    """

    def __init__(self) -> None:
        self.pixel_count = 0
        self.channels = 0
        self.sums = [0, 0, 0]
        self.square_sums = [0, 0, 0]

    def add(self, images: Tensor) -> None:
        """Adds images [N, H, W, C] of at most three channels."""
        self.channels = images.shape[-1]
        values = torch.arange(256)
        for pixels in images.reshape(-1, self.channels).split(PIXELS_AT_ONCE):
            self.pixel_count += len(pixels)
            for channel in range(self.channels):
                # How often each of the 256 values occurs: no wide copy of the squares is needed.
                counts = torch.bincount(pixels[:, channel].long(), minlength=256)
                self.sums[channel] += int((counts * values).sum())
                self.square_sums[channel] += int((counts * values**2).sum())

    def mean_and_deviation(self) -> tuple[list[float], list[float]]:
        """Both for each channel, for pixels as fractions of 255."""
        means = []
        deviations = []
        for channel in range(self.channels):
            mean = self.sums[channel] / self.pixel_count
            variance = self.square_sums[channel] / self.pixel_count - mean**2
            means.append(mean / 255)
            deviations.append(max(0.0, variance) ** 0.5 / 255)
        return means, deviations


def _folder(name: str) -> Path:
    return local_path(name).expanduser()


def _is_part(name: str) -> bool:
    """Whether it is one part of a split folder, with its classes: to look at, not to train on."""
    root = _folder(name)
    has_folders = root.is_dir() and any(path.is_dir() for path in root.iterdir())
    return has_folders and split_folder.enclosing_split(root) is not None


def _refuse_path(name: str, path: str | None) -> None:
    if path is not None:
        raise ValueError(f"--path: expected with a data set of {', '.join(CATALOG)}, got {name!r}")


def _part_note(root: Path) -> str:
    """A note about a part of a split folder: it is not what can be trained on."""
    return (
        f"halfstep train and compare read {split_folder.READABLE_FOLDERS}: "
        f"name {split_folder.enclosing_split(root)} to them"
    )


def _image_notes(surveys: list[ImageSurvey]) -> list[str]:
    """Notes about images of several sizes, and those that are not plain RGB."""
    survey = ImageSurvey()
    for other in surveys:
        survey.sizes += other.sizes
        survey.modes += other.modes
    notes = []
    if len(survey.sizes) > 1:
        notes.append(
            f"images of {survey.describe_sizes()}: halfstep train and compare resize the shorter "
            "side and crop the centre; --size 224 says to which size"
        )
    modes = survey.describe_modes()
    if modes is not None:
        notes.append(f"converted to RGB: {modes}")
    return notes


def _duplicate_notes(folder: SplitFolder) -> list[str]:
    try:
        train, test = folder.images()
    except ValueError as error:  # too few to be split
        return [str(error)]
    pairs = find_duplicates(train, test)
    return [describe_duplicates(folder.root, pairs)] if pairs else []


def _class_weights(counts: Counter[str], names: Sequence[str]) -> dict[str, float]:
    """The weights of hs.data.class_weights, by name."""
    weights = weights_of_counts([counts[name] for name in names]) if names else torch.empty(0)
    return dict(zip(names, weights.tolist(), strict=True))


# Tables


def check_table(name: str, target: str | None, drop: str | None = None) -> dict[str, Any]:
    """Reads a whole table and describes its columns, as a dict for JSON."""
    table = data.read_csv(table_path(name), target, drop=parse_drop(drop))
    columns = [_describe_column(column) for column in table.inputs.values()]
    result: dict[str, Any] = {
        "name": name,
        "origin": "a table",
        "rows": table.size,
        "columns": columns,
        "target": None,
        "notes": list(table.notes),
    }
    if table.target is not None:
        result["target"] = {**_describe_column(table.target), "task": table.task}
    if table.task == "classification":
        labels = table.labels()
        counts = torch.bincount(labels, minlength=len(table.classes)).tolist()
        weights = weights_of_counts(counts).tolist()
        result["target"]["classes"] = dict(zip(table.classes, counts, strict=True))
        result["target"]["class_weights"] = dict(zip(table.classes, weights, strict=True))
        imbalance = describe_imbalance(table.classes, counts)
        if imbalance is not None:
            result["notes"].append(f"{imbalance}; halfstep train --class-weights balanced")
    return result


def _describe_column(column: Column) -> dict[str, Any]:
    description: dict[str, Any] = {
        "name": column.name,
        "kind": column.kind,
        "missing": int(column.is_missing.sum()),
    }
    if column.kind == "category":
        return {**description, "categories": list(column.texts)}
    values = column.values[~column.is_missing]
    numbers = {
        "min": values.min(),
        "max": values.max(),
        "mean": values.mean(),
        "deviation": values.std(unbiased=False),
    }
    return {**description, **{key: float(value) for key, value in numbers.items()}}
