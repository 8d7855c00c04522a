"""Folders that can be trained on, read in one way by every command.

One folder of images per class, split by themselves or into train/ and test/; the files of the MNIST
family, or those of CIFAR-10.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from halfstep import data
from halfstep.data import Dataset, ImageFolder
from halfstep.data.download.catalog import CATALOG
from halfstep.data.download.local_copy import local_path
from halfstep.data.readers.idx import read_split
from halfstep.data.readers.image_folder import SUFFIXES
from halfstep.data.splits import DEFAULT_SPLIT_SEED, DEFAULT_TEST_SHARE
from halfstep.errors import closest_name
from halfstep.utils.text import plural, printable

READABLE_FOLDERS = (
    "one folder of images per class, as they are or below train/ and test/ (or val/), "
    "or MNIST's or CIFAR-10's own files"
)
# What the parts of a split may be called, in any case; of several, the first is taken.
TRAIN_NAMES = ("train", "training")
TEST_NAMES = ("test", "testing", "val", "valid", "validation")


@dataclass(frozen=True)
class SplitFolder:
    """A folder that can be trained on: its kind, and the names of its two parts.

    `classes_in`: where the class folders of images lie that nobody has split.
    """

    root: Path
    kind: Literal["images", "unsplit", "idx", "cifar"]
    parts: tuple[str, str] = ("train", "test")
    classes_in: Path | None = None

    def read(self, part: str) -> Dataset:
        """The samples of a part as they are on the disk: uint8 images and labels."""
        if self.kind in ("images", "unsplit"):
            return Dataset(self.images()[self.parts.index(part)], ["image", "label"])
        if self.kind == "idx":
            images, labels = read_split(self.root, train=part == "train")
        else:
            images, labels = data.read_cifar(self.root, train=part == "train")
        if images.dim() == 3:
            images = images[..., None]
        return Dataset({"image": images, "label": labels}, classes=[str(i) for i in range(10)])

    def images(
        self, test_share: float = DEFAULT_TEST_SHARE, seed: int = DEFAULT_SPLIT_SEED
    ) -> tuple[ImageFolder, ImageFolder]:
        """Training and test images; those that nobody has split are, by share and seed."""
        if self.classes_in is not None:
            return ImageFolder(self.classes_in).split(test_share, seed=seed)
        train, test = self.parts
        return ImageFolder(self.root / train), ImageFolder(self.root / test)

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

    `allow_function`: whether a function of the user's would do as well; the message then says so.
    """
    root = local_path(name).expanduser()
    if not root.is_dir():
        raise _no_such_folder(name, allow_function=allow_function)

    names = {path.name for path in root.iterdir()}
    if any(file_name.startswith("train-images-idx3") for file_name in names):
        return SplitFolder(root, "idx")
    if "data_batch_1.bin" in names:
        return SplitFolder(root, "cifar")
    train_name = _find_part(root, TRAIN_NAMES)
    test_name = _find_part(root, TEST_NAMES)
    if train_name is not None and test_name is not None:
        return SplitFolder(root, "images", (train_name, test_name))

    # Perhaps the user named only a part of a split, or one class.
    split_root = enclosing_split(root)
    if split_root is not None:
        found = (_find_part(split_root, TRAIN_NAMES), _find_part(split_root, TEST_NAMES))
        parts = " and ".join(f"{part}/" for part in found)
        argument = f"--data {split_root}" if allow_function else str(split_root)
        raise ValueError(
            f"data: {root} is a part of {split_root}, which has {parts}: say {argument}"
        )

    # A folder called train may be a class too, of vehicles; then it holds no folders.
    classes_in = root
    if train_name is not None and _subfolder_names(root / train_name):
        classes_in = root / train_name
    class_names = _subfolder_names(classes_in)
    if test_name is not None or not class_names:
        lack = _describe_lack(root, train_name, test_name)
        raise ValueError(f"data: expected {READABLE_FOLDERS}; {lack}")
    if len(class_names) == 1:
        raise _one_class(classes_in, class_names[0])
    return SplitFolder(root, "unsplit", classes_in=classes_in)


def _find_part(root: Path, names: tuple[str, ...]) -> str | None:
    """The folder in `root` that has one of these names, in any case; None if there is none."""
    folders = {name.lower(): name for name in sorted(_subfolder_names(root), reverse=True)}
    return next((folders[name] for name in names if name in folders), None)


def _subfolder_names(root: Path) -> list[str]:
    if not root.is_dir():
        return []
    return sorted(
        path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")
    )


def _no_such_folder(name: str, allow_function: bool) -> ValueError:
    known = f"sample, {', '.join(CATALOG)}"
    if allow_function:
        known += ", a folder, a URL, or a function of yours as package.module:function"
    else:
        known += ", a folder or a URL"
    suggestion = ""
    closest = closest_name(name.rstrip("/"), ["sample", *CATALOG])
    if closest is not None:
        suggestion = f". Did you mean {closest!r}?"
    return ValueError(
        f"data: expected {known}; got {name!r}, and there is no such folder{suggestion}"
    )


def _describe_lack(root: Path, train_name: str | None, test_name: str | None) -> str:
    if test_name is not None:
        return f"{root} has {test_name}/ and no train/"
    if train_name is not None:
        return f"{root} has {train_name}/ and no class folders in it"
    images = [path for path in root.iterdir() if path.name.lower().endswith(SUFFIXES)]
    if images:
        return (
            f"{root} holds {plural(len(images), 'image')} and no folders. "
            f"Sort them into one folder per class: {root}/cat/1.jpg, {root}/dog/2.jpg"
        )
    return f"{root} holds none of these"


def _one_class(classes_in: Path, name: str) -> ValueError:
    """The error for a single class; where that folder holds the classes, it says so."""
    inner = classes_in / name
    if len(_subfolder_names(inner)) > 1:
        return ValueError(
            f"data: expected {READABLE_FOLDERS}; {classes_in} holds one folder, {printable(name)}, "
            f"and that holds folders. Perhaps they are the classes: say {inner}"
        )
    return ValueError(
        f"data: expected {READABLE_FOLDERS}; {classes_in} holds one class, {printable(name)}, and "
        "two or more can be told apart. Add a folder for each other class."
    )


def enclosing_split(root: Path) -> Path | None:
    """The folder with train and test of which `root` is a part, or a class in a part."""
    for part in (root, root.parent):
        split_root = part.parent
        train_name = _find_part(split_root, TRAIN_NAMES)
        test_names = [name for name in _subfolder_names(split_root) if name.lower() in TEST_NAMES]
        if train_name is not None and test_names and part.name in (train_name, *test_names):
            return split_root
    return None
