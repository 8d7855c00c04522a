"""The idx reader: what it returns, and that each kind of damage is refused by name."""

import gzip
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import halfstep.data
from halfstep.data.idx import read_idx, read_split

VALUES = bytes(range(24))
GOOD = struct.pack(">4B3I", 0, 0, 8, 3, 2, 3, 4) + VALUES


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "images"


def refused(path: Path, content: bytes, match: str) -> None:
    """The content is refused, and the message names the file, the match and what to do."""
    path.write_bytes(content)
    with pytest.raises(ValueError, match=match) as caught:
        read_idx(path, dims=3)
    assert str(caught.value).startswith(f"{path}: expected ")
    assert str(caught.value).endswith("Fetch the file again or name another one.")


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_reads_values_in_order(path: Path, pack) -> None:
    path.write_bytes(pack(GOOD))
    got = read_idx(path, dims=3)
    assert got.dtype == torch.uint8
    assert torch.equal(got, torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4))


def test_result_is_writable_and_its_own(path: Path) -> None:
    path.write_bytes(GOOD)
    read_idx(path, dims=3).zero_()
    assert read_idx(path, dims=3).sum() == sum(VALUES)


def test_no_samples_is_an_empty_tensor(path: Path) -> None:
    path.write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, 0, 28, 28))
    assert read_idx(path, dims=3).shape == (0, 28, 28)


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", r"magic 00 00 08 03 \(uint8, 3 dimensions\), found an empty file"),
        (b"\x00\x00\x08", "magic 00 00 08 03 .*, found 00 00 08"),
        (b"<!DOCTYPE html>", "found 3c 21 44 4f"),
        (b"\x00\x00\x0d\x03" + GOOD[4:], "found 00 00 0d 03"),  # float32 data
        (b"\x00\x00\x08\x01" + GOOD[4:], "found 00 00 08 01"),  # labels where images belong
        (b"\x01\x00\x08\x03" + GOOD[4:], "found 01 00 08 03"),
        (GOOD[:10], "a header of 16 bytes, found 10 bytes in all"),
        (GOOD[:-1], r"24 data bytes for shape \(2, 3, 4\), found 23 \(truncated\)"),
        (GOOD[:16], r"found 0 \(truncated\)"),
        (GOOD + b"\x00", r"24 data bytes .* found 25 \(followed by other bytes\)"),
        (struct.pack(">4B3I", 0, 0, 8, 3, *[2**32 - 1] * 3), r"found 0 \(truncated\)"),  # sizes no memory could hold
    ],
)
def test_damage_is_refused(path: Path, content: bytes, match: str) -> None:
    refused(path, content, match)
    if content:
        refused(path, gzip.compress(content), match)


def test_damaged_gzip_is_refused(path: Path) -> None:
    packed = gzip.compress(GOOD)
    refused(path, packed[:-9], "a complete gzip stream, found a damaged one")
    refused(path, packed[:1] + b"\x8b\x07" + packed[3:], "a damaged one")  # unknown compression method
    refused(path, packed[:-8] + bytes(4) + packed[-4:], "a damaged one .*CRC")
    refused(path, packed + b"tail", "a damaged one")
    refused(path, packed + gzip.compress(b"x"), "found 25")


@given(cut=st.integers(0, len(GOOD) - 1))
def test_every_cut_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    refused(tmp_path_factory.getbasetemp() / "cut", GOOD[:cut], "expected")


@given(at=st.integers(0, 15), bit=st.integers(0, 7))
def test_every_flipped_header_bit_is_refused(tmp_path_factory: pytest.TempPathFactory, at: int, bit: int) -> None:
    content = bytearray(GOOD)
    content[at] ^= 1 << bit
    refused(tmp_path_factory.getbasetemp() / "flip", bytes(content), "expected")


def write_split(folder: Path, images: int, labels: int) -> None:
    header = struct.pack(">4B3I", 0, 0, 8, 3, images, 1, 1)
    (folder / "t10k-images-idx3-ubyte").write_bytes(header + bytes(images))
    packed = gzip.compress(struct.pack(">4B1I", 0, 0, 8, 1, labels) + bytes([255] * labels))
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(packed)


def test_split_mixes_plain_and_gzip_files(tmp_path: Path) -> None:
    write_split(tmp_path, images=3, labels=3)
    images, labels = read_split(tmp_path, train=False)
    assert images.shape == (3, 1, 1)
    assert torch.equal(labels, torch.tensor([255, 255, 255]))


def test_split_counts_must_agree(tmp_path: Path) -> None:
    write_split(tmp_path, images=3, labels=2)
    with pytest.raises(ValueError, match=r"t10k-labels.*expected 3 labels, one per image of t10k-images.*, found 2"):
        read_split(tmp_path, train=False)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected train-images-idx3-ubyte or train-images-idx3-ubyte\.gz"):
        read_split(tmp_path)


@pytest.mark.parametrize(("train", "per_class"), [(True, 1100), (False, 200)])
def test_sample_is_whole_and_balanced(train: bool, per_class: int) -> None:
    images, labels = halfstep.data.sample(train)
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert images.shape == (10 * per_class, 28, 28)
    assert torch.equal(labels.bincount(), torch.full((10,), per_class))
    assert 0.25 < images.float().div(255).mean() < 0.32  # the full set's mean is 0.286
