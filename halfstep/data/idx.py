"""Strict reader of idx files, the format of the MNIST family: two zero bytes, type, rank, big-endian sizes, data."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_UINT8 = 0x08
_FILES = {
    True: ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    False: ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def read_idx(path: str | Path, *, dims: int) -> Tensor:
    """The file's uint8 tensor of rank `dims`; anything but exactly that in the file is a ValueError."""
    path = Path(path)
    data = _read_bytes(path)
    shape = _read_shape(path, data, dims)
    start, count = 4 + 4 * dims, math.prod(shape)
    if len(data) - start != count:
        problem = "truncated" if len(data) - start < count else "followed by other bytes"
        raise _error(path, f"{count} data bytes for shape {shape}", f"{len(data) - start} ({problem})")
    values = np.frombuffer(bytearray(data), np.uint8, offset=start)  # bytearray: torch wants writable memory
    return torch.from_numpy(values.reshape(shape))


def read_split(folder: str | Path, *, train: bool = True) -> tuple[Tensor, Tensor]:
    """One split of an MNIST-family folder under its original file names, plain or .gz: uint8 images, int64 labels."""
    images_path, labels_path = (_find(Path(folder), name) for name in _FILES[train])
    images, labels = read_idx(images_path, dims=3), read_idx(labels_path, dims=1)
    if len(images) != len(labels):
        raise _error(labels_path, f"{len(images)} labels, one per image of {images_path.name}", f"{len(labels)}")
    return images, labels.long()


def _read_bytes(path: Path) -> bytes:
    """The content, unpacked when it starts as gzip does: an idx file starts with zeros, so the name need not tell."""
    data = path.read_bytes()
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        return gzip.decompress(data)
    except (EOFError, OSError, zlib.error) as error:
        raise _error(path, "a complete gzip stream", f"a damaged one ({error})") from error


def _read_shape(path: Path, data: bytes, dims: int) -> tuple[int, ...]:
    magic = bytes([0, 0, _UINT8, dims])
    if data[:4] != magic:
        raise _error(path, f"magic {magic.hex(' ')} (uint8, {dims} dimensions)", data[:4].hex(" ") or "an empty file")
    header = data[4 : 4 + 4 * dims]
    if len(header) != 4 * dims:
        raise _error(path, f"a header of {4 + 4 * dims} bytes", f"{len(data)} bytes in all")
    return struct.unpack(f">{dims}I", header)


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{folder}: expected {name} or {name}.gz, found neither. Name the folder that holds them.")


def _error(path: Path, expected: str, came: str) -> ValueError:
    return ValueError(f"{path}: expected {expected}, found {came}. Fetch the file again or name another one.")
