"""Folders that can be trained on, read in one way by every command.

train/ and test/ with images, the files of the MNIST family, or those of CIFAR-10.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halfstep import data
from halfstep.data import Dataset, ImageFolder
from halfstep.data.download.catalog import CATALOG
from halfstep.data.readers.idx import read_split
from halfstep.errors import closest_name
from halfstep.utils.text import printable

READABLE_FOLDERS = (
    "train/ and test/ (or val/) with one folder of images per class, "
    "or MNIST's or CIFAR-10's own files"
)
TEST_NAMES = ("test", "val", "valid")  # what the second part of a split may be called
SPLIT_NAMES = ("train", *TEST_NAMES)


@dataclass(frozen=True)
class SplitFolder:
    """A folder that can be trained on: its kind, and the names of its two parts."""

    root: Path
    kind: Literal["images", "idx", "cifar"]
    parts: tuple[str, str] = ("train", "test")

    def read(self, part: str) -> Dataset:
        """The samples as they are on the disk: uint8 images and labels."""
        if self.kind == "images":
            return Dataset(ImageFolder(self.root / part), ["image", "label"])
        if self.kind == "idx":
            images, labels = read_split(self.root, train=part == "train")
        else:
            images, labels = data.read_cifar(self.root, train=part == "train")
        if images.dim() == 3:
            images = images[..., None]
        return Dataset({"image": images, "label": labels}, classes=[str(i) for i in range(10)])

    def class_mismatch(self) -> str | None:
        """What is wrong if the parts have different class folders; None if nothing.

        A label is the position of its class folder: other folders in one part are other labels.
        """
        if self.kind != "images":
            return None
        train, test = self.parts
        train_classes = ImageFolder(self.root / train).classes
        test_classes = ImageFolder(self.root / test).classes
        unmatched = [f"{train}/{name}" for name in train_classes if name not in test_classes]
        unmatched += [f"{test}/{name}" for name in test_classes if name not in train_classes]
        if not unmatched:
            return None
        return (
            f"{self.root}: expected the same classes in {train} and {test}, "
            f"found {', '.join(map(printable, unmatched))} in one only"
        )


def open_split_folder(name: str, *, allow_function: bool = True) -> SplitFolder:
    """The folder of that name; a ValueError says what it lacks.

    `own`: whether a function of the user's would do as well; the message then says so.
    """
    root = Path(name).expanduser()
    if not root.is_dir():
        raise _no_such_folder(name, allow_function=allow_function)

    names = {path.name for path in root.iterdir()}
    if any(file_name.startswith("train-images-idx3") for file_name in names):
        return SplitFolder(root, "idx")
    if "data_batch_1.bin" in names:
        return SplitFolder(root, "cifar")
    test_name = next((part for part in TEST_NAMES if (root / part).is_dir()), None)
    if (root / "train").is_dir() and test_name is not None:
        return SplitFolder(root, "images", ("train", test_name))

    # Perhaps the user named only a part of a split, or one class.
    split_root = enclosing_split(root)
    if split_root is not None:
        parts = " and ".join(f"{part}/" for part in SPLIT_NAMES if (split_root / part).is_dir())
        argument = f"--data {split_root}" if allow_function else str(split_root)
        raise ValueError(
            f"data: {root} is a part of {split_root}, which has {parts}: say {argument}"
        )
    raise ValueError(f"data: expected {READABLE_FOLDERS}; {_describe_lack(root, test_name)}")


def _no_such_folder(name: str, allow_function: bool) -> ValueError:
    known = f"sample, {', '.join(CATALOG)}"
    if allow_function:
        known += ", a folder, or a function of yours as package.module:function"
    else:
        known += ", or a folder"
    suggestion = ""
    closest = closest_name(name.rstrip("/"), ["sample", *CATALOG])
    if closest is not None:
        suggestion = f". Did you mean {closest!r}?"
    return ValueError(
        f"data: expected {known}; got {name!r}, and there is no such folder{suggestion}"
    )


def _describe_lack(root: Path, test_name: str | None) -> str:
    if (root / "train").is_dir():
        return f"{root} has train/ and no test/. Put some of its images there, by the same classes."
    if test_name is not None:
        return f"{root} has {test_name}/ and no train/"
    if has_unsplit_classes(root):
        return (
            f"{root} holds folders that are neither. "
            f"Move those of its classes below {root}/train and {root}/test."
        )
    return f"{root} holds none of these"


def has_unsplit_classes(root: Path) -> bool:
    """Whether it has one folder per class, not yet split into train and test."""
    if any((root / part).is_dir() for part in SPLIT_NAMES):
        return False
    return any(path.is_dir() and not path.name.startswith(".") for path in root.iterdir())


def enclosing_split(root: Path) -> Path | None:
    """The folder with train and test of which `root` is a part, or a class in a part."""
    for part in (root, root.parent):
        split_root = part.parent
        has_test = any((split_root / name).is_dir() for name in TEST_NAMES)
        if part.name in SPLIT_NAMES and has_test and (split_root / "train").is_dir():
            return split_root
    return None
