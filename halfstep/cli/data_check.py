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
from halfstep.data.download.catalog import CATALOG
from halfstep.data.download.find import find
from halfstep.data.readers import split_folder

MAX_DAMAGE_NAMED = 20  # damaged files that are named; the others are counted
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
    if _is_unsplit(name):
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
        if _is_unsplit(name):
            origin = "a folder of images"
            parts = [_check_images("all", _folder(name))]
            notes = [_how_to_split(_folder(name)), *_size_notes(parts)]
        else:
            folder = split_folder.open_split_folder(name, allow_function=False)
            if folder.kind == "images":
                origin = "a folder of images"
                parts = [_check_images(part, folder.root / part) for part in folder.parts]
                mismatch = folder.class_mismatch()
                if mismatch:
                    parts[1]["damage"].append(mismatch)
                notes = _size_notes(parts)
            else:
                files = "MNIST-family files" if folder.kind == "idx" else "CIFAR-10 files"
                origin = f"a folder of {files}"
                parts = [_check_files(part, partial(folder.read, part)) for part in folder.parts]
    return {"name": name, "origin": origin, "parts": parts, "notes": notes}


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


def _check_images(part: str, root: Path) -> dict[str, Any]:
    """Describes a folder of image files; each file is good or damaged by itself."""
    images = ImageFolder(root)
    sizes: Counter[tuple[int, ...]] = Counter()
    class_counts: Counter[str] = Counter()
    statistics = PixelStatistics()
    damage: list[str] = []
    for i in range(len(images)):
        try:
            image, label = images[i]
        except (ValueError, OSError) as error:
            damage.append(str(error))
            continue
        sizes[tuple(image.shape)] += 1
        class_counts[images.classes[label]] += 1
        statistics.add(image[None])
    return _describe_part(
        part,
        sizes=sizes,
        class_counts=class_counts,
        class_names=images.classes,
        statistics=statistics,
        damage=damage,
    )


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
    return Path(name).expanduser()


def _is_unsplit(name: str) -> bool:
    """Whether it is a folder of classes without train and test: to look at, not to train on."""
    root = _folder(name)
    if not root.is_dir():
        return False
    has_data_files = any(root.glob("*-idx?-ubyte*")) or any(root.glob("*_batch*.bin"))
    return not has_data_files and split_folder.has_unsplit_classes(root)


def _refuse_path(name: str, path: str | None) -> None:
    if path is not None:
        raise ValueError(f"--path: expected with a data set of {', '.join(CATALOG)}, got {name!r}")


def _how_to_split(root: Path) -> str:
    """A note: what a folder must look like to be trained on, and what to do about this one."""
    above = split_folder.enclosing_split(root)
    if above is None:
        advice = f"move its classes below {root}/train and {root}/test"
    else:
        advice = f"name {above} to them"
    return f"halfstep train and compare read {split_folder.READABLE_FOLDERS}: {advice}"


def _size_notes(parts: list[dict[str, Any]]) -> list[str]:
    """A note where images differ in size; none where they do not."""
    sizes = {size for part in parts for size, _ in part["sizes"]}
    if len(sizes) < 2:
        return []
    return [
        "images of different sizes: halfstep train and compare take one size. "
        "Resize the files first."
    ]
