"""Strict reader of CIFAR-10 and CIFAR-100 in their binary version.

The Python version is a pickle, and is never loaded.
"""

import os
import re
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from halfstep.data.download.local_copy import local_path
from halfstep.data.readers.binary import (
    damaged_file_error,
    describe_head,
    guess_file_kind,
    open_binary,
)
from halfstep.utils.checks import expect

ByteArray = npt.NDArray[np.uint8]
IMAGE_BYTES = 3 * 32 * 32
RECORDS_AT_ONCE = 1000  # turned to HWC together: 3 MB, so that a file is never in memory twice


@dataclass(frozen=True)
class CifarFormat:
    """The layout of one data set: label bytes before each image, and the names of its files."""

    name: str
    label_counts: dict[str, int]  # number of values of each label byte, in the order of the bytes
    folder: str  # inside the archive
    train_pattern: str
    test_pattern: str

    @property
    def record_bytes(self) -> int:
        return len(self.label_counts) + IMAGE_BYTES

    @property
    def advice(self) -> str:
        archive = f"{self.name.lower()}-binary.tar.gz"
        return f"Fetch {archive}, unpack it and name its folder {self.folder}."


FORMATS = {
    10: CifarFormat(
        name="CIFAR-10",
        label_counts={"fine": 10},
        folder="cifar-10-batches-bin",
        train_pattern="data_batch*.bin",
        test_pattern="test_batch*.bin",
    ),
    100: CifarFormat(
        name="CIFAR-100",
        label_counts={"coarse": 20, "fine": 100},
        folder="cifar-100-binary",
        train_pattern="train.bin",
        test_pattern="test.bin",
    ),
}


def read_cifar(
    folder: str | Path,
    *,
    train: bool = True,
    classes: Literal[10, 100] = 10,
    labels: Literal["fine", "coarse"] = "fine",
) -> tuple[Tensor, Tensor]:
    """One split: uint8 images [N, 32, 32, 3], contiguous, and int64 labels [N].

    The files lie in `folder`, in its sub-folder train or test, or in the archive's own folder
    inside it. They are read in the order of their names.
    """
    expect(classes in FORMATS, "classes", f"one of {list(FORMATS)}", classes)
    cifar = FORMATS[classes]
    label_names = list(cifar.label_counts)
    expect(labels in label_names, "labels", f"one of {label_names} for {cifar.name}", labels)

    paths = _find_files(local_path(folder, "read_cifar"), cifar, train)
    counts = [_count_records(path, cifar) for path in paths]
    total = sum(counts)
    all_images = np.empty((total, 32, 32, 3), np.uint8)
    all_labels = np.empty(total, np.int64)
    label_column = label_names.index(labels)
    start = 0
    for path, count in zip(paths, counts, strict=True):
        end = start + count
        _read_file(path, cifar, label_column, all_images[start:end], all_labels[start:end])
        start = end
    return torch.from_numpy(all_images), torch.from_numpy(all_labels)


def _read_file(
    path: Path,
    cifar: CifarFormat,
    label_column: int,
    images: ByteArray,
    labels: npt.NDArray[np.int64],
) -> None:
    """Fills `images` and `labels` from one file."""
    with open_binary(path) as file:
        for start in range(0, len(labels), RECORDS_AT_ONCE):
            end = min(start + RECORDS_AT_ONCE, len(labels))
            records = _read_records(path, file, cifar, start, end - start)
            label_bytes, pixels = np.split(records, [len(cifar.label_counts)], axis=1)
            _check_labels(path, cifar, start, label_bytes)
            labels[start:end] = label_bytes[:, label_column]
            images[start:end] = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _read_records(
    path: Path, file: BufferedReader, cifar: CifarFormat, start: int, count: int
) -> ByteArray:
    size = count * cifar.record_bytes
    data = file.read(size)
    if len(data) != size:  # the file was this long a moment ago
        raise damaged_file_error(
            path,
            "more records",
            "the end of a file that shrank while it was read",
            at=f"byte {start * cifar.record_bytes + len(data)}",
        )
    return np.frombuffer(data, np.uint8).reshape(count, cifar.record_bytes)


def _check_labels(path: Path, cifar: CifarFormat, start: int, label_bytes: ByteArray) -> None:
    """Raises a ValueError for the first label that is no class; `start` is the first record."""
    limits = np.array(list(cifar.label_counts.values()))
    out_of_range = np.argwhere(label_bytes >= limits)
    if len(out_of_range) == 0:
        return
    row, column = map(int, out_of_range[0])
    record = start + row
    label_name, label_count = list(cifar.label_counts.items())[column]
    raise damaged_file_error(
        path,
        f"a {label_name} label in 0..{label_count - 1} in record {record}",
        str(label_bytes[row, column]),
        at=f"byte {record * cifar.record_bytes + column}",
        advice=cifar.advice,
    )


def _count_records(path: Path, cifar: CifarFormat) -> int:
    with open_binary(path) as file:
        head = file.read(512)
        size = os.fstat(file.fileno()).st_size

    # A file of another kind. No signature begins with a byte that is a label.
    first_label_count = next(iter(cifar.label_counts.values()))
    if head and head[0] >= first_label_count:
        kind = guess_file_kind(head)
        if kind is not None:
            raise damaged_file_error(
                path,
                f"records of {cifar.name}'s binary version",
                describe_head(head),
                at="byte 0",
                advice=_advice_for_kind(kind, cifar),
            )

    count, extra_bytes = divmod(size, cifar.record_bytes)
    if extra_bytes or count == 0:
        actual = "an empty file"
        if size > 0:
            actual = f"the end of the file {extra_bytes} bytes into record {count}"
        raise damaged_file_error(
            path,
            f"whole records of {cifar.record_bytes} bytes",
            actual,
            at=f"byte {count * cifar.record_bytes}",
            advice=cifar.advice,
        )
    return count


def _advice_for_kind(kind: str, cifar: CifarFormat) -> str:
    if kind == "a pickle":
        return (
            f"This is the Python version of {cifar.name}, a pickle, which is never loaded. "
            f"{cifar.advice}"
        )
    if kind in ("gzip", "tar"):
        return f"Unpack it (tar -xf) and name the folder {cifar.folder} that comes out."
    return cifar.advice


def _find_files(folder: Path, cifar: CifarFormat, train: bool) -> list[Path]:
    """The files of a split, by name; they must all be in one of the three usual folders."""
    pattern = cifar.train_pattern if train else cifar.test_pattern
    split_folder = folder / ("train" if train else "test")
    matches = []
    for candidate in (folder, split_folder, folder / cifar.folder):
        paths = sorted(candidate.glob(pattern))
        if paths:
            matches.append(paths)

    if not matches:
        names = sorted(path.name for path in folder.glob("*"))
        actual = ", ".join(names[:8]) or "nothing"
        raise FileNotFoundError(
            f"{folder}: expected {pattern} of {cifar.name}, found {actual}. {cifar.advice}"
        )
    if len(matches) > 1:
        folders = " and ".join(str(paths[0].parent) for paths in matches)
        raise ValueError(
            f"{folder}: expected {pattern} in one place, found it in {folders}. "
            "Name one of these folders."
        )
    _check_batch_numbers(matches[0], cifar)
    return matches[0]


def _check_batch_numbers(paths: list[Path], cifar: CifarFormat) -> None:
    """Numbered batches must all be there, from 1 on, each once: else a gap would go unnoticed."""
    matches = {path: re.fullmatch(r"(.*_)(\d+)\.bin", path.name) for path in paths}
    numbered = [match for match in matches.values() if match is not None]
    numbers = sorted(int(match[2]) for match in numbered)
    if not numbers:
        return
    for path, match in matches.items():
        if match is None or numbers.count(int(match[2])) > 1:
            raise ValueError(
                f"{path}: expected each batch once, under its number, "
                f"found it beside {numbered[0].string}. Move the file elsewhere."
            )
    missing = sorted(set(range(min(1, numbers[0]), numbers[-1])) - set(numbers))
    if missing:
        missing_name = f"{numbered[0][1]}{missing[0]}.bin"
        names = ", ".join(path.name for path in paths)
        raise FileNotFoundError(
            f"{paths[0].parent / missing_name}: expected this file, found only {names}. "
            f"{cifar.advice}"
        )
