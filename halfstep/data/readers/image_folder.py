"""Image folders: one sub-folder per class. Pillow decodes an image when it is requested."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from halfstep.data.download.local_copy import local_path
from halfstep.data.readers.binary import describe_head, open_binary
from halfstep.data.readers.resize_crop import (
    Size,
    covering_size,
    parse_image_size,
    resize_and_crop,
)
from halfstep.data.splits import (
    DEFAULT_SPLIT_SEED,
    DEFAULT_TEST_SHARE,
    check_test_share,
    split_rank,
    stratified_split,
)
from halfstep.utils.checks import one_of, whole_number
from halfstep.utils.text import printable

if TYPE_CHECKING:
    from PIL.Image import Image

ByteArray = npt.NDArray[np.uint8]
SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")
# Images that Pillow cannot decode by itself, or not safely: they are counted where they lie.
UNREAD_SUFFIXES = (".heic", ".heif", ".avif", ".jxl", ".jp2", ".svg", ".psd", ".tga", ".eps")
RAW_SUFFIXES = (".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw")  # of cameras
# What Pillow may take a file for. Among its other formats are some that run a program to decode
# (EPS).
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "GIF", "PPM", "TIFF")
MODES = ("RGB", "L")
# Decoding takes 8 bytes per pixel, WebP 16: 270 MB, or 540 MB, for the largest image.
MAX_PIXELS = 1 << 25  # 8192 × 4096
STRIP_PIXELS = 1 << 20  # converted at once: a whole converted copy would take as much again
# Files decoded at once. Each may take what MAX_PIXELS allows; Pillow decodes without Python's lock.
MAX_THREADS = 8
ORIENTATION_TAG = 0x0112  # of EXIF
SIDEWAYS = (5, 6, 7, 8)  # its values of images that lie on a side

T = TypeVar("T")
P = TypeVar("P")


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Sample i is (image, label): uint8 [H, W, 3] or, for mode L, [H, W, 1].

    Images stand upright by their EXIF tag. `classes` are the sub-folders by name, and a label is an
    index into them; `files` are sorted by path within each class. Alpha is dropped, 16-bit gray
    keeps its high byte, and of an animation the first frame counts. An image of more than
    `max_pixels` is refused before it is decoded: a small file can hold a very large one.

    `size`, a number or (height, width), makes all images equal: resized so that they just cover it,
    then the centre is cropped. These are the pixels of torchvision's `Resize(224)` and
    `CenterCrop(224)` on Pillow images. None leaves every image its own size.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        size: int | tuple[int, int] | None = None,
        mode: Literal["RGB", "L"] = "RGB",
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        one_of("mode", mode, MODES)
        self.max_pixels = whole_number("max_pixels", max_pixels, minimum=1)
        self.size: Size | None = None if size is None else parse_image_size("size", size)
        if find_spec("PIL") is None:
            raise ImportError(
                "expected Pillow, which decodes images, found it not installed. "
                "Run: pip install pillow"
            )
        self.root = local_path(root, "ImageFolder")
        self.mode = mode
        self.classes = _list_classes(self.root)
        self.files: list[str] = []
        self.labels: list[int] = []
        self.unread: Counter[str] = Counter()
        """How many images of kinds that are not read lie there, by suffix."""
        for label, name in enumerate(self.classes):
            paths, unread = _list_images(self.root / name)
            self.unread += unread
            self.files.extend(paths)
            self.labels.extend([label] * len(paths))
        self.on_read: Callable[[int], None] | None = None
        """Called with the number of images after each group of them: for a progress bar."""

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path = Path(self.files[index])
        return read_image(path, self.mode, self.max_pixels, self.size), self.labels[index]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Several samples, decoded in threads."""
        samples = list(read_in_threads(self.__getitem__, indices))
        if self.on_read is not None:
            self.on_read(len(samples))
        return samples

    def __getstate__(self) -> dict[str, Any]:
        """A copy for another process shows no progress here."""
        return {**self.__dict__, "on_read": None}

    def split(
        self, test_share: float = DEFAULT_TEST_SHARE, *, seed: int = DEFAULT_SPLIT_SEED
    ) -> tuple["ImageFolder", "ImageFolder"]:
        """Training and test images: of each class, `test_share` of its files are test images.

        Which, depends only on the seed and the files' paths below the folder: a folder that was
        moved has the same split, and one file more or less moves at most one other.
        """
        ranks = [
            split_rank(Path(path).relative_to(self.root).as_posix(), seed) for path in self.files
        ]
        train, test = stratified_split(ranks, self.labels, check_test_share(test_share))
        if not test:
            raise ValueError(
                f"{self.root}: expected two images of a class or more, to split them, "
                f"found {len(train)} in {len(self.classes)} classes"
            )
        return self.subset(train), self.subset(test)

    def subset(self, indices: Iterable[int]) -> "ImageFolder":
        """The folder with these of its samples only, in this order; its classes stay."""
        part = copy(self)
        chosen = list(indices)
        part.files = [self.files[i] for i in chosen]
        part.labels = [self.labels[i] for i in chosen]
        return part

    def resized(self, size: Size | None) -> "ImageFolder":
        """The folder with its images in another size."""
        part = copy(self)
        part.size = size
        return part


def read_in_threads(read: Callable[[P], T], items: Sequence[P]) -> Iterator[T]:
    """read(item) for every item, in order; the first error is raised in its place."""
    thread_count = min(MAX_THREADS, os.cpu_count() or 1, len(items))
    if thread_count <= 1:
        yield from map(read, items)
        return
    with ThreadPoolExecutor(thread_count) as pool:
        try:
            yield from pool.map(read, items)
        finally:
            pool.shutdown(cancel_futures=True)


def _list_classes(root: Path) -> list[str]:
    if not root.is_dir():
        raise NotADirectoryError(
            f"{root}: expected a folder with one sub-folder per class, found no folder. "
            "Check the path."
        )
    names = sorted(entry.name for entry in _list_entries(root) if entry.is_dir())
    if not names:
        raise ValueError(
            f"{root}: expected one sub-folder per class, found none. "
            "Sort the images into such folders."
        )
    return names


def _list_images(folder: Path) -> tuple[list[str], Counter[str]]:
    """The images below a folder, sorted, and how many of other kinds there are, by suffix."""
    unread: Counter[str] = Counter()
    paths = sorted(_walk_images(folder, unread, ancestors=()))
    if not paths:
        kinds = " ".join(suffix[1:] for suffix in SUFFIXES)
        found = "none"
        if unread:
            found = f"{describe_unread(unread)} alone, which are not read: convert them to JPEG"
        raise ValueError(
            f"{printable(folder)}: expected images ({kinds}), found {found}. "
            "Remove the folder or fill it."
        )
    return paths, unread


def describe_unread(unread: Counter[str]) -> str:
    """How many there are of each kind: "12 .heic, 1 .psd"."""
    return ", ".join(f"{count:,} {suffix}" for suffix, count in unread.most_common())


def _walk_images(folder: Path, unread: Counter[str], ancestors: tuple[Path, ...]) -> Iterator[str]:
    """Every image below a folder, except hidden ones. Those of other kinds are counted in `unread`.

    Links are followed. A link to a folder that it is in would never end, and is refused.
    """
    ancestors = (*ancestors, folder.resolve())
    for entry in _list_entries(folder):
        if entry.is_dir():
            if Path(entry.path).resolve() in ancestors:
                raise ValueError(
                    f"{printable(entry.path)}: expected images, found a link to a folder it is in. "
                    "Remove the link."
                )
            yield from _walk_images(Path(entry.path), unread, ancestors)
        elif Path(entry.name).suffix.lower() in (*UNREAD_SUFFIXES, *RAW_SUFFIXES):
            unread[Path(entry.name).suffix.lower()] += 1
        elif entry.name.lower().endswith(SUFFIXES):
            if not entry.is_file():
                raise ValueError(
                    f"{printable(entry.path)}: expected an image file, "
                    "found a broken link or a device. Remove it."
                )
            yield entry.path


def _list_entries(folder: Path) -> list["os.DirEntry[str]"]:
    """What is in a folder, hidden names left out."""
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def read_image(
    path: Path, mode: str, max_pixels: int = MAX_PIXELS, size: Size | None = None
) -> Tensor:
    """The pixels of an image file, as ImageFolder gives them."""

    with open_binary(path) as file:
        return decode_image(file, path, mode, max_pixels, size)


def decode_image(
    file: IO[bytes],
    place: object,
    mode: str,
    max_pixels: int = MAX_PIXELS,
    size: Size | None = None,
) -> Tensor:
    """The pixels of an image; `place` is where it lies, for errors."""

    def read(file: IO[bytes]) -> Tensor:
        return torch.from_numpy(_decode(file, mode, max_pixels, size))

    return _read_checked(file, place, read)


def read_image_head(path: Path) -> tuple[Size, str]:
    """(height, width) of the image as it stands upright, and Pillow's mode; nothing is decoded."""
    with open_binary(path) as file:
        return _read_checked(file, path, _read_head)


def _read_head(file: IO[bytes]) -> tuple[Size, str]:
    from PIL import Image

    with Image.open(file, formats=FORMATS) as image:
        size = (image.height, image.width)
        if image.getexif().get(ORIENTATION_TAG) in SIDEWAYS:
            size = (image.width, image.height)
        return size, image.mode


def _read_checked(file: IO[bytes], place: object, read: Callable[[IO[bytes]], T]) -> T:
    """What `read` makes of the file; its errors name the place and say what to do."""
    from PIL.Image import DecompressionBombError, DecompressionBombWarning

    try:
        return read(file)
    except MemoryError:
        raise
    except ImageTooLarge as error:
        advice = "Shrink the image, or pass ImageFolder(…, max_pixels=…) if it is meant to be."
        raise _image_error(place, str(error), advice) from error
    except (DecompressionBombError, DecompressionBombWarning) as error:
        advice = (
            "Shrink the image, or raise PIL.Image.MAX_IMAGE_PIXELS if it is meant to be so large."
        )
        raise _image_error(place, str(error).rstrip("."), advice) from error
    except Exception as error:
        # Pillow's parsers raise what they stumble over: SyntaxError, struct.error, ...
        actual = _explain_decode_error(file, error)
        raise _image_error(place, actual, "Replace the file or remove it.") from error


class ImageTooLarge(ValueError):
    """An image of more pixels than its reader decodes."""


def _decode(file: IO[bytes], mode: str, max_pixels: int, size: Size | None) -> ByteArray:
    pixels = _decode_own_size(file, mode, max_pixels, size)
    return pixels if size is None else resize_and_crop(pixels, size)


def _decode_own_size(file: IO[bytes], mode: str, max_pixels: int, size: Size | None) -> ByteArray:
    from PIL import Image, ImageOps

    with Image.open(file, formats=FORMATS) as image:
        # Only the head of the file has been read so far.
        pixel_count = image.width * image.height
        if pixel_count > max_pixels:
            raise ImageTooLarge(
                f"{image.width:,} × {image.height:,} pixels, over max_pixels={max_pixels:,}"
            )
        if size is not None:
            _check_resized(image, size, max_pixels)
        # Pillow itself only warns, up to twice its limit.
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and pixel_count > limit:
            raise Image.DecompressionBombError(
                f"{pixel_count} pixels, over Pillow's limit of {limit}"
            )
        # Pillow has several modes for 16-bit gray.
        is_16_bit = image.mode.startswith("I;16")
        if image.mode == "I" and image.format in ("PPM", "PNG"):
            is_16_bit = True
        # In place: otherwise Pillow copies even what stands upright.
        ImageOps.exif_transpose(image, in_place=True)
        if is_16_bit:
            return _take_high_byte(image, mode)
        return _convert(image, mode)


def _check_resized(image: "Image", size: Size, max_pixels: int) -> None:
    """Refuses a stripe: resized by its short side it would be as large as no memory."""
    for height, width in ((image.height, image.width), (image.width, image.height)):
        resized = covering_size(height, width, size)
        if resized[0] * resized[1] > max_pixels:
            raise ImageTooLarge(
                f"{image.width:,} × {image.height:,} pixels, of which covering "
                f"{size[1]} × {size[0]} makes {resized[1]:,} × {resized[0]:,}, "
                f"over max_pixels={max_pixels:,}"
            )


def _convert(image: "Image", mode: str) -> ByteArray:
    if image.mode in ("I", "F"):
        raise ValueError(
            f"pixels of mode {image.mode}, whose white is not defined: save it with 8 or 16 bits"
        )
    # Alpha is dropped anyway, and Pillow would warn about that of a palette.
    image.info.pop("transparency", None)
    image.load()
    pixels = np.empty((image.height, image.width, len(mode)), np.uint8)  # "RGB" has three letters
    strip_height = max(1, STRIP_PIXELS // image.width)
    for top in range(0, image.height, strip_height):
        bottom = min(top + strip_height, image.height)
        strip = image
        if bottom - top < image.height:
            strip = image.crop((0, top, image.width, bottom))
        if strip.mode != mode:
            strip = strip.convert(mode)
        pixels[top:bottom] = np.asarray(strip).reshape(bottom - top, image.width, len(mode))
    return pixels


def _take_high_byte(image: "Image", mode: str) -> ByteArray:
    """16-bit gray by its high byte, as Pillow reads 16-bit colour; its `convert` clips at 255."""
    gray = (np.asarray(image) >> 8).astype(np.uint8)
    return np.repeat(gray[..., None], len(mode), axis=2)


def _explain_decode_error(file: IO[bytes], error: Exception) -> str:
    from PIL import UnidentifiedImageError

    if not isinstance(error, UnidentifiedImageError):
        return f"{type(error).__name__}: {error}"
    file.seek(0)
    head = file.read(512)
    if not head:
        return "an empty file"
    return f"bytes of none of {', '.join(FORMATS)}: {describe_head(head)}"


def _image_error(place: object, actual: str, advice: str) -> ValueError:
    return ValueError(
        f"{printable(place)}: expected an image that Pillow can decode, "
        f"found {printable(actual)}. {advice}"
    )
