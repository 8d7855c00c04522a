"""Strict reader of CIFAR-10 and CIFAR-100 in their binary version; the Python version, a pickle, is never loaded."""

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

from halfstep.data.readers.binary import damaged, kind, opened, shown

Bytes = npt.NDArray[np.uint8]
_PIXELS = 3 * 32 * 32
_PIECE = 1000  # records turned to HWC at a time: 3 MB, so that a file is never in memory twice


@dataclass(frozen=True)
class _Set:
    """One data set's layout: the label bytes before each image, and where its files are found."""

    name: str
    limits: dict[str, int]  # label byte -> how many values it has, in the order of the bytes
    folder: str  # inside the archive
    train: str
    test: str

    @property
    def record(self) -> int:
        return len(self.limits) + _PIXELS

    @property
    def advice(self) -> str:
        return (
            f"Fetch {self.name.lower()}-binary.tar.gz, unpack it and name its folder {self.folder}."
        )


_SETS = {
    10: _Set(
        "CIFAR-10", {"fine": 10}, "cifar-10-batches-bin", "data_batch*.bin", "test_batch*.bin"
    ),
    100: _Set(
        "CIFAR-100", {"coarse": 20, "fine": 100}, "cifar-100-binary", "train.bin", "test.bin"
    ),
}


def read_cifar(
    folder: str | Path,
    *,
    train: bool = True,
    classes: Literal[10, 100] = 10,
    labels: Literal["fine", "coarse"] = "fine",
) -> tuple[Tensor, Tensor]:
    """One split: uint8 images [N, 32, 32, 3], contiguous, and int64 labels [N]; files in the order of their names.

    The files lie in `folder`, in its sub-folder train or test, or in the archive's own folder inside it.
    """
    if classes not in _SETS:
        raise ValueError(f"expected classes to be one of {list(_SETS)}, got {classes!r}")
    layout = _SETS[classes]
    if labels not in layout.limits:
        raise ValueError(
            f"expected labels to be one of {list(layout.limits)} for {layout.name}, got {labels!r}"
        )
    paths = _find(Path(folder), layout, train)
    counts = [_count_records(path, layout) for path in paths]
    images, found = np.empty((sum(counts), 32, 32, 3), np.uint8), np.empty(sum(counts), np.int64)
    column, start = list(layout.limits).index(labels), 0
    for path, count in zip(paths, counts, strict=True):
        _read_file(
            path, layout, column, images[start : start + count], found[start : start + count]
        )
        start += count
    return torch.from_numpy(images), torch.from_numpy(found)


def _read_file(
    path: Path, layout: _Set, column: int, images: Bytes, labels: npt.NDArray[np.int64]
) -> None:
    with opened(path) as file:
        for start in range(0, len(labels), _PIECE):
            part = slice(start, min(start + _PIECE, len(labels)))
            records = _read_records(path, file, layout, start, part.stop - start)
            marks, pixels = np.split(records, [len(layout.limits)], axis=1)
            _check_labels(path, layout, start, marks)
            labels[part] = marks[:, column]
            images[part] = pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)


def _read_records(path: Path, file: BufferedReader, layout: _Set, start: int, count: int) -> Bytes:
    data = file.read(count * layout.record)
    if len(data) != count * layout.record:  # it had that size a moment ago
        at = f"byte {start * layout.record + len(data)}"
        raise damaged(
            path, "more records", "the end of a file that shrank while it was read", at=at
        )
    return np.frombuffer(data, np.uint8).reshape(count, layout.record)


def _check_labels(path: Path, layout: _Set, start: int, marks: Bytes) -> None:
    wrong = np.argwhere(marks >= np.array(list(layout.limits.values())))
    if len(wrong):
        row, column = map(int, wrong[0])
        name, limit = list(layout.limits.items())[column]
        expected = f"a {name} label in 0..{limit - 1} in record {start + row}"
        at = f"byte {(start + row) * layout.record + column}"
        raise damaged(path, expected, str(marks[row, column]), at=at, advice=layout.advice)


def _count_records(path: Path, layout: _Set) -> int:
    with opened(path) as file:
        head, size = file.read(512), os.fstat(file.fileno()).st_size
    if (
        head and head[0] >= next(iter(layout.limits.values())) and kind(head)
    ):  # no signature starts like a label
        expected = f"records of {layout.name}'s binary version"
        raise damaged(
            path, expected, shown(head), at="byte 0", advice=_way_out(str(kind(head)), layout)
        )
    records, rest = divmod(size, layout.record)
    if rest or not records:
        expected = f"whole records of {layout.record} bytes"
        came = (
            f"the end of the file {rest} bytes into record {records}" if size else "an empty file"
        )
        raise damaged(
            path, expected, came, at=f"byte {records * layout.record}", advice=layout.advice
        )
    return records


def _way_out(found: str, layout: _Set) -> str:
    if found == "a pickle":
        return f"This is the Python version of {layout.name}, a pickle, which is never loaded. {layout.advice}"
    if found in ("gzip", "tar"):
        return f"Unpack it (tar -xf) and name the folder {layout.folder} that comes out."
    return layout.advice


def _find(folder: Path, layout: _Set, train: bool) -> list[Path]:
    pattern = layout.train if train else layout.test
    places = (folder, folder / ("train" if train else "test"), folder / layout.folder)
    found = [files for place in places if (files := sorted(place.glob(pattern)))]
    if not found:
        inside = ", ".join(sorted(path.name for path in folder.glob("*"))[:8]) or "nothing"
        raise FileNotFoundError(
            f"{folder}: expected {pattern} of {layout.name}, found {inside}. {layout.advice}"
        )
    if len(found) > 1:
        where = " and ".join(str(files[0].parent) for files in found)
        raise ValueError(
            f"{folder}: expected {pattern} in one place, found it in {where}. Name one of these folders."
        )
    _check_numbers(found[0], layout)
    return found[0]


def _check_numbers(paths: list[Path], layout: _Set) -> None:
    """Batches with numbers have all of them, from 1 on: a batch that is missing, or there twice, would go unnoticed."""
    matches = {path: re.fullmatch(r"(.*_)(\d+)\.bin", path.name) for path in paths}
    numbered = [match for match in matches.values() if match]
    numbers = sorted(int(match[2]) for match in numbered)
    if not numbers:
        return
    for path, match in matches.items():
        if match is None or numbers.count(int(match[2])) > 1:
            expected, advice = "each batch once, under its number", "Move the file elsewhere."
            raise ValueError(
                f"{path}: expected {expected}, found it beside {numbered[0].string}. {advice}"
            )
    missing = sorted(set(range(min(1, numbers[0]), numbers[-1])) - set(numbers))
    if missing:
        name = f"{numbered[0][1]}{missing[0]}.bin"
        came = ", ".join(path.name for path in paths)
        raise FileNotFoundError(
            f"{paths[0].parent / name}: expected this file, found only {came}. {layout.advice}"
        )
