"""Strict reader of idx files, the format of the MNIST family: two zero bytes, type, rank, big-endian sizes, data."""

import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from halfstep.data.readers.binary import Content, damaged, opened, shown, take, unpacked

_TYPES = {
    0x08: "uint8",
    0x09: "int8",
    0x0B: "int16",
    0x0C: "int32",
    0x0D: "float32",
    0x0E: "float64",
}
_UINT8 = 0x08
_LARGEST = 1 << 40  # bytes of one sample; beyond 2^63 in all, even an empty tensor has no strides
_FILES = {
    True: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    False: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def read_idx(path: str | Path, *, dims: int) -> Tensor:
    """The file's uint8 tensor of rank `dims`, plain or gzip; anything but exactly that in the file is a ValueError.

    The first size may be 0. Memory follows the bytes that are in the file, never the sizes it declares.
    """
    if not 1 <= dims <= 64:  # numpy's and torch's limit
        raise ValueError(f"expected 1 to 64 dims, got {dims!r}. Pass 3 for images, 1 for labels.")
    with opened(Path(path)) as file:
        content = unpacked(Path(path), file)
        shape = _read_shape(content, dims)
        values = _read_values(content, shape, start=4 + 4 * dims)
    return torch.from_numpy(
        np.frombuffer(values, np.uint8).reshape(shape)
    )  # a bytearray's memory is writable


def read_split(
    folder: str | Path, *, train: bool = True, classes: int = 10
) -> tuple[Tensor, Tensor]:
    """One split of an MNIST-family folder under its original file names, plain or .gz: uint8 images [N, H, W] and int64
    labels [N], N at least 1, each label in 0..classes−1."""
    if not 1 <= classes <= 256:
        raise ValueError(f"expected 1 to 256 classes, got {classes!r}. A label is one byte.")
    images_path, labels_path = (_find(Path(folder), name) for name in _FILES[train])
    images, labels = read_idx(images_path, dims=3), read_idx(labels_path, dims=1).long()
    if not len(images):
        raise damaged(images_path, "at least one image", "a count of 0", at="byte 4")
    if len(images) != len(labels):
        expected = f"{len(images)} labels, one per image of {images_path.name},"
        advice = "Fetch both files again, from one place."
        raise damaged(labels_path, expected, f"{len(labels)}", at="byte 4", advice=advice)
    _check_labels(labels_path, labels, classes)
    return images, labels


def _read_shape(content: Content, dims: int) -> tuple[int, ...]:
    magic = bytes([0, 0, _UINT8, dims])
    head = bytes(take(content, 4))
    if head != magic:
        came = shown(head + content.read(258)) + _described(head)
        raise _error(content, 0, f"magic {magic.hex(' ')} (uint8, {_ranked(dims)})", came)
    sizes = take(content, 4 * dims)
    if len(sizes) != 4 * dims:
        raise _error(
            content, 4 + len(sizes), f"a header of {4 + 4 * dims} bytes", "the end of the file"
        )
    shape = struct.unpack(f">{dims}I", sizes)
    if 0 in shape[1:]:
        raise _error(content, 4 + 4 * shape.index(0, 1), "a size of 1 or more", "0")
    if math.prod(shape[1:]) > _LARGEST:
        raise _error(
            content, 8, "sizes of a sample within 2^40 bytes", " × ".join(map(str, shape[1:]))
        )
    return shape


def _read_values(content: Content, shape: tuple[int, ...], start: int) -> bytearray:
    """Exactly the declared bytes; one more, packed or not, is found and refused without reading on."""
    count, room = math.prod(shape), content.room()
    expected = f"{count} data bytes for shape {shape}"
    if room is not None and start + count > room:
        raise _error(
            content,
            start,
            expected,
            f"a gzip file too small for it: {room} bytes at the very best (truncated)",
        )
    values = take(content, count)
    if len(values) < count:
        raise _error(
            content,
            start + len(values),
            expected,
            f"the end of the file after {len(values)} (truncated)",
        )
    if content.read(1):
        raise _error(
            content, start + count, f"the end of the file, after {expected},", "other bytes"
        )
    return values


def _check_labels(path: Path, labels: Tensor, classes: int) -> None:
    wrong = (labels >= classes).nonzero()
    if len(wrong):
        first, advice = (
            int(wrong[0]),
            "Pass classes= as the data set has them, or fetch the file again.",
        )
        came = (
            f"{int(labels[first])} as label number {first} ({len(wrong)} labels are out of range)"
        )
        raise damaged(
            path,
            f"labels in 0..{classes - 1}",
            came,
            at=f"byte {8 + first} of its content",
            advice=advice,
        )


def _described(head: bytes) -> str:
    """What another idx file's magic means."""
    known = len(head) == 4 and head[:2] == b"\0\0" and head[2] in _TYPES
    return f" ({_TYPES[head[2]]}, {_ranked(head[3])})" if known else ""


def _ranked(dims: int) -> str:
    return f"{dims} dimension{'' if dims == 1 else 's'}"


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{folder}: expected {name} or {name}.gz, found neither. Name the folder that holds them."
    )


def _error(content: Content, at: int, expected: str, came: str) -> ValueError:
    return damaged(content.path, expected, came, at=f"{content.unit} {at}")
