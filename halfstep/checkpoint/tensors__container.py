"""tensors.safetensors: the storages one after the other, written and read in one pass that also hashes.

The safetensors package refuses nothing here, but hides which error the disk gave and needs a second pass for the
checksum. Its format is a length (8 bytes, little-endian), a JSON header padded with spaces to 8 bytes, and the data.
A reader knows every size beforehand, so the header must equal, byte for byte, the one that a writer would make.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from halfstep.checkpoint.disk__files import Reading
from halfstep.checkpoint.tensors import label
from halfstep.errors import DAMAGED_ADVICE, CheckpointError, checkpoint_error

_PIECE = 1 << 22  # bytes between two looks at the hash


def header(sizes: Sequence[int]) -> bytes:
    """What stands before the data of uint8 vectors of these sizes."""
    entries, start = {}, 0
    for i, size in enumerate(sizes):
        entries[label(i)] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def pieces(flats: Sequence[Tensor]) -> Iterator[bytes | memoryview]:
    """The whole file, in order; the data is the tensors' own memory."""
    yield header([flat.numel() for flat in flats])
    for flat in flats:
        view = flat.numpy().data
        yield from (view[at : at + _PIECE] for at in range(0, len(view), _PIECE))


def length(sizes: Sequence[int]) -> int:
    """Bytes of the whole file."""
    return len(header(sizes)) + sum(sizes)


def check_header(path: Path, file: Reading, sizes: Sequence[int]) -> None:
    """The file has the length and the header that these sizes give; before this, nothing is allocated by them."""
    if file.size != length(sizes):
        raise checkpoint_error(
            path, f"{length(sizes)} bytes, as tree.json has them", f"{file.size}", DAMAGED_ADVICE
        )
    expected = header(sizes)
    if file.take(len(expected)) != expected:
        raise checkpoint_error(
            path, "the safetensors header that tree.json asks for", "another one", DAMAGED_ADVICE
        )


def read(path: Path, file: Reading, sizes: Sequence[int]) -> list[Tensor]:
    """The storages, each in memory of its own."""
    check_header(path, file, sizes)
    return [_filled(path, file, size) for size in sizes]


def skim(path: Path, file: Reading, sizes: Sequence[int]) -> None:
    """Reads all of it for the hash, and keeps nothing."""
    check_header(path, file, sizes)
    buffer = memoryview(bytearray(min(_PIECE, sum(sizes))))
    left = sum(sizes)
    while left:
        file.fill(buffer[: min(left, _PIECE)])
        left -= min(left, _PIECE)


def _filled(path: Path, file: Reading, size: int) -> Tensor:
    flat = _allocated(path, size)
    view = flat.numpy().data
    for at in range(0, size, _PIECE):
        file.fill(view[at : at + _PIECE])
    return flat


def _allocated(path: Path, size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    except (RuntimeError, MemoryError) as error:
        advice = "Load it on a machine with more memory."
        raise CheckpointError(
            f"{path}: expected memory for {size} bytes, found less. {advice}"
        ) from error
