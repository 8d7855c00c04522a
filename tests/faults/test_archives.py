"""Archives made to do harm, or damaged: refused by name, nothing written, little memory used."""

import bz2
import gzip
import io
import lzma
import os
import random
import re
import resource
import signal
import stat
import struct
import subprocess
import sys
import tarfile
import time
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from halfstep.data.download.archive import unpack

TarEntry = tuple[tarfile.TarInfo, bytes]

FILES = {"set/a.bin": bytes(range(256)) * 100, "set/deep/b.txt": b"text", "empty": b""}
MIB_OF_ZEROS = bytes(1 << 20)

# Signatures of the parts of a zip.
LOCAL = b"PK\x03\x04"
CENTRAL = b"PK\x01\x02"

# Sizes as a tar header writes them.
SIZE_10 = b"00000000012\0"
SIZE_4096 = b"00000010000\0"
SIZE_32_MIB = b"00200000000\0"
SIZE_HUGE = b"\x80" + b"\xff" * 11
SIZE_MINUS_1 = b"\xff" * 11 + b"\0"
SIZE_MINUS_1024 = b"\xff" * 10 + b"\xfc\0"


def entry(name: str, data: bytes = b"", **fields) -> TarEntry:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in fields.items():
        setattr(info, field, value)
    return info, data


def folder_entry(name: str) -> TarEntry:
    return entry(name, type=tarfile.DIRTYPE)


def symlink_entry(name: str, target: str) -> TarEntry:
    return entry(name, type=tarfile.SYMTYPE, linkname=target)


def make_tar(*entries: TarEntry, format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def plain_tar() -> bytes:
    return make_tar(*(entry(name, data) for name, data in FILES.items()))


def make_zip(
    *entries: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return out.getvalue()


def plain_zip() -> bytes:
    return make_zip(*FILES.items())


def tar_header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    """A tar header by hand, for the sizes that tarfile will not write."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108] = b"0000644\0"
    block[124:136] = size
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8  # the checksum counts itself as blanks
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def zip_info(name: str, mode: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def patch_bytes(data: bytes, *changes: tuple[bytes, int, bytes]) -> bytes:
    """Replaces bytes at an offset from the last occurrence of a signature."""
    patched = bytearray(data)
    for signature, offset, new in changes:
        start = data.rindex(signature) + offset
        patched[start : start + len(new)] = new
    return bytes(patched)


def lying_zip(crc_length: int) -> bytes:
    """Declares 10 bytes and unpacks to 1,000.

    With the checksum of those 10, zipfile cuts it there and is content.
    """
    crc = struct.pack("<I", zlib.crc32(bytes(crc_length)))
    size = struct.pack("<I", 10)
    return patch_bytes(
        make_zip(("a", bytes(1000))),
        (LOCAL, 14, crc),
        (LOCAL, 22, size),
        (CENTRAL, 16, crc),
        (CENTRAL, 24, size),
    )


def greedy_xz() -> bytes:
    """Asks for a window of 4 GiB in its block header: byte 4 after the 12 of the stream's."""
    data = bytearray(lzma.compress(plain_tar()))
    end = 12 + 4 * data[12]
    data[16] = 40
    data[end : end + 4] = struct.pack("<I", zlib.crc32(data[12:end]))
    return bytes(data)


def overlapping_zip() -> bytes:
    """Two directory entries, one content: the way to unpack petabytes from megabytes."""
    data = make_zip(("a", b"x" * 500), ("b", b"y" * 500), method=zipfile.ZIP_STORED)
    return patch_bytes(data, (CENTRAL, 42, struct.pack("<I", 5)))


def sparse_tar() -> bytes:
    info, data = entry("a", b"1\n0\n512\n" + bytes(504))
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.realsize": str(1 << 40),
    }
    return make_tar((info, data))


def many_headers() -> bytes:
    header = tar_header(b"x", b"00000000013\0", b"x")
    return (header + b"11 path=ab\n".ljust(512, b"\0")) * 3000 + plain_tar()


def zip_with_wrong_crc() -> bytes:
    return patch_bytes(plain_zip(), (LOCAL, 14, bytes(4)), (CENTRAL, 16, b"\1\1\1\1"))


# How to make each archive, and the words of its refusal.
HostileArchive = tuple[Callable[[], bytes], str]

BAD_NAMES: dict[str, HostileArchive] = {
    "tar-absolute": (
        lambda: make_tar(entry("/etc/halfstep", b"x")),
        "'/etc/halfstep': its name is absolute",
    ),
    "tar-dotdot": (
        lambda: make_tar(entry("a/../../b", b"x")),
        "leads out of the folder",
    ),
    "tar-dotdot-alone": (
        lambda: make_tar(folder_entry("..")),
        "leads out of the folder",
    ),
    "tar-backslash": (
        lambda: make_tar(entry("..\\..\\b", b"x")),
        "a backslash",
    ),
    "tar-drive": (
        lambda: make_tar(entry("C:b", b"x")),
        "a drive letter",
    ),
    "tar-control": (
        lambda: make_tar(entry("a\x1b[2Jb", b"x")),
        r"'a\\x1b\[2Jb': its name has .* a control character",
    ),
    "tar-not-utf8": (
        lambda: make_tar(entry("a\udcff", b"x"), format=tarfile.GNU_FORMAT),
        "not UTF-8",
    ),
    "tar-no-name": (
        lambda: make_tar(entry("./.", b"x")),
        "a file without a name",
    ),
    "tar-long-part": (
        lambda: make_tar(entry("n" * 256, b"x")),
        "255 in one part",
    ),
    "tar-long-path": (
        lambda: make_tar(entry("n/" * 1000 + "n", b"x")),
        "longer than 1024 bytes",
    ),
    "zip-absolute": (
        lambda: make_zip(("/etc/halfstep", b"x")),
        "its name is absolute",
    ),
    "zip-dotdot": (
        lambda: make_zip(("../b", b"x")),
        "leads out of the folder",
    ),
    "zip-backslash": (
        lambda: make_zip(("..\\b", b"x")),
        "a backslash",
    ),
    "zip-drive": (
        lambda: make_zip(("c:/b", b"x")),
        "a drive letter",
    ),
    "zip-nul": (
        lambda: make_zip(("aQ.bin", b"x")).replace(b"aQ.bin", b"a\0.bin"),
        "a control character",
    ),
}

COLLISIONS: dict[str, HostileArchive] = {
    "tar-twice": (
        lambda: make_tar(entry("a", b"x"), entry("a", b"y")),
        "'a': its name collides with 'a'",
    ),
    "tar-case": (
        lambda: make_tar(entry("Data/a", b"x"), entry("data/b", b"y")),
        "'data/b': its name collides with 'Data'",
    ),
    "tar-sharp-s": (
        lambda: make_tar(entry("straße", b"x"), entry("STRASSE", b"y")),
        "collides with 'straße'",
    ),
    "tar-accents": (
        lambda: make_tar(entry("\u00e9", b"x"), entry("e\u0301", b"y")),
        "collides with",
    ),
    "tar-file-as-folder": (
        lambda: make_tar(entry("a", b"x"), entry("a/b", b"y")),
        "'a/b': its name collides with 'a'",
    ),
    "tar-folder-as-file": (
        lambda: make_tar(entry("a/b", b"x"), entry("a", b"y")),
        "'a': its name collides with 'a'",
    ),
    "zip-case": (
        lambda: make_zip(("A", b"x"), ("a", b"y")),
        "collides with 'A'",
    ),
}

BAD_KINDS: dict[str, HostileArchive] = {
    "tar-symlink": (
        lambda: make_tar(symlink_entry("a", "/etc/passwd")),
        "'a' is no plain file but a link",
    ),
    "tar-link-then-write": (
        lambda: make_tar(symlink_entry("a", ".."), entry("a/b", b"x")),
        "but a link",
    ),
    "tar-hardlink": (
        lambda: make_tar(entry("a", type=tarfile.LNKTYPE, linkname="/etc/passwd")),
        "but a link",
    ),
    "tar-fifo": (
        lambda: make_tar(entry("a", type=tarfile.FIFOTYPE)),
        "but a device, pipe",
    ),
    "tar-device": (
        lambda: make_tar(entry("a", type=tarfile.CHRTYPE, devmajor=1, devminor=5)),
        "but a device",
    ),
    "tar-unknown-kind": (
        lambda: make_tar(entry("a", b"x", type=b"Z")),
        "unknown entry",
    ),
    "tar-sparse": (
        sparse_tar,
        "sparse",
    ),
    "zip-symlink": (
        lambda: make_zip((zip_info("a", stat.S_IFLNK | 0o777), b"/etc")),
        "but a link",
    ),
    "zip-fifo": (
        lambda: make_zip((zip_info("a", stat.S_IFIFO), b"")),
        "device or pipe",
    ),
}

# The first three are refused by the tarfile of Python 3.12 in words of its own.
BAD_SIZES: dict[str, HostileArchive] = {
    "tar-negative-size": (
        lambda: tar_header(b"a", SIZE_MINUS_1) + bytes(1024),
        "'a' has a negative size|invalid offset",
    ),
    "tar-negative-unknown": (
        lambda: tar_header(b"a", SIZE_10) + bytes(512) + tar_header(b"b", SIZE_MINUS_1024, b"Z"),
        "'b' has a negative|cut off at byte 1536",
    ),
    "tar-negative-header": (
        lambda: tar_header(b"a", SIZE_MINUS_1024, b"x") + bytes(1024),
        "found one of -1024|invalid offset",
    ),
    "tar-beyond-its-end": (
        lambda: tar_header(b"a", SIZE_4096) + bytes(512),
        "ends after 512 of 4096 bytes",
    ),
    "tar-huge-size": (
        lambda: tar_header(b"a", SIZE_HUGE) + bytes(1024),
        "more than limit_bytes=8388608",
    ),
    "tar-huge-header": (
        lambda: gzip.compress(tar_header(b"a", SIZE_32_MIB, b"x") + MIB_OF_ZEROS * 32, 1),
        "headers of at most 16384",
    ),
    "tar-headers-in-headers": (
        many_headers,
        "damaged .*recursion|headers included",
    ),
    "tar-bomb": (
        lambda: make_tar(*(entry(f"{i}", MIB_OF_ZEROS) for i in range(9))),
        "'8': with its 1048576 bytes .* limit_bytes",
    ),
    "tar-gz-bomb-after-the-end": (
        lambda: gzip.compress(plain_tar() + MIB_OF_ZEROS * 32, 1),
        "headers included",
    ),
    "zip-bomb": (
        lambda: make_zip(*((f"{i}", MIB_OF_ZEROS) for i in range(9))),
        "'8': .* more than limit_bytes=8388608",
    ),
    "zip-lies": (
        lambda: lying_zip(1000),
        "'a': it unpacks to more than the 10 bytes it declares",
    ),
    "zip-lies-twice": (
        lambda: lying_zip(10),
        "'a': the archive is damaged .*CRC",
    ),
    "zip-overlap": (
        overlapping_zip,
        "overlaps the one before it|Overlapped entries",  # newer zipfiles see it too
    ),
    "tar-too-many": (
        lambda: make_tar(*(entry(f"{i}") for i in range(101))),
        "more than limit_files=100",
    ),
    "tar-too-deep": (
        lambda: make_tar(*(entry(f"{i}/" * 60) for i in range(2))),
        "more than limit_files=100",
    ),
    "zip-too-many": (
        lambda: make_zip(*((f"{i}", b"") for i in range(101))),
        "more than limit_files=100",
    ),
    "zip-directory-too-long": (
        lambda: make_zip(*(("n" * 200 + f"{i}", b"") for i in range(2000))),
        "Raise limit_files",
    ),
}

DAMAGED: dict[str, HostileArchive] = {
    "nothing": (
        lambda: b"",
        "expected a tar archive",
    ),
    "noise": (
        lambda: b"not an archive at all " * 100,
        "expected a tar archive .* found 6e 6f 74",
    ),
    "gz-of-an-idx-file": (
        lambda: gzip.compress(b"\0\0\x08\x03" + bytes(1000)),
        "expected a tar archive",
    ),
    "no-files": (
        lambda: make_tar(folder_entry("a")),
        "expected files, found none",
    ),
    "tar-cut-in-data": (
        lambda: plain_tar()[:5000],
        "ends after .* of 25600 bytes",
    ),
    "tar-cut-in-header": (
        lambda: plain_tar()[: 512 + 25600 + 100],
        "damaged or cut off",
    ),
    "tar-cut-before-end": (
        lambda: plain_tar()[: 512 + 25600],
        "damaged or cut off",
    ),
    "tar-bad-header": (
        lambda: plain_tar().replace(b"set/deep", b"set/dEEp"),
        "damaged or cut off",
    ),
    "tar-tail": (
        lambda: plain_tar() + plain_tar(),
        "more after the archive's end mark",
    ),
    "gz-cut": (
        lambda: gzip.compress(plain_tar())[:-40],
        "damaged",
    ),
    "gz-crc": (
        lambda: gzip.compress(plain_tar())[:-8] + bytes(8),
        "damaged .*CRC",
    ),
    "bz2-cut": (
        lambda: bz2.compress(plain_tar())[:-10],
        "damaged",
    ),
    "xz-cut": (
        lambda: lzma.compress(plain_tar())[:-40],
        "damaged",
    ),
    "xz-memory": (
        greedy_xz,
        "damaged .*Memory usage limit",
    ),
    "zip-cut": (
        lambda: plain_zip()[:-30],
        "damaged",
    ),
    "zip-crc": (
        zip_with_wrong_crc,
        "damaged",
    ),
    "zip-other-name": (
        lambda: plain_zip().replace(b"set/a.bin", b"set/c.bin", 1),
        "damaged .*differ",
    ),
    "zip-encrypted": (
        lambda: patch_bytes(plain_zip(), (LOCAL, 6, b"\1"), (CENTRAL, 8, b"\1")),
        "is encrypted",
    ),
    "zip-bz2": (
        lambda: make_zip(("a", MIB_OF_ZEROS), method=zipfile.ZIP_BZIP2),
        "another method than deflate",
    ),
}

HOSTILE = BAD_NAMES | COLLISIONS | BAD_KINDS | BAD_SIZES | DAMAGED


def list_tree(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def read_tree(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize("kind", HOSTILE)
def test_refused(tmp_path: Path, kind: str) -> None:
    make_archive, match = HOSTILE[kind]
    archive = tmp_path / "home" / "archive"
    archive.parent.mkdir()
    archive.write_bytes(make_archive())
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"archive: ") as caught:
            unpack(archive, archive.parent / "out", limit_bytes=8 << 20, limit_files=100)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    # The words are searched behind the path, which has the name of the test in it.
    message = str(caught.value)
    prefix = f"{archive}: "
    assert message.startswith(prefix)
    assert re.search(match, message[len(prefix) :]), message
    assert "Nothing was unpacked. Get the archive again" in message

    assert list_tree(tmp_path) == ["home", "home/archive"]
    # 8 MiB of them are the window of a plain xz. Read carelessly, several need 32 MiB, one 4 GiB.
    assert peak < 16 << 20


@pytest.mark.parametrize(
    "make_archive",
    [plain_tar, plain_zip, lambda: gzip.compress(plain_tar())],
    ids=["tar", "zip", "gz"],
)
def test_random_damage_is_refused_or_harmless(tmp_path: Path, make_archive) -> None:
    data = make_archive()
    draw = random.Random(0)
    refused = 0
    for i in range(100):
        damaged = bytearray(data)
        for _ in range(draw.choice((1, 4))):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        length = draw.choice((len(damaged), draw.randrange(len(damaged))))
        (tmp_path / "a").write_bytes(damaged[:length])
        try:
            unpack(tmp_path / "a", tmp_path / "all" / f"{i}", limit_bytes=8 << 20, limit_files=100)
        except ValueError:
            refused += 1
        assert os.listdir(tmp_path) in (["a", "all"], ["all", "a"])
    assert refused >= 50  # every cut one, and what was hit in a header or under a checksum
    assert len(os.listdir(tmp_path / "all")) == 100 - refused


@pytest.mark.parametrize(
    "compress", [bytes, gzip.compress, bz2.compress, lzma.compress], ids=["tar", "gz", "bz2", "xz"]
)
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_plain_tars_unpack(tmp_path: Path, compress, format: int) -> None:
    files = dict(FILES)
    if format != tarfile.USTAR_FORMAT:
        long_name = "folder/" * 20 + "é" * 40  # 220 bytes: over the 100 of a bare header
        files[long_name] = b"long"
    folders = [folder_entry("./"), folder_entry("set"), folder_entry("set")]
    entries = [entry(name, data) for name, data in files.items()]
    (tmp_path / "a").write_bytes(compress(make_tar(*folders, *entries, format=format)))
    folder = unpack(tmp_path / "a", tmp_path / "new" / "out")
    assert read_tree(folder) == files
    assert list_tree(tmp_path / "new")[0] == "out"


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_plain_zips_unpack(tmp_path: Path, method: int) -> None:
    (tmp_path / "a").write_bytes(make_zip(("set/", b""), *FILES.items(), method=method))
    folder = unpack(tmp_path / "a", tmp_path / "out")
    assert read_tree(folder) == FILES


def test_odd_spellings_of_a_plain_name_unpack(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(make_tar(entry("./x//y/.", b"1"), entry("x/./z", b"2")))
    folder = unpack(tmp_path / "a", tmp_path / "out")
    assert read_tree(folder) == {"x/y": b"1", "x/z": b"2"}


def test_modes_and_owners_stay_behind(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(make_tar(entry("tool", b"x", mode=0o6777, uid=12345, gid=12345)))
    status = (unpack(tmp_path / "a", tmp_path / "out") / "tool").stat()
    assert (status.st_uid, status.st_gid) == (os.getuid(), os.getgid())
    assert status.st_mode & 0o7111 == 0


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(plain_tar())
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="expected a new folder"):
        unpack(tmp_path / "a", tmp_path / "out")
    assert list_tree(tmp_path) == ["a", "out"]


def test_limits_hold_to_the_byte_and_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(plain_tar())
    size = sum(map(len, FILES.values()))
    count = 5  # 3 files, 2 implied folders
    unpack(tmp_path / "a", tmp_path / "enough", limit_bytes=size, limit_files=count)
    with pytest.raises(ValueError, match=f"limit_bytes={size - 1}"):
        unpack(tmp_path / "a", tmp_path / "out", limit_bytes=size - 1)
    with pytest.raises(ValueError, match="limit_files=4"):
        unpack(tmp_path / "a", tmp_path / "out", limit_files=4)
    assert not (tmp_path / "out").exists()


# The modules alone, without the package around them, which would load torch for seconds.
UNPACK_ALONE = """
import sys, types
for name in ("halfstep", "halfstep.data"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [name.replace(".", "/")]
from halfstep.data.download.archive import unpack
unpack(*sys.argv[1:])
"""


def start_unpack(
    archive: Path, folder: Path, before: Callable[[], None] | None = None
) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", UNPACK_ALONE, archive, folder],
        cwd=Path(__file__).parents[2],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=before,
    )


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """The kernel's own refusal to write on: a limit on the file size stands in for a full disk."""

    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))

    (tmp_path / "a").write_bytes(plain_tar())
    process = start_unpack(tmp_path / "a", tmp_path / "out", before=limit_file_size)
    error = process.communicate()[1]
    assert "OSError: [Errno 27] File too large" in error
    assert list_tree(tmp_path) == ["a"]


def test_a_killed_process_leaves_no_folder_and_the_next_one_succeeds(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(make_tar(entry("big", bytes(200 << 20))), 1))
    process = start_unpack(tmp_path / "a", tmp_path / "out")
    written: list[Path] = []
    while not written:
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
        written = [path for path in tmp_path.glob(".halfstep-tmp-*/big") if path.stat().st_size]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out").exists()

    abandoned = written[0].parent
    (tmp_path / "a").write_bytes(plain_tar())
    assert abandoned.exists()
    unpack(tmp_path / "a", tmp_path / "out")
    assert not abandoned.exists()  # its process is gone
