"""Whether a folder holds a data set, in which of its sub-folders, and whether it is really that set."""

import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from halfstep.data.download.catalog import CATALOG, Entry

SAMPLE = Path(__file__).parents[1] / "sample"


def search(entry: Entry, root: Path, *, deep: bool = False) -> tuple[Path | None, str]:
    """The folder with the files in or under `root`, or why there is none: the nearest miss."""
    most, reason = 0, f"there is no folder {root}"
    if os.path.isdir(root):
        reason = f"{root} has neither the files nor a folder called {entry.name}"
    for folder in _folders(entry, root, deep):
        lacking = [name for name in entry.files if file_of(entry, folder, name) is None]
        other = "" if lacking else _other(entry, folder)
        if not lacking and not other:
            return folder, ""
        if len(entry.files) - len(lacking) > most:
            most = len(entry.files) - len(lacking)
            reason = f"{folder} {other}" if other else f"{folder} lacks {', '.join(lacking)}"
    return None, reason


def _folders(entry: Entry, root: Path, deep: bool) -> Iterator[Path]:
    """Where to look: folders called like the set come first, for MNIST and Fashion-MNIST share their files' names."""
    for child in _subfolders(root):
        if entry.is_called(child.name):
            yield child
            yield from (
                inner
                for inner in _subfolders(child)
                if inner.name == "raw" or entry.is_called(inner.name)
            )
    yield from (root, root / "raw")  # torchvision's layout is MNIST/raw
    if deep:
        yield from sorted(Path(folder) for folder, _, _ in os.walk(root))


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []  # not there, or not readable: then it holds nothing for us


def file_of(entry: Entry, folder: Path, name: str) -> Path | None:
    """The set's file of that name in `folder`; idx files may be packed, for their reader takes both."""
    names = (name, f"{name}.gz") if entry.kind == "idx" else (name,)
    return next((folder / each for each in names if os.path.isfile(folder / each)), None)


def _other(entry: Entry, folder: Path) -> str:
    """Why these files are another set's, by their test labels or the folder's name; empty when they are not."""
    others = [each for each in CATALOG.values() if each is not entry and each.files == entry.files]
    if entry.name != "fashion-mnist" and is_sample(folder):
        return "holds a sample of fashion-mnist"
    labels = file_of(entry, folder, entry.files[-1])
    digest = _labels_digest(labels) if others and labels else ""
    name = folder.parent.name if folder.name == "raw" else folder.name
    for other in others:
        if other.contents[-1].hex == digest:
            return f"holds {other.name}"
        if other.is_called(name) and digest != entry.contents[-1].hex:
            return f"is called like {other.name}"
    return ""


def is_sample(folder: Path) -> bool:
    """Whether it is the part of Fashion-MNIST that ships with the package."""
    return folder.resolve() == SAMPLE.resolve()


def _labels_digest(path: Path) -> str:
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return hashlib.sha256(file.read(1 << 16)).hexdigest()  # 10,008 bytes in both sets
    except (OSError, EOFError, zlib.error):
        return ""  # damaged: the reader says so, by name
