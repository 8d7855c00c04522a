"""A data set read to its end: how many of what size and class, and what is damaged."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from halfstep import data
from halfstep.data import Dataset, ImageFolder
from halfstep.data.download.catalog import CATALOG
from halfstep.data.download.find import find
from halfstep.data.readers import split_folder as layout

_FIRST = 20  # damaged files that are named; the rest is counted


def dataset(name: str, path: str | None, split: Literal["train", "test"]) -> Dataset:
    """Samples as they are on the disk: uint8 images [H, W, C] and labels."""
    if name == "sample":
        images, labels = data.sample(split == "train")
        classes = CATALOG["fashion-mnist"].classes
        return Dataset({"image": images[..., None], "label": labels}, classes=classes)
    if name in CATALOG:
        return data.load(name, split, path=path)
    _refuse_path(name, path)
    if _is_unsplit(name):
        return Dataset(ImageFolder(_root(name)), ["image", "label"])
    folder = layout.found(name, own=False)
    return folder.read(folder.parts[split == "test"])


def examine(name: str, path: str | None) -> dict[str, Any]:
    """Every part of a data set; what cannot be read is told among the damage, not raised. `notes` say what training on
    it would stumble over."""
    if name == "sample" or name in CATALOG:
        origin = str(find(name, path).folder) if name != "sample" else "ships with the package"
        parts = [_whole(split, partial(dataset, name, path, split)) for split in ("train", "test")]
        return {"name": name, "origin": origin, "parts": parts, "notes": []}
    _refuse_path(name, path)
    if _is_unsplit(name):
        root = _root(name)
        parts = [_images("all", root)]
        above = layout.split_above(root)
        way = (
            f"move its classes below {root}/train and {root}/test"
            if above is None
            else f"name {above} to them"
        )
        move = f"halfstep train and compare read {layout.READ}: {way}"
        return {
            "name": name,
            "origin": "a folder of images",
            "parts": parts,
            "notes": [move, *_sizes(parts)],
        }
    folder = layout.found(name, own=False)
    if folder.kind != "images":
        parts = [_whole(part, partial(folder.read, part)) for part in folder.parts]
        files = "MNIST-family files" if folder.kind == "idx" else "CIFAR-10 files"
        return {"name": name, "origin": f"a folder of {files}", "parts": parts, "notes": []}
    parts = [_images(part, folder.root / part) for part in folder.parts]
    wrong = folder.mismatch()
    parts[1]["damage"] += [wrong] if wrong else []
    return {"name": name, "origin": "a folder of images", "parts": parts, "notes": _sizes(parts)}


def _root(name: str) -> Path:
    return Path(name).expanduser()


def _is_unsplit(name: str) -> bool:
    """A folder of classes that is not divided into train and test: it can be looked at, not trained on."""
    root = _root(name)
    if not root.is_dir() or any(root.glob("*-idx?-ubyte*")) or any(root.glob("*_batch*.bin")):
        return False
    return layout.classes_alone(root)


def _refuse_path(name: str, path: str | None) -> None:
    if path is not None:
        raise ValueError(f"--path: expected with a data set of {', '.join(CATALOG)}, got {name!r}")


def _sizes(parts: list[dict[str, Any]]) -> list[str]:
    if len({size for part in parts for size, _ in part["sizes"]}) < 2:
        return []
    return [
        "images of different sizes: halfstep train and compare take one size. Resize the files first."
    ]


def _whole(part: str, read: Callable[[], Dataset]) -> dict[str, Any]:
    try:
        found = read()
        (images, labels), classes = next(iter(found.batch(found.size))), found.classes
    except (ValueError, OSError, EOFError) as error:
        return _part(part, Counter(), Counter(), [], [str(error)], None)
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    named = {str(classes[i] if i < len(classes) else i): count for i, count in enumerate(counts)}
    sizes = Counter({_size(images[0]): len(images)})
    return _part(part, sizes, Counter(named), list(named), [], Moments().add(images))


def _images(part: str, root: Path) -> dict[str, Any]:
    found = ImageFolder(root)
    sizes: Counter[tuple[int, ...]] = Counter()
    classes: Counter[str] = Counter()
    damage: list[str] = []
    moments = Moments()
    for i in range(len(found)):
        try:
            image, label = found[i]
        except (ValueError, OSError) as error:
            damage.append(str(error))
            continue
        sizes[_size(image)] += 1
        classes[found.classes[label]] += 1
        moments.add(image[None])
    return _part(part, sizes, classes, found.classes, damage, moments)


def _part(
    name: str,
    sizes: Counter[tuple[int, ...]],
    classes: Counter[str],
    names: Any,
    damage: list[str],
    moments: "Moments | None",
) -> dict[str, Any]:
    more = [f"and {len(damage) - _FIRST:,} more"] if len(damage) > _FIRST else []
    mean, deviation = moments.read() if moments is not None and moments.count else ([], [])
    return {
        "name": name, "samples": sum(sizes.values()), "sizes": sizes.most_common(5), "mean": mean,
        "deviation": deviation, "classes": {each: classes[each] for each in names}, "damage": damage[:_FIRST] + more,
    }  # fmt: skip


def _size(image: Tensor) -> tuple[int, ...]:
    """Height, width, channels."""
    return tuple(image.shape)


class Moments:
    """Mean and deviation per channel of uint8 images in 0..1, by whole numbers: no rounding until they are read."""

    def __init__(self) -> None:
        self.count, self.sums, self.squares = 0, [0, 0, 0], [0, 0, 0]

    def add(self, images: Tensor) -> "Moments":
        channels = images.shape[-1]
        for part in images.reshape(-1, channels).split(1 << 22):
            self.count += len(part)
            for c in range(channels):
                values = torch.bincount(
                    part[:, c].long(), minlength=256
                )  # 256 counts instead of wide squares
                self.sums[c] += int((values * torch.arange(256)).sum())
                self.squares[c] += int((values * torch.arange(256) ** 2).sum())
        self.channels = channels
        return self

    def read(self) -> tuple[list[float], list[float]]:
        means = [total / self.count / 255 for total in self.sums[: self.channels]]
        spread = [
            self.squares[c] / self.count - (self.sums[c] / self.count) ** 2
            for c in range(self.channels)
        ]
        return means, [max(0.0, each) ** 0.5 / 255 for each in spread]
