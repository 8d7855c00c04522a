"""The idx reader: what it returns, what it refuses, and the real files where they are."""

import gzip
import os
import struct
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import halfstep.data
from halfstep.data.readers.idx import read_idx, read_split

VALUES = bytes(range(24))
GOOD_FILE = struct.pack(">4B3I", 0, 0, 8, 3, 2, 3, 4) + VALUES
DEBIAN = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "images"


def assert_refused(path: Path, content: bytes, match: str) -> None:
    """The content is refused, and the message names the file, the match and what to do."""
    path.write_bytes(content)
    with pytest.raises(ValueError, match=match) as caught:
        read_idx(path, dims=3)
    assert str(caught.value).startswith(f"{path}: expected ")
    assert str(caught.value).endswith("Fetch the file again or name another one.")


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_reads_values_in_order(path: Path, pack) -> None:
    path.write_bytes(pack(GOOD_FILE))
    result = read_idx(path, dims=3)
    assert result.dtype == torch.uint8
    assert torch.equal(result, torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4))


@pytest.mark.parametrize("dims", [1, 2, 4])
def test_reads_any_rank(path: Path, dims: int) -> None:
    sizes = (24, 1, 1, 1)[:dims]
    path.write_bytes(struct.pack(f">4B{dims}I", 0, 0, 8, dims, *sizes) + VALUES)
    assert torch.equal(
        read_idx(path, dims=dims), torch.arange(24, dtype=torch.uint8).reshape(sizes)
    )


def test_reads_past_every_internal_buffer(path: Path) -> None:
    values = torch.randint(256, (3_000_001,), dtype=torch.uint8)  # larger than a piece, and odd
    content = struct.pack(">4BI", 0, 0, 8, 1, len(values)) + values.numpy().tobytes()
    for packed in (content, gzip.compress(content, 1), gzip.compress(content, 0)):
        path.write_bytes(packed)
        assert torch.equal(read_idx(path, dims=1), values)


@given(cut=st.lists(st.integers(0, len(GOOD_FILE)), max_size=4))
def test_gzip_members_are_one_stream(
    tmp_path_factory: pytest.TempPathFactory, cut: list[int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "members"
    ends = [0, *sorted(cut), len(GOOD_FILE)]
    path.write_bytes(b"".join(gzip.compress(GOOD_FILE[a:b]) for a, b in pairwise(ends)))
    assert bytes(read_idx(path, dims=3).flatten().tolist()) == VALUES


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_result_is_writable_and_its_own(path: Path, pack) -> None:
    path.write_bytes(pack(GOOD_FILE))
    read_idx(path, dims=3).zero_()
    assert read_idx(path, dims=3).sum() == sum(VALUES)


def test_no_samples_is_an_empty_tensor(path: Path) -> None:
    path.write_bytes(struct.pack(">4B3I", 0, 0, 8, 3, 0, 28, 28))
    assert read_idx(path, dims=3).shape == (0, 28, 28)


@pytest.mark.parametrize("dims", [0, -1, 65, 256])
def test_impossible_rank_is_refused(path: Path, dims: int) -> None:
    with pytest.raises(ValueError, match=f"expected 1 to 64 dims, got {dims}"):
        read_idx(path, dims=dims)


@given(cut=st.integers(0, len(GOOD_FILE) - 1))
def test_every_cut_is_refused(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    assert_refused(tmp_path_factory.getbasetemp() / "cut", GOOD_FILE[:cut], "expected")


@given(at=st.integers(0, 15), bit=st.integers(0, 7))
def test_every_flipped_header_bit_is_refused(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    content = bytearray(GOOD_FILE)
    content[at] ^= 1 << bit
    assert_refused(tmp_path_factory.getbasetemp() / "flip", bytes(content), "expected")


def write_split(folder: Path, images: int, labels: bytes) -> None:
    header = struct.pack(">4B3I", 0, 0, 8, 3, images, 1, 1)
    (folder / "t10k-images-idx3-ubyte").write_bytes(header + bytes(images))
    packed = gzip.compress(struct.pack(">4B1I", 0, 0, 8, 1, len(labels)) + labels)
    (folder / "t10k-labels-idx1-ubyte.gz").write_bytes(packed)


def test_split_mixes_plain_and_gzip_files(tmp_path: Path) -> None:
    write_split(tmp_path, images=3, labels=bytes([3, 0, 9]))
    images, labels = read_split(tmp_path, train=False)
    assert images.shape == (3, 1, 1)
    assert torch.equal(labels, torch.tensor([3, 0, 9]))


@pytest.mark.parametrize(
    ("classes", "count", "first"), [(10, 2, 1), (11, 1, 2), (255, 1, 2), (1, 3, 0)]
)
def test_labels_must_be_classes(tmp_path: Path, classes: int, count: int, first: int) -> None:
    write_split(tmp_path, images=3, labels=bytes([9, 10, 255]))
    match = (
        rf"ubyte\.gz: .*0\.\.{classes - 1} at byte {8 + first} of its .* "
        rf"number {first} \({count} labels are out"
    )
    with pytest.raises(ValueError, match=match):
        read_split(tmp_path, train=False, classes=classes)
    assert read_split(tmp_path, train=False, classes=256)[1].tolist() == [9, 10, 255]


@pytest.mark.parametrize("classes", [0, -1, 257])
def test_impossible_classes_are_refused(tmp_path: Path, classes: int) -> None:
    with pytest.raises(ValueError, match=f"expected 1 to 256 classes, got {classes}"):
        read_split(tmp_path, classes=classes)


def test_split_counts_must_agree(tmp_path: Path) -> None:
    write_split(tmp_path, images=3, labels=bytes(2))
    match = (
        r"t10k-labels.*expected 3 labels, one per image of t10k-images.*, "
        r"at byte 4, found 2\. Fetch both"
    )
    with pytest.raises(ValueError, match=match):
        read_split(tmp_path, train=False)


def test_split_without_samples_is_refused(tmp_path: Path) -> None:
    write_split(tmp_path, images=0, labels=b"")
    with pytest.raises(
        ValueError, match=r"t10k-images.*expected at least one image at byte 4, found a count of 0"
    ):
        read_split(tmp_path, train=False)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"expected train-images-idx3-ubyte or train-images-idx3-ubyte\.gz"
    ):
        read_split(tmp_path)


@pytest.mark.parametrize(("train", "per_class"), [(True, 1100), (False, 200)])
def test_sample_is_whole_and_balanced(train: bool, per_class: int) -> None:
    images, labels = halfstep.data.sample(train)
    assert (images.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert images.shape == (10 * per_class, 28, 28)
    assert torch.equal(labels.bincount(), torch.full((10,), per_class))
    assert 0.25 < images.float().div(255).mean() < 0.32  # the full set's mean is 0.286


def find_full_set(name: str, *others: Path) -> Path:
    """The folder of a full data set, or a skip that says where it was looked for."""
    root = os.environ.get("HALFSTEP_DATA")
    folders = list(others)
    if root:
        folders.insert(0, Path(root) / name)
    for folder in folders:
        if (folder / "train-images-idx3-ubyte.gz").exists():
            return folder
    reason = "HALFSTEP_DATA is unset"
    if folders:
        reason = f"looked in {', '.join(map(str, folders))}"
    pytest.skip(f"no {name}: {reason}")


# Label histograms and first labels, counted with gzip and collections.Counter, not the reader.
FULL_SETS = {
    ("mnist", True): (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        [5, 0, 4, 1, 9, 2, 1, 3],
    ),
    ("mnist", False): (
        [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
        [7, 2, 1, 0, 4, 1, 4, 9],
    ),
    ("fashion-mnist", True): ([6000] * 10, [9, 0, 0, 3, 0, 2, 7, 2]),
    ("fashion-mnist", False): ([1000] * 10, [9, 2, 1, 1, 6, 1, 4, 6]),
}


@pytest.mark.parametrize(("name", "train"), FULL_SETS)
def test_real_files(name: str, train: bool) -> None:
    folder = find_full_set(name, *[DEBIAN] * (name == "fashion-mnist"))
    split = "train" if train else "t10k"
    images, labels = read_split(folder, train=train)
    histogram, first = FULL_SETS[name, train]
    assert images.shape == (sum(histogram), 28, 28)
    assert labels.bincount().tolist() == histogram
    assert labels[:8].tolist() == first
    with gzip.open(folder / f"{split}-images-idx3-ubyte.gz") as file:
        for i in (0, 1, 777, len(images) - 1):
            file.seek(16 + 784 * i)
            assert images[i].flatten().tolist() == list(struct.unpack("784B", file.read(784)))


def test_sixty_thousand_images_within_a_second() -> None:
    folder = find_full_set("mnist", DEBIAN)
    times = []
    for _ in range(3):  # the best of three: the machine may be busy
        start = time.perf_counter()
        read_split(folder)
        times.append(time.perf_counter() - start)
    assert min(times) < 1
