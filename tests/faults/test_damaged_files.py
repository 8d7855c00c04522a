"""Damaged files of every reader.

Each is refused by name, at its byte, in its own words, and in little memory.
"""

import gzip
import io
import json
import pickle
import struct
import subprocess
import sys
import tarfile
import tracemalloc
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from halfstep.data.readers.cifar import read_cifar
from halfstep.data.readers.idx import read_idx, read_split
from halfstep.data.readers.image_folder import ImageFolder

MIB = 1 << 20
MAX_UINT32 = 2**32 - 1
FETCH_AGAIN = "Fetch the file again or name another one."


def idx_header(*sizes: int, kind: int = 8) -> bytes:
    return struct.pack(f">4B{len(sizes)}I", 0, 0, kind, len(sizes), *sizes)


def gzipped(content: bytes) -> bytes:
    return gzip.compress(content, mtime=0)


def flip_bit(content: bytes, at: int, bit: int = 0) -> bytes:
    return content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :]


def make_tar(name: str, content: bytes, mode: str = "w") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as archive:  # type: ignore[call-overload]
        info = tarfile.TarInfo(name)
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


IDX_FILE = idx_header(2, 3, 4) + bytes(range(24))
GZ_FILE = gzipped(IDX_FILE)
CIFAR10_FILE = b"".join(bytes([label]) + bytes(range(256)) * 12 for label in (3, 0, 9))
CIFAR100_FILE = b"".join(bytes(labels) + bytes(range(256)) * 12 for labels in ((19, 99), (0, 0)))
PICKLED_BATCH = pickle.dumps({b"labels": [1, 2], b"data": bytes(6144)}, protocol=2)


@dataclass(frozen=True)
class Case:
    """A file's content, and what its refusal says: where, and the words between."""

    name: str
    content: bytes
    at: str
    words: tuple[str, ...]
    advice: str = FETCH_AGAIN


def truncated_after(cut: int) -> tuple[str, str]:
    return (
        "24 data bytes for shape (2, 3, 4)",
        f"the end of the file after {cut - 16} (truncated)",
    )


MAGIC = "magic 00 00 08 03 (uint8, 3 dimensions)"
AFTER_THE_DATA = "the end of the file, after 24 data bytes for shape (2, 3, 4),"
PLAIN_CASES = [
    Case("empty", b"", "byte 0", (MAGIC, "found the end of the file")),
    *(
        Case(f"cut {n}", IDX_FILE[:n], "byte 0", (MAGIC, f"found {IDX_FILE[:n].hex(' ')}."))
        for n in (1, 2, 3)
    ),
    *(
        Case(f"cut {n}", IDX_FILE[:n], f"byte {n}", ("a header of 16 bytes", "the end"))
        for n in (4, 5, 8, 11, 12, 15)
    ),
    *(Case(f"cut {n}", IDX_FILE[:n], f"byte {n}", truncated_after(n)) for n in (16, 17, 27, 39)),
    Case("first zero", flip_bit(IDX_FILE, 0), "byte 0", (MAGIC, "found 01 00 08 03.")),
    Case("second zero", flip_bit(IDX_FILE, 1), "byte 0", (MAGIC, "found 00 01 08 03.")),
    Case(
        "type", flip_bit(IDX_FILE, 2), "byte 0", (MAGIC, "found 00 00 09 03 (int8, 3 dimensions).")
    ),
    Case(
        "rank of labels",
        flip_bit(IDX_FILE, 3, 1),
        "byte 0",
        (MAGIC, "found 00 00 08 01 (uint8, 1 dimension)"),
    ),
    Case(
        "float32",
        idx_header(2, 3, 4, kind=13) + bytes(96),
        "byte 0",
        (MAGIC, "00 00 0d 03 (float32, 3 dimensions)"),
    ),
    Case(
        "little-endian magic",
        b"\x03\x08\0\0" + IDX_FILE[4:],
        "byte 0",
        (MAGIC, "found 03 08 00 00"),
    ),
    Case("web page", b"<!DOCTYPE html><html>", "byte 0", (MAGIC, "found 3c 21 44 4f (a web page)")),
    Case("pickle", PICKLED_BATCH, "byte 0", (MAGIC, "found 80 02", "(a pickle)")),
    Case("zip", b"PK\x03\x04" + bytes(60), "byte 0", (MAGIC, "found 50 4b 03 04 (zip)")),
    Case("xz", b"\xfd7zXZ\0" + bytes(60), "byte 0", (MAGIC, "found fd 37 7a 58 (xz)")),
    Case("bzip2", b"BZh9" + bytes(60), "byte 0", (MAGIC, "found 42 5a 68 39 (bzip2)")),
    Case("tar", make_tar("images", IDX_FILE), "byte 0", (MAGIC, "found 69 6d 61 67 (tar)")),
    Case(
        "pointer",
        b"version https://git-lfs.github.com/spec/v1\n",
        "byte 0",
        (MAGIC, "(a Git LFS pointer"),
    ),
    Case(
        "one image more",
        idx_header(3, 3, 4) + IDX_FILE[16:],
        "byte 40",
        ("36 data bytes for shape (3, 3, 4)", "after 24 ("),
    ),
    Case(
        "one image less",
        idx_header(1, 3, 4) + IDX_FILE[16:],
        "byte 28",
        ("12 data bytes for shape (1, 3, 4),", "other"),
    ),
    Case(
        "none, with data",
        idx_header(0, 3, 4) + IDX_FILE[16:],
        "byte 16",
        ("0 data bytes for shape (0, 3, 4),", "other"),
    ),
    Case("trailing byte", IDX_FILE + b"\0", "byte 40", (AFTER_THE_DATA, "found other bytes")),
    Case(
        "trailing megabytes",
        IDX_FILE + bytes(8 * MIB),
        "byte 40",
        (AFTER_THE_DATA, "found other bytes"),
    ),
    Case("no rows", idx_header(2, 0, 4), "byte 8", ("a size of 1 or more", "found 0.")),
    Case("no columns", idx_header(2, 3, 0), "byte 12", ("a size of 1 or more", "found 0.")),
    Case("nothing at all", idx_header(0, 0, 0), "byte 8", ("a size of 1 or more", "found 0.")),
    Case(
        "endless, of nothing",
        idx_header(MAX_UINT32, MAX_UINT32, 0),
        "byte 12",
        ("a size of 1 or more", "found 0."),
    ),
    Case(
        "huge sizes",
        idx_header(MAX_UINT32, MAX_UINT32, MAX_UINT32) + bytes(24),
        "byte 8",
        ("within 2^40 bytes", f"{MAX_UINT32} × {MAX_UINT32}."),
    ),
    Case(
        "huge and none",
        idx_header(0, MAX_UINT32, MAX_UINT32),
        "byte 8",
        ("within 2^40 bytes", f"found {MAX_UINT32} × {MAX_UINT32}."),
    ),
]
# The same content in a gzip file is noticed at the same byte, counted unpacked. Sizes beyond the
# file need no unpacking.
GZIPPED_CASES = [
    Case(f"gz {case.name}", gzipped(case.content), f"unpacked {case.at}", case.words)
    for case in PLAIN_CASES
    if case.name != "empty"
]
COUNT_CASES = [
    Case(
        "huge count",
        idx_header(MAX_UINT32, 3, 4) + bytes(24),
        "byte 40",
        (f"{12 * MAX_UINT32} data", "end of the file after 24"),
    ),
    Case(
        "gz huge count",
        gzipped(idx_header(MAX_UINT32, 3, 4)),
        "unpacked byte 16",
        (f"{12 * MAX_UINT32} data", "too small"),
    ),
    Case(
        "high bit of the count",
        flip_bit(IDX_FILE, 4, 7),
        "byte 40",
        ("25769803800 data bytes", "after 24 (truncated)"),
    ),
]
SOUND_STREAM = "a sound gzip stream"
OTHER_MEMBER = "another gzip member or the end of the file"
CUT_OFF = ("more of a gzip stream", "found the end of the file")
GZIP_BOMB = gzipped(IDX_FILE + bytes(64 * MIB))
DECLARING_BOMB = gzipped(idx_header(MAX_UINT32, 1, 1) + bytes(64 * MIB))
GZIP_CASES = [
    *(
        Case(f"gz cut {n}", GZ_FILE[:n], f"byte {n}", CUT_OFF)
        for n in (2, 3, 9, 10, 11, 20, *range(len(GZ_FILE) - 9, len(GZ_FILE)))
    ),
    Case("gz cut 1", GZ_FILE[:1], "byte 0", (MAGIC, "found 1f.")),
    # zlib takes two
    Case(
        "gz method",
        GZ_FILE[:2] + b"\x07" + GZ_FILE[3:],
        "byte 3",
        (SOUND_STREAM, "unknown compression method"),
    ),
    Case(
        "gz flags",
        GZ_FILE[:3] + b"\xe0" + GZ_FILE[4:],
        "byte 3",
        (SOUND_STREAM, "unknown header flags set"),
    ),
    Case(
        "gz block type",
        GZ_FILE[:10] + b"\x07" + GZ_FILE[11:],
        "byte 10",
        (SOUND_STREAM, "invalid block type"),
    ),
    Case(
        "gz checksum",
        flip_bit(GZ_FILE, len(GZ_FILE) - 8),
        f"byte {len(GZ_FILE) - 5}",
        (SOUND_STREAM, "incorrect data check"),
    ),
    Case(
        "gz length",
        flip_bit(GZ_FILE, len(GZ_FILE) - 4),
        f"byte {len(GZ_FILE) - 1}",
        (SOUND_STREAM, "incorrect length check"),
    ),
    Case(
        "gz of stored bytes, flipped",
        flip_bit(gzip.compress(IDX_FILE, 0), 35),
        "byte 58",
        (SOUND_STREAM, "incorrect data check"),
    ),
    Case(
        "gz then garbage",
        GZ_FILE + b"tail",
        f"byte {len(GZ_FILE)}",
        (OTHER_MEMBER, "found 74 61 69 6c"),
    ),
    Case(
        "gz then zeros",
        GZ_FILE + bytes(512),
        f"byte {len(GZ_FILE)}",
        (OTHER_MEMBER, "found 00 00 00 00"),
    ),
    Case("gz then half a magic", GZ_FILE + b"\x1f", f"byte {len(GZ_FILE) + 1}", CUT_OFF),
    Case("gz then a cut member", GZ_FILE + GZ_FILE[:10], f"byte {len(GZ_FILE) + 10}", CUT_OFF),
    Case(
        "gz then a cut member with data",
        GZ_FILE + GZ_FILE[:-9],
        "unpacked byte 40",
        (AFTER_THE_DATA, "found other bytes"),
    ),
    Case(
        "gz then another magic",
        GZ_FILE + b"\x1f\x8c",
        f"byte {len(GZ_FILE) + 1}",
        (SOUND_STREAM, "incorrect header check"),
    ),
    Case("gz twice", GZ_FILE + GZ_FILE, "unpacked byte 40", (AFTER_THE_DATA, "found other bytes")),
    Case("gz of gz", gzipped(GZ_FILE), "unpacked byte 0", (MAGIC, "found 1f 8b 08 00 (gzip)")),
    Case("gz of nothing", gzipped(b""), "unpacked byte 0", (MAGIC, "found the end of the file")),
    Case(
        "tar.gz",
        make_tar("images", IDX_FILE, "w:gz"),
        "unpacked byte 0",
        (MAGIC, "found 69 6d 61 67 (tar)"),
    ),
    Case("gz bomb", GZIP_BOMB, "unpacked byte 40", (AFTER_THE_DATA, "found other bytes")),
    Case(
        "gz bomb in a second member",
        GZ_FILE + gzipped(bytes(64 * MIB)),
        "unpacked byte 40",
        (AFTER_THE_DATA, "found other bytes"),
    ),
    Case(
        "gz bomb that declares more",
        DECLARING_BOMB,
        "unpacked byte 16",
        (f"{MAX_UINT32} data", "too small"),
    ),
]
FETCH_CIFAR10 = "Fetch cifar-10-binary.tar.gz, unpack it and name its folder cifar-10-batches-bin."
UNPACK_CIFAR10 = "Unpack it (tar -xf) and name the folder cifar-10-batches-bin that comes out."
NEVER_UNPICKLED = (
    f"This is the Python version of CIFAR-10, a pickle, which is never loaded. {FETCH_CIFAR10}"
)
WHOLE_RECORDS = "whole records of 3073 bytes"
BINARY_VERSION = "records of CIFAR-10's binary version"
CIFAR10_CASES = [
    Case("empty", b"", "byte 0", (WHOLE_RECORDS, "an empty file"), FETCH_CIFAR10),
    *(
        Case(
            f"cut {i} {n}",
            CIFAR10_FILE[: 3073 * i + n],
            f"byte {3073 * i}",
            (WHOLE_RECORDS, f"{n} bytes into record {i}"),
            FETCH_CIFAR10,
        )
        for i, n in ((0, 1), (0, 2), (0, 1024), (0, 3072), (1, 1), (1, 3072), (2, 1), (2, 3072))
    ),
    Case(
        "trailing byte",
        CIFAR10_FILE + b"\0",
        "byte 9219",
        (WHOLE_RECORDS, "the end of the file 1 bytes into record 3"),
        FETCH_CIFAR10,
    ),
    Case(
        "first label",
        b"\x0a" + CIFAR10_FILE[1:],
        "byte 0",
        ("a fine label in 0..9 in record 0", "found 10."),
        FETCH_CIFAR10,
    ),
    Case(
        "last label",
        CIFAR10_FILE[:6146] + b"\xff" + CIFAR10_FILE[6147:],
        "byte 6146",
        ("0..9 in record 2", "found 255."),
        FETCH_CIFAR10,
    ),
    Case(
        "record 1000",
        CIFAR10_FILE[:3073] * 1000 + b"\x63" + CIFAR10_FILE[1:],
        "byte 3073000",
        ("in record 1000", "found 99."),
        FETCH_CIFAR10,
    ),
    Case(
        "shifted",
        CIFAR10_FILE[20:] + bytes(20),
        "byte 0",
        ("in record 0", "found 19."),
        FETCH_CIFAR10,
    ),
    Case(
        "hundred's records",
        CIFAR100_FILE[3074:] * 3073,
        "byte 3073",
        ("in record 1", "found 255."),
        FETCH_CIFAR10,
    ),
    Case(
        "gz",
        gzipped(CIFAR10_FILE),
        "byte 0",
        (BINARY_VERSION, "found 1f 8b 08 00 (gzip)"),
        UNPACK_CIFAR10,
    ),
    Case(
        "tar.gz",
        make_tar("data_batch_1.bin", CIFAR10_FILE, "w:gz"),
        "byte 0",
        (BINARY_VERSION, "(gzip)"),
        UNPACK_CIFAR10,
    ),
    Case(
        "tar",
        make_tar("data_batch_1.bin", CIFAR10_FILE),
        "byte 0",
        (BINARY_VERSION, "found 64 61 74 61 (tar)"),
        UNPACK_CIFAR10,
    ),
    *(
        Case(
            f"pickle {n}",
            pickle.dumps({"data": CIFAR10_FILE}, n),
            "byte 0",
            (BINARY_VERSION, f"80 0{n}", "(a pickle)"),
            NEVER_UNPICKLED,
        )
        for n in (2, 3, 4, 5)
    ),
    Case(
        "pickle that would run",
        b"\x80\x02cos\nabort\n(tR.",
        "byte 0",
        (BINARY_VERSION, "(a pickle)"),
        NEVER_UNPICKLED,
    ),
    Case(
        "web page",
        b"<html>404</html>",
        "byte 0",
        (BINARY_VERSION, "found 3c 68 74 6d (a web page)"),
        FETCH_CIFAR10,
    ),
]
FETCH_CIFAR100 = FETCH_CIFAR10.replace("-10-batches-bin", "-100-binary").replace("-10-", "-100-")
CIFAR100_CASES = [
    Case(
        "coarse",
        b"\x14" + CIFAR100_FILE[1:],
        "byte 0",
        ("a coarse label in 0..19 in record 0", "found 20."),
        FETCH_CIFAR100,
    ),
    Case(
        "fine",
        CIFAR100_FILE[:3075] + b"\x64" + CIFAR100_FILE[3076:],
        "byte 3075",
        ("0..99 in record 1", " 100."),
        FETCH_CIFAR100,
    ),
    Case(
        "cut",
        CIFAR100_FILE[:-1],
        "byte 3074",
        ("whole records of 3074 bytes", "3073 bytes into record 1"),
        FETCH_CIFAR100,
    ),
    Case(
        "ten's records",
        CIFAR10_FILE,
        "byte 6148",
        ("whole records of 3074 bytes", "3071 bytes into record 2"),
        FETCH_CIFAR100,
    ),
]


def read_cifar10(path: Path) -> Any:
    return read_cifar(path.parent)


def read_cifar100(path: Path) -> Any:
    return read_cifar(path.parent, classes=100)


def read_images(path: Path) -> Any:
    return read_idx(path, dims=3)


def read_picture(path: Path) -> Any:
    return ImageFolder(path.parent.parent)[0]


READERS: list[tuple[str, Callable[[Path], Any], list[Case]]] = [
    ("images-idx3-ubyte", read_images, PLAIN_CASES + GZIPPED_CASES + COUNT_CASES + GZIP_CASES),
    ("data_batch_1.bin", read_cifar10, CIFAR10_CASES),
    ("train.bin", read_cifar100, CIFAR100_CASES),
]
ALL_CASES = [
    pytest.param(name, read, case, id=f"{name}: {case.name}")
    for name, read, cases in READERS
    for case in cases
]


@pytest.mark.parametrize(("name", "read", "case"), ALL_CASES)
def test_refused_by_name_byte_and_words_in_little_memory(
    tmp_path: Path, name: str, read: Callable[[Path], Any], case: Case
) -> None:
    path = tmp_path / name
    path.write_bytes(case.content)
    tracemalloc.start()  # sees Python's, numpy's and zlib's memory
    try:
        with pytest.raises(ValueError, match="expected") as caught:
            read(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith(f"{path}: expected ")
    assert f" at {case.at}, found " in message
    assert message.endswith(f". {case.advice}")
    for words in case.words:
        assert words in message
    # a piece of 1 MiB, held once or twice; CIFAR's result is allocated by the file's true size
    assert peak < 3 * MIB + 2 * len(case.content) * (read is not read_images)


@pytest.mark.parametrize(
    ("name", "read", "content"),
    [
        ("images", read_images, IDX_FILE),
        ("images", read_images, GZ_FILE),
        ("data_batch_1.bin", read_cifar10, CIFAR10_FILE),
        ("train.bin", read_cifar100, CIFAR100_FILE),
    ],
)
def test_the_undamaged_originals_are_read(
    tmp_path: Path, name: str, read: Callable[[Path], Any], content: bytes
) -> None:
    """What the cases are made from is sound, so each is refused for its own fault."""
    (tmp_path / name).write_bytes(content)
    read(tmp_path / name)


@pytest.mark.parametrize("read", [read_images, read_cifar10])
def test_folders_and_unreadable_files_keep_their_names(
    tmp_path: Path, read: Callable[[Path], Any]
) -> None:
    path = tmp_path / "data_batch_1.bin"
    path.mkdir()
    with pytest.raises(
        IsADirectoryError,
        match=rf"{path}: expected a file that can be read, found: Is a directory\.",
    ):
        read(path)
    path.rmdir()
    path.symlink_to("/proc/self/mem")  # opens, and fails at the first byte, for root too
    with pytest.raises(
        OSError,
        match=rf"{path}: expected a file that can be read, found: Input/output error\. Fetch",
    ):
        read(path)


def test_a_missing_file_keeps_its_name(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"nowhere: expected a file that can be read, found: No such file"
    ):
        read_images(tmp_path / "nowhere")


def read_or_message(path: Path, dims: int) -> Tensor | str:
    """The tensor, or the words of the ValueError; any other exception passes through."""
    try:
        return read_idx(path, dims=dims)
    except ValueError as error:
        return str(error)


IDX_FILES = [IDX_FILE, idx_header(0, 28, 28), idx_header(5) + bytes(5), idx_header(0)]


@given(
    content=st.sampled_from(IDX_FILES),
    pack=st.sampled_from([bytes, gzipped]),
    at=st.integers(0, 15),
    value=st.integers(0, 255),
)
def test_any_byte_of_a_header(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, pack: Any, at: int, value: int
) -> None:
    """One byte changed: a refusal that names the file, or a tensor of the shape now declared."""
    dims = content[3]
    at %= 4 + 4 * dims
    content = content[:at] + bytes([value]) + content[at + 1 :]
    path = tmp_path_factory.getbasetemp() / "header"
    path.write_bytes(pack(content))
    result = read_or_message(path, dims)
    if isinstance(result, str):
        assert result.startswith(f"{path}: expected ")
    else:
        assert content[:4] == bytes([0, 0, 8, dims])
        assert tuple(result.shape) == struct.unpack_from(f">{dims}I", content, 4)
        assert result.numpy().tobytes() == content[4 + 4 * dims :]


@given(at=st.integers(0, len(GZ_FILE) - 1), value=st.integers(0, 255))
def test_any_byte_of_a_gzip_file(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int
) -> None:
    """One byte changed: a refusal that names the file, or the original values."""
    path = tmp_path_factory.getbasetemp() / "packed"
    path.write_bytes(GZ_FILE[:at] + bytes([value]) + GZ_FILE[at + 1 :])
    result = read_or_message(path, 3)
    if isinstance(result, str):
        assert result.startswith(f"{path}: expected ")
    else:
        assert result.numpy().tobytes() == IDX_FILE[16:]


@given(record=st.integers(0, 2), value=st.integers(0, 255))
def test_any_label_byte(tmp_path_factory: pytest.TempPathFactory, record: int, value: int) -> None:
    path = tmp_path_factory.getbasetemp() / "cifar" / "data_batch_1.bin"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(
        CIFAR10_FILE[: 3073 * record] + bytes([value]) + CIFAR10_FILE[3073 * record + 1 :]
    )
    if value < 10:
        assert read_cifar10(path)[1][record] == value
    else:
        with pytest.raises(
            ValueError, match=rf"in record {record} at byte {3073 * record}, found {value}\."
        ):
            read_cifar10(path)


@pytest.mark.parametrize(
    ("labels", "match"),
    [
        (
            idx_header(2) + bytes([1, 10]),
            r"expected labels in 0\.\.9 at byte 9 of its content, found 10 as label number 1",
        ),
        (
            idx_header(3) + bytes(3),
            r"expected 2 labels, one per image of .*, at byte 4, found 3\. Fetch both files again",
        ),
        (
            idx_header(0),
            r"expected 2 labels, .* found 0\. Fetch both files again, from one place\.",
        ),
        (
            idx_header(2, 1) + bytes(2),
            r"expected magic 00 00 08 01 .* at byte 0, found 00 00 08 02 \(uint8, 2 dimensions\)",
        ),
        (
            IDX_FILE,
            r"expected magic 00 00 08 01 \(uint8, 1 dimension\) at byte 0, found 00 00 08 03",
        ),
    ],
)
def test_labels_that_do_not_fit_their_images(tmp_path: Path, labels: bytes, match: str) -> None:
    (tmp_path / "train-images-idx3-ubyte").write_bytes(IDX_FILE)
    path = tmp_path / "train-labels-idx1-ubyte"
    for content in (labels, gzipped(labels)):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match=match.replace("at byte 0", "at (unpacked )?byte 0")
        ) as caught:
            read_split(tmp_path)
        assert str(caught.value).startswith(f"{path}: ")


needs_pillow = pytest.mark.skipif(find_spec("PIL") is None, reason="Pillow is not installed")


def encode_noise(format: str) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (24, 20, 3), dtype=np.uint8)
    Image.fromarray(noise).save(out, format)
    return out.getvalue()


def png_file(width: int, height: int, rows: bytes = bytes(9)) -> bytes:
    """A PNG that declares a size and brings, unless told otherwise, next to nothing of it."""
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows, 1)),
    )
    chunks = (
        struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def damaged_pictures() -> dict[str, tuple[bytes, str]]:
    """Damaged images by name, with the words of their refusal."""
    bomb = "raise PIL.Image.MAX_IMAGE_PIXELS if it is meant to be so large."
    # Which of the two limits speaks depends on whether Pillow's warning is an error.
    too_large = "Shrink the image, or "
    unknown = "found bytes of none of PNG, JPEG, BMP, WEBP, GIF, PPM, TIFF: "
    cases = {
        "empty": (b"", "found an empty file. Replace"),
        "text": (b"hello", unknown + "68 65 6c 6c"),
        "page": (b"<html></html>", unknown + "3c 68 74 6d (a web page)"),
        "pickle": (PICKLED_BATCH, unknown + "80 02"),
        "no header": (b"\x89PNG\r\n\x1a\n", unknown),
        "bad header": (flip_bit(encode_noise("PNG"), 20), unknown),
        "bad pixels": (flip_bit(encode_noise("PNG"), 700), "OSError"),
        "bomb": (png_file(100_000, 100_000), bomb),
        "over the limit": (png_file(10_000, 9_000), too_large),
        "endless": (png_file(2**31 - 1, 2**31 - 1), bomb),
    }
    for format in ("PNG", "JPEG", "BMP", "WEBP", "GIF", "PPM", "TIFF"):
        complete = encode_noise(format)
        for part in (0.02, 0.6, 0.97):
            cases[f"{format} cut at {part}"] = (complete[: int(part * len(complete))], "found ")
    return cases


@needs_pillow
@pytest.mark.parametrize("strict", [False, True])
def test_damaged_pictures(tmp_path: Path, strict: bool) -> None:
    """Pillow warns of some damage first; the refusal is the same if warnings are errors."""
    path = tmp_path / "class" / "x.png"
    path.parent.mkdir()
    # pytest puts the filters back after each test
    warnings.simplefilter("error" if strict else "ignore")
    for name, (content, words) in damaged_pictures().items():
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match="expected an image that Pillow can decode, found "
        ) as caught:
            read_picture(path)
        message = str(caught.value)
        assert message.startswith(f"{path}: "), name
        assert words in message, name
        assert message.endswith(("Replace the file or remove it.", "to be.", "so large.")), name


CHILD = """
import json, sys
from halfstep.data.readers.image_folder import ImageFolder
from halfstep.data.readers.idx import read_idx

def peak():
    lines = open("/proc/self/status")
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1])

def grown(read, item):
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again from what is in use
    before = peak()
    try:
        read(item)
    except ValueError:
        pass
    return (peak() - before) / 1024

data = ImageFolder(sys.argv[1])
data[len(data) - 1]  # the decoders' libraries load on first use
pictures = {path: grown(data.__getitem__, i) for i, path in enumerate(data.files)}
others = {path: grown(lambda path: read_idx(path, dims=3), path) for path in sys.argv[2:]}
print(json.dumps(pictures | others))
"""


def measure_growth(folder: Path, files: dict[str, bytes]) -> dict[str, float]:
    """MiB by which a fresh process grew at each file: Pillow allocates out of tracemalloc's sight.

    The process's own peak, VmHWM: ru_maxrss would start at the peak of the parent.
    """
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    others = [str(folder / name) for name in files if name.startswith("idx/")]
    command = [sys.executable, "-c", CHILD, str(folder / "pictures"), *others]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    return {
        str(Path(path).relative_to(folder)): grown
        for path, grown in json.loads(done.stdout).items()
    }


@needs_pillow
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="needs Linux's resettable peak"
)
def test_memory_of_the_process_stays_small(tmp_path: Path) -> None:
    damaged = {
        f"pictures/class/{i}.png": content
        for i, (content, _) in enumerate(damaged_pictures().values())
    }
    damaged |= {f"idx/{i}": case.content for i, case in enumerate(READERS[0][2])}
    sound = {  # these do need the memory, which shows that it is seen
        "pictures/class/sound.png": png_file(4000, 2000, rows=bytes(2000 * 12001)),
        "idx/sound": gzipped(idx_header(32 * MIB, 1, 1) + bytes(32 * MIB)),
        "pictures/class/warm.png": encode_noise("PNG"),  # comes last, and is read once before
    }
    grown = measure_growth(tmp_path, damaged | sound)
    assert grown.keys() == damaged.keys() | sound.keys()
    assert grown["pictures/class/sound.png"] > 22.8  # 4000 × 2000 × 3 bytes are 22.9 MiB
    assert grown["idx/sound"] > 31
    assert max(grown[name] for name in damaged) < 12
