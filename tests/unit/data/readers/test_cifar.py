"""The CIFAR reader: values, layouts, order of files. Damage: faults/test_damaged_files.py."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from halfstep.data.readers.cifar import read_cifar

PIXELS = 3072


def records(labels: list[tuple[int, ...]], seed: int = 0) -> bytes:
    """Records by hand: the label bytes, then 3072 random bytes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (len(labels), PIXELS), dtype=np.uint8)
    return b"".join(bytes(label) + row.tobytes() for label, row in zip(labels, pixels, strict=True))


def write(path: Path, labels: list[tuple[int, ...]], seed: int = 0) -> bytes:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(records(labels, seed))
    return path.read_bytes()


def test_pixels_are_where_the_format_puts_them(tmp_path: Path) -> None:
    data = write(tmp_path / "test_batch.bin", [(7,), (0,), (9,)])
    images, labels = read_cifar(tmp_path, train=False)
    assert (images.shape, images.dtype, images.is_contiguous()) == (
        (3, 32, 32, 3),
        torch.uint8,
        True,
    )
    assert torch.equal(labels, torch.tensor([7, 0, 9]))
    for n, y, x, channel in [
        (0, 0, 0, 0),
        (0, 0, 1, 0),
        (1, 1, 0, 2),
        (2, 31, 31, 2),
        (2, 17, 5, 1),
    ]:
        assert images[n, y, x, channel] == data[3073 * n + 1 + 1024 * channel + 32 * y + x]


def test_hundred_classes_have_two_labels(tmp_path: Path) -> None:
    data = write(tmp_path / "train.bin", [(19, 99), (0, 5)])
    images, fine = read_cifar(tmp_path, classes=100)
    again, coarse = read_cifar(tmp_path, classes=100, labels="coarse")
    assert (fine.tolist(), coarse.tolist()) == ([99, 5], [19, 0])
    assert torch.equal(images, again)
    assert images[1, 3, 4, 1] == data[3074 + 2 + 1024 + 32 * 3 + 4]


def test_more_records_than_one_piece(tmp_path: Path) -> None:
    labels = [(i % 10,) for i in range(2345)]
    data = np.frombuffer(write(tmp_path / "data_batch_1.bin", labels), np.uint8).reshape(-1, 3073)
    images, labels_read = read_cifar(tmp_path)
    assert labels_read.tolist() == [i % 10 for i in range(2345)]
    assert torch.equal(images.permute(0, 3, 1, 2).flatten(1), torch.from_numpy(data[:, 1:].copy()))


def test_result_is_writable_and_its_own(tmp_path: Path) -> None:
    data = write(tmp_path / "test_batch.bin", [(1,)])
    images, labels = read_cifar(tmp_path, train=False)
    images.zero_(), labels.zero_()
    images, labels = read_cifar(tmp_path, train=False)
    assert int(images.sum()) == sum(data[1:])
    assert labels.tolist() == [1]


def test_batches_come_in_the_order_of_their_names(tmp_path: Path) -> None:
    for number in (3, 1, 2):
        write(tmp_path / f"data_batch_{number}.bin", [(number,), (number + 3,)], seed=number)
    write(tmp_path / "test_batch.bin", [(9,)])
    (tmp_path / "batches.meta.txt").write_text("airplane")
    assert read_cifar(tmp_path)[1].tolist() == [1, 4, 2, 5, 3, 6]
    assert read_cifar(tmp_path, train=False)[1].tolist() == [9]


@pytest.mark.parametrize(
    ("classes", "train", "name"),
    [
        (10, True, "data_batch_1.bin"),
        (10, True, "train/data_batch_1.bin"),
        (10, True, "cifar-10-batches-bin/data_batch_1.bin"),
        (10, False, "test/test_batch.bin"),
        (10, False, "cifar-10-batches-bin/test_batch.bin"),
        (100, True, "cifar-100-binary/train.bin"),
        (100, False, "test.bin"),
    ],
)
def test_layouts(tmp_path: Path, classes, train: bool, name: str) -> None:
    write(tmp_path / name, [(4,) if classes == 10 else (4, 44)])
    _, labels = read_cifar(tmp_path, train=train, classes=classes)
    assert labels.tolist() == [4 if classes == 10 else 44]


def test_two_copies_are_ambiguous(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "train"):
        write(folder / "data_batch_1.bin", [(1,)])
    with pytest.raises(
        ValueError,
        match=r"expected data_batch\*\.bin in one place, found it in .*/train\. Name one",
    ):
        read_cifar(tmp_path)


@pytest.mark.parametrize(
    ("there", "missing"), [((1, 2, 4, 5), 3), ((2, 3), 1), ((0, 2), 1), ((1, 2, 10), 3)]
)
def test_a_gap_in_the_batches_is_named(
    tmp_path: Path, there: tuple[int, ...], missing: int
) -> None:
    for number in there:
        write(tmp_path / f"data_batch_{number}.bin", [(1,)])
    match = (
        rf"data_batch_{missing}\.bin: expected this file, "
        rf"found only data_batch_{there[0]}\.bin, .*Fetch cifar-10-b"
    )
    with pytest.raises(FileNotFoundError, match=match):
        read_cifar(tmp_path)


@pytest.mark.parametrize(
    "other", ["data_batch_1 (copy).bin", "data_batch_01.bin", "data_batch.bin"]
)
def test_a_second_copy_of_a_batch_is_refused(tmp_path: Path, other: str) -> None:
    for name in ("data_batch_1.bin", "data_batch_2.bin", other):
        write(tmp_path / name, [(1,)])
    with pytest.raises(
        ValueError, match=r"expected each batch once, under its number, found it beside data_batch_"
    ):
        read_cifar(tmp_path)


def test_missing_files_are_named_with_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x02")
    match = (
        r"expected data_batch\*\.bin of CIFAR-10, found data_batch_1\. "
        r"Fetch cifar-10-binary\.tar\.gz, unpack it"
    )
    with pytest.raises(FileNotFoundError, match=match):
        read_cifar(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"nowhere: expected train\.bin of CIFAR-100, found nothing\. Fetch"
    ):
        read_cifar(tmp_path / "nowhere", classes=100)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"classes": 20}, r"classes: expected one of \[10, 100\], received 20"),
        (
            {"labels": "coarse"},
            r"labels: expected one of \['fine'\] for CIFAR-10, received 'coarse'",
        ),
        (
            {"classes": 100, "labels": "both"},
            r"one of \['coarse', 'fine'\] for CIFAR-100, received 'both'",
        ),
    ],
)
def test_impossible_options_are_refused(tmp_path: Path, options, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        read_cifar(tmp_path, **options)


@pytest.mark.parametrize(("train", "count"), [(True, 50_000), (False, 10_000)])
def test_real_files(train: bool, count: int) -> None:
    root = os.environ.get("HALFSTEP_DATA")
    folder = Path(root or "") / "cifar10"
    name = "data_batch_3.bin" if train else "test_batch.bin"
    if not root or not (folder / name).exists():
        pytest.skip(f"no {folder / name}" if root else "HALFSTEP_DATA is unset")
    images, labels = read_cifar(folder, train=train)
    assert images.shape == (count, 32, 32, 3)
    assert torch.equal(labels.bincount(), torch.full((10,), count // 10))
    start = 20_000 if train else 0  # the third file's first record
    with (folder / name).open("rb") as file:
        for i in (0, 1, 4321, 9999):
            file.seek(3073 * i)
            label, *pixels = struct.unpack("3073B", file.read(3073))
            assert labels[start + i] == label
            assert images[start + i].permute(2, 0, 1).flatten().tolist() == pixels
