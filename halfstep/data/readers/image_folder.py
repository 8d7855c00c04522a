"""Image folders: one sub-folder per class, decoded by Pillow when an image is asked for."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from halfstep.data.readers.binary import opened, shown

if TYPE_CHECKING:
    from PIL.Image import Image

Bytes = npt.NDArray[np.uint8]
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
# what Pillow may take a file for: among its other formats are some that run a program to decode (EPS)
_FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "PPM", "TIFF")
_MODES = ("RGB", "L")


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Sample i is (uint8 image [H, W, 3] or, for mode L, [H, W, 1]; label), upright by its EXIF tag.

    `classes` are the sub-folders by name, and a label is an index into them; `files` are sorted by path within each
    class. Alpha is dropped, 16-bit gray keeps its high byte, of an animation the first frame counts.
    """

    def __init__(self, root: str | Path, *, mode: Literal["RGB", "L"] = "RGB") -> None:
        if mode not in _MODES:
            raise ValueError(f"expected mode to be one of {list(_MODES)}, got {mode!r}")
        if find_spec("PIL") is None:
            raise ImportError(
                "expected Pillow, which decodes images, found it not installed. Run: pip install pillow"
            )
        self.root, self.mode = Path(root), mode
        self.classes = _list_classes(self.root)
        found = [_list_images(self.root / name) for name in self.classes]
        self.files = [path for paths in found for path in paths]
        self.labels = [label for label, paths in enumerate(found) for _ in paths]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return _read_image(Path(self.files[index]), self.mode), self.labels[index]


def _list_classes(root: Path) -> list[str]:
    if not root.is_dir():
        raise NotADirectoryError(
            f"{root}: expected a folder with one sub-folder per class, found no folder. Check the path."
        )
    names = sorted(entry.name for entry in _list(root) if entry.is_dir())
    if not names:
        raise ValueError(
            f"{root}: expected one sub-folder per class, found none. Sort the images into such folders."
        )
    return names


def _list_images(folder: Path) -> list[str]:
    paths = sorted(_walk(folder, ()))
    if not paths:
        kinds = " ".join(suffix[1:] for suffix in _SUFFIXES)
        raise ValueError(
            f"{folder}: expected images ({kinds}), found none. Remove the folder or fill it."
        )
    return paths


def _walk(folder: Path, above: tuple[Path, ...]) -> Iterator[str]:
    """Every image below, hidden names left out; links are followed, and one that leads back up is refused."""
    above = (*above, folder.resolve())
    for entry in _list(folder):
        if entry.is_dir():
            if Path(entry.path).resolve() in above:
                raise ValueError(
                    f"{entry.path}: expected images, found a link to a folder it is in. Remove the link."
                )
            yield from _walk(Path(entry.path), above)
        elif entry.name.lower().endswith(_SUFFIXES):
            if not entry.is_file():
                raise ValueError(
                    f"{entry.path}: expected an image file, found a broken link or a device. Remove it."
                )
            yield entry.path


def _list(folder: Path) -> list["os.DirEntry[str]"]:
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _read_image(path: Path, mode: str) -> Tensor:
    from PIL.Image import DecompressionBombError, DecompressionBombWarning

    with opened(path) as file:
        try:
            return torch.from_numpy(_decode(file, mode))
        except MemoryError:
            raise
        except (DecompressionBombError, DecompressionBombWarning) as error:
            advice = "Shrink the image, or raise PIL.Image.MAX_IMAGE_PIXELS if it is meant to be so large."
            raise _error(path, str(error), advice) from error
        except (
            Exception
        ) as error:  # Pillow's parsers raise what they stumble over: SyntaxError, struct.error, ...
            raise _error(path, _explained(file, error), "Replace the file or remove it.") from error


def _decode(file: BufferedReader, mode: str) -> Bytes:
    from PIL import Image, ImageOps

    with Image.open(file, formats=_FORMATS) as image:
        pixels, limit = image.width * image.height, Image.MAX_IMAGE_PIXELS
        if limit is not None and pixels > limit:  # Pillow itself only warns, up to twice the limit
            raise Image.DecompressionBombError(f"{pixels} pixels, over Pillow's limit of {limit}")
        wide = image.mode.startswith("I;16") or (
            image.mode == "I" and image.format in ("PPM", "PNG")
        )
        ImageOps.exif_transpose(
            image, in_place=True
        )  # otherwise it copies even what stands upright
        return _narrowed(image, mode) if wide else _converted(image, mode)


def _converted(image: "Image", mode: str) -> Bytes:
    if image.mode in ("I", "F"):
        raise ValueError(
            f"pixels of mode {image.mode}, whose white is not defined: save it with 8 or 16 bits"
        )
    image.info.pop(
        "transparency", None
    )  # alpha is dropped anyway, and Pillow would warn of a palette's
    array = np.array(
        image if image.mode == mode else image.convert(mode)
    )  # a copy: Pillow's own is read-only
    return array.reshape(*array.shape[:2], -1)


def _narrowed(image: "Image", mode: str) -> Bytes:
    """16-bit gray by its high byte, as Pillow reads 16-bit colour; its own conversion would clip at 255."""
    gray = (np.asarray(image) >> 8).astype(np.uint8)
    return np.repeat(gray[..., None], len(mode), axis=2)  # "RGB" has three letters, "L" one


def _explained(file: BufferedReader, error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if not isinstance(error, UnidentifiedImageError):
        return f"{type(error).__name__}: {error}"
    file.seek(0)
    head = file.read(512)
    return f"bytes of none of {', '.join(_FORMATS)}: {shown(head)}" if head else "an empty file"


def _error(path: Path, came: str, advice: str) -> ValueError:
    return ValueError(f"{path}: expected an image that Pillow can decode, found {came}. {advice}")
