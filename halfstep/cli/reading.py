"""A data set read to its end: how many of what size and class, and what is damaged."""

from collections import Counter
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from halfstep import data
from halfstep.data import Dataset, ImageFolder
from halfstep.data.get.catalog import CATALOG
from halfstep.data.get.find import find

_FIRST = 20  # damaged files that are named; the rest is counted


def dataset(name: str, path: str | None, split: Literal["train", "test"]) -> Dataset:
    """Samples as they are on the disk: uint8 images [H, W, C] and labels."""
    if name == "sample":
        images, labels = data.sample(split == "train")
        classes = CATALOG["fashion-mnist"].classes
        return Dataset({"image": images[..., None], "label": labels}, classes=classes)
    if name in CATALOG:
        return data.load(name, split, path=path)
    roots = dict(_folders(name, path))
    return Dataset(ImageFolder(roots.get(split) or next(iter(roots.values()))), ["image", "label"])


def examine(name: str, path: str | None) -> dict[str, Any]:
    """Every part of a data set; what cannot be read is told among the damage, not raised."""
    if name == "sample" or name in CATALOG:
        origin = str(find(name, path).folder) if name != "sample" else "ships with the package"
        parts = [_whole(name, path, split) for split in ("train", "test")]
    else:
        origin = "a folder of images"
        parts = [_images(part, root) for part, root in _folders(name, path)]
    return {"name": name, "origin": origin, "parts": parts}


def _folders(name: str, path: str | None) -> list[tuple[str, Path]]:
    """train/ and test/ (or val/), where both are there; else the folder itself."""
    if path is not None:
        raise ValueError(f"--path: expected with a data set of {', '.join(CATALOG)}, got {name!r}")
    root = Path(name).expanduser()
    if not root.is_dir():
        known = f"sample, {', '.join(CATALOG)}, or a folder with one folder of images per class"
        raise ValueError(f"data: expected {known}; got {name!r}, and there is no such folder")
    if any(root.glob("*-idx?-ubyte*")) or any(root.glob("*_batch*.bin")):
        raise ValueError(
            f"data: {root} holds the files of a known set; say which: halfstep data check NAME --path {root}"
        )
    other = next((part for part in ("test", "val", "valid") if (root / part).is_dir()), None)
    if (root / "train").is_dir() and other is not None:
        return [("train", root / "train"), (other, root / other)]
    return [("all", root)]


def _whole(name: str, path: str | None, split: Any) -> dict[str, Any]:
    try:
        part = dataset(name, path, split)
        (images, labels), classes = next(iter(part.batch(part.size))), part.classes
    except (ValueError, OSError, EOFError) as error:
        return _part(split, Counter(), Counter(), [], [str(error)], None)
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    named = {str(classes[i] if i < len(classes) else i): count for i, count in enumerate(counts)}
    sizes = Counter({_size(images[0]): len(images)})
    return _part(split, sizes, Counter(named), list(named), [], Moments().add(images))


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
                values = torch.bincount(part[:, c].long(), minlength=256)  # 256 counts instead of wide squares
                self.sums[c] += int((values * torch.arange(256)).sum())
                self.squares[c] += int((values * torch.arange(256) ** 2).sum())
        self.channels = channels
        return self

    def read(self) -> tuple[list[float], list[float]]:
        means = [total / self.count / 255 for total in self.sums[: self.channels]]
        spread = [self.squares[c] / self.count - (self.sums[c] / self.count) ** 2 for c in range(self.channels)]
        return means, [max(0.0, each) ** 0.5 / 255 for each in spread]
