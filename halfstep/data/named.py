"""Known data sets by name, as pipelines ready to be mapped, shuffled and batched."""

from pathlib import Path
from typing import Literal

from torch import Tensor

from halfstep.data.download.catalog import CatalogEntry, catalog_entry
from halfstep.data.download.find import SAMPLE, find, forget_download
from halfstep.data.pipeline.dataset import Dataset
from halfstep.data.readers.cifar import read_cifar
from halfstep.data.readers.idx import read_split


def load(
    name: str,
    split: Literal["train", "test"] = "train",
    *,
    path: str | Path | None = None,
    download: bool = False,
    seed: int = 0,
) -> Dataset:
    """The named set with columns image (uint8, HWC) and label (int64), and its class names.

    Searched in `path` (a folder, an archive or a URL) where one is named, else in HALFSTEP_DATA,
    the user's cache and Debian's packages; downloaded only with `download=True`. Fashion-MNIST
    alone falls back to the shipped sample, with a notice.
    """
    if split not in ("train", "test"):
        raise ValueError(f"expected split 'train' or 'test', got {split!r}")
    entry = catalog_entry(name)
    location = find(name, path, download=download)
    try:
        images, labels = _read_images(entry, location.folder, train=split == "train")
    except (ValueError, OSError):
        # Files from an address without a checksum may be anything. They leave the cache, so that
        # the next call asks the address again.
        forget_download(location)
        raise
    return Dataset({"image": images, "label": labels}, seed=seed, classes=entry.classes)


def _read_images(entry: CatalogEntry, folder: Path, *, train: bool) -> tuple[Tensor, Tensor]:
    """uint8 images [N, H, W, C] and int64 labels [N]."""
    if entry.kind == "cifar":
        return read_cifar(folder, train=train, classes=100 if entry.num_classes == 100 else 10)
    images, labels = read_split(folder, train=train)
    return images.unsqueeze(-1), labels


def sample(train: bool = True) -> tuple[Tensor, Tensor]:
    """The shipped part of Fashion-MNIST: uint8 images [N, 28, 28], int64 labels [N].

    It has equally many images of each class.
    """
    return read_split(SAMPLE, train=train)
