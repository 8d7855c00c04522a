"""What a folder of data may hold, read one way by every command: splits of images, MNIST-family files, CIFAR-10's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halfstep import data
from halfstep.data import Dataset, ImageFolder
from halfstep.data.download.catalog import CATALOG
from halfstep.data.readers.idx import read_split
from halfstep.errors import closest_name

READ = "train/ and test/ (or val/) with one folder of images per class, or MNIST's or CIFAR-10's own files"
_OTHERS = ("test", "val", "valid")


@dataclass(frozen=True)
class Folder:
    """A folder that can be trained on: its kind, and the names of its two parts."""

    root: Path
    kind: Literal["images", "idx", "cifar"]
    parts: tuple[str, str] = ("train", "test")

    def read(self, part: str) -> Dataset:
        """Samples as they are on the disk: uint8 images and labels."""
        train = part == "train"
        if self.kind == "images":
            return Dataset(ImageFolder(self.root / part), ["image", "label"])
        images, labels = (
            read_split(self.root, train=train)
            if self.kind == "idx"
            else data.read_cifar(self.root, train=train)
        )
        images = images[..., None] if images.dim() == 3 else images
        return Dataset({"image": images, "label": labels}, classes=[str(i) for i in range(10)])

    def mismatch(self) -> str | None:
        """Labels are numbers by the order of the class folders: other folders in one part are other labels."""
        if self.kind != "images":
            return None
        first, second = (ImageFolder(self.root / part).classes for part in self.parts)
        odd = [f"{part}/{name}" for part, a, b in zip(self.parts, (first, second), (second, first), strict=True)
               for name in a if name not in b]  # fmt: skip
        if not odd:
            return None
        return f"{self.root}: expected the same classes in {' and '.join(self.parts)}, found {', '.join(odd)} in one only"


def found(name: str, *, own: bool = True) -> Folder:
    """The folder by that name; what it lacks is told. `own`: a function of the user's would do too."""
    root = Path(name).expanduser()
    if not root.is_dir():
        close = closest_name(name.rstrip("/"), ["sample", *CATALOG])
        known = f"sample, {', '.join(CATALOG)}" + (
            ", a folder, or a function of yours as package.module:function"
            if own
            else ", or a folder"
        )
        hint = f". Did you mean {close!r}?" if close else ""
        raise ValueError(f"data: expected {known}; got {name!r}, and there is no such folder{hint}")
    held = {path.name for path in root.iterdir()}
    if any(each.startswith("train-images-idx3") for each in held):
        return Folder(root, "idx")
    if "data_batch_1.bin" in held:
        return Folder(root, "cifar")
    other = next((part for part in _OTHERS if (root / part).is_dir()), None)
    if (root / "train").is_dir() and other is not None:
        return Folder(root, "images", ("train", other))
    above = split_above(root)
    if above is not None:
        parts = " and ".join(f"{part}/" for part in ("train", *_OTHERS) if (above / part).is_dir())
        say = f"--data {above}" if own else str(above)
        raise ValueError(f"data: {root} is a part of {above}, which has {parts}: say {say}")
    raise ValueError(f"data: expected {READ}; {_lacking(root, other)}")


def classes_alone(root: Path) -> bool:
    """One folder per class, not yet split into train and test."""
    split = any((root / part).is_dir() for part in ("train", *_OTHERS))
    return not split and any(
        path.is_dir() and not path.name.startswith(".") for path in root.iterdir()
    )


def split_above(root: Path) -> Path | None:
    """The folder with train and test that `root` is a part of, or a class in one of its parts."""
    for part in (root, root.parent):
        beside = (
            any((part.parent / other).is_dir() for other in _OTHERS)
            and (part.parent / "train").is_dir()
        )
        if part.name in ("train", *_OTHERS) and beside:
            return part.parent
    return None


def _lacking(root: Path, other: str | None) -> str:
    if (root / "train").is_dir():
        return f"{root} has train/ and no test/. Put some of its images there, by the same classes."
    if other is not None:
        return f"{root} has {other}/ and no train/"
    if classes_alone(root):
        return f"{root} holds folders that are neither. Move those of its classes below {root}/train and {root}/test."
    return f"{root} holds none of these"
