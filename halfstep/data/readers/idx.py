"""Strict reader of idx files, the format of the MNIST family.

A file is two zero bytes, one for the type, one for the rank, then the sizes (big-endian) and the
data.
"""

import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from halfstep.data.download.local_copy import local_path
from halfstep.data.readers.binary import (
    Content,
    damaged_file_error,
    describe_head,
    open_binary,
    open_content,
    read_up_to,
)

TYPE_NAMES = {
    0x08: "uint8",
    0x09: "int8",
    0x0B: "int16",
    0x0C: "int32",
    0x0D: "float32",
    0x0E: "float64",
}
UINT8 = 0x08
MAX_DIMS = 64  # numpy's and torch's limit
# Bytes of one sample. Beyond 2^63 in all, even an empty tensor has no strides.
MAX_SAMPLE_BYTES = 1 << 40
TRAIN_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST_FILES = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def read_idx(path: str | Path, *, dims: int) -> Tensor:
    """The uint8 tensor of rank `dims` in an idx file, plain or gzip.

    Anything but exactly that in the file is a ValueError. The first size may be 0. Memory follows
    the bytes that are in the file, never the sizes it declares.
    """
    if not 1 <= dims <= MAX_DIMS:
        raise ValueError(f"expected 1 to 64 dims, got {dims!r}. Pass 3 for images, 1 for labels.")
    path = local_path(path, "read_idx")
    with open_binary(path) as file:
        content = open_content(path, file)
        shape = _read_shape(content, dims)
        values = _read_values(content, shape, start=4 + 4 * dims)
    # The memory of a bytearray is writable, so the tensor is too.
    return torch.from_numpy(np.frombuffer(values, np.uint8).reshape(shape))


def read_split(
    folder: str | Path, *, train: bool = True, classes: int = 10
) -> tuple[Tensor, Tensor]:
    """One split of an MNIST-family folder: uint8 images [N, H, W] and int64 labels [N].

    The files have their original names, plain or .gz. N is at least 1, and each label is in
    0..classes−1.
    """
    if not 1 <= classes <= 256:
        raise ValueError(f"expected 1 to 256 classes, got {classes!r}. A label is one byte.")
    images_name, labels_name = TRAIN_FILES if train else TEST_FILES
    folder = local_path(folder, "read_split")
    images_path = _find_file(folder, images_name)
    labels_path = _find_file(folder, labels_name)
    images = read_idx(images_path, dims=3)
    labels = read_idx(labels_path, dims=1).long()
    if len(images) == 0:
        raise damaged_file_error(images_path, "at least one image", "a count of 0", at="byte 4")
    if len(images) != len(labels):
        raise damaged_file_error(
            labels_path,
            f"{len(images)} labels, one per image of {images_path.name},",
            str(len(labels)),
            at="byte 4",
            advice="Fetch both files again, from one place.",
        )
    _check_labels(labels_path, labels, classes)
    return images, labels


def _find_file(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(
        f"{folder}: expected {name} or {name}.gz, found neither. Name the folder that holds them."
    )


def _read_shape(content: Content, dims: int) -> tuple[int, ...]:
    magic = bytes([0, 0, UINT8, dims])
    head = bytes(read_up_to(content, 4))
    if head != magic:
        actual = describe_head(head + content.read(258)) + _describe_magic(head)
        expected = f"magic {magic.hex(' ')} (uint8, {_describe_rank(dims)})"
        raise _damaged(content, 0, expected, actual)

    sizes = read_up_to(content, 4 * dims)
    if len(sizes) != 4 * dims:
        expected = f"a header of {4 + 4 * dims} bytes"
        raise _damaged(content, 4 + len(sizes), expected, "the end of the file")
    shape = struct.unpack(f">{dims}I", sizes)
    if 0 in shape[1:]:
        raise _damaged(content, 4 + 4 * shape.index(0, 1), "a size of 1 or more", "0")
    if math.prod(shape[1:]) > MAX_SAMPLE_BYTES:
        actual = " × ".join(map(str, shape[1:]))
        raise _damaged(content, 8, "sizes of a sample within 2^40 bytes", actual)
    return shape


def _read_values(content: Content, shape: tuple[int, ...], start: int) -> bytearray:
    """Exactly the declared bytes. If there is one more, it is refused without reading further."""
    count = math.prod(shape)
    expected = f"{count} data bytes for shape {shape}"
    max_size = content.max_size()
    if max_size is not None and start + count > max_size:
        actual = f"a gzip file too small for it: {max_size} bytes at the very best (truncated)"
        raise _damaged(content, start, expected, actual)
    values = read_up_to(content, count)
    if len(values) < count:
        actual = f"the end of the file after {len(values)} (truncated)"
        raise _damaged(content, start + len(values), expected, actual)
    if content.read(1):
        expected = f"the end of the file, after {expected},"
        raise _damaged(content, start + count, expected, "other bytes")
    return values


def _check_labels(path: Path, labels: Tensor, classes: int) -> None:
    out_of_range = (labels >= classes).nonzero()
    if len(out_of_range) == 0:
        return
    first = int(out_of_range[0])
    raise damaged_file_error(
        path,
        f"labels in 0..{classes - 1}",
        f"{int(labels[first])} as label number {first} "
        f"({len(out_of_range)} labels are out of range)",
        at=f"byte {8 + first} of its content",
        advice="Pass classes= as the data set has them, or fetch the file again.",
    )


def _describe_magic(head: bytes) -> str:
    """What the magic of another idx file means; an empty text if it is none."""
    is_idx = len(head) == 4 and head[:2] == b"\0\0" and head[2] in TYPE_NAMES
    if not is_idx:
        return ""
    return f" ({TYPE_NAMES[head[2]]}, {_describe_rank(head[3])})"


def _describe_rank(dims: int) -> str:
    return "1 dimension" if dims == 1 else f"{dims} dimensions"


def _damaged(content: Content, offset: int, expected: str, actual: str) -> ValueError:
    return damaged_file_error(content.path, expected, actual, at=f"{content.unit} {offset}")
