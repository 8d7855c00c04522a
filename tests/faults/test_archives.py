"""Archives made to do harm, or harmed: each refused by name, nothing written anywhere, little memory used."""

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

FILES = {"set/a.bin": bytes(range(256)) * 100, "set/deep/b.txt": b"text", "empty": b""}


def entry(name: str, data: bytes = b"", **fields) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def tar(*entries: tuple[tarfile.TarInfo, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=format) as archive:
        for info, data in entries:
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


def plain_tar() -> bytes:
    return tar(*(entry(name, data) for name, data in FILES.items()))


def zipped(
    *entries: tuple[str | zipfile.ZipInfo, bytes], method: int = zipfile.ZIP_DEFLATED
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return out.getvalue()


def plain_zip() -> bytes:
    return zipped(*FILES.items())


def header(name: bytes, size: bytes, kind: bytes = b"0") -> bytes:
    """A tar header by hand, for the sizes that tarfile will not write."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108], block[124:136], block[156:157] = b"0000644\0", size, kind
    block[257:265], block[148:156] = b"ustar\x0000", b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def zip_info(name: str, mode: int = 0) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.external_attr = mode << 16
    return info


def patched(data: bytes, *changes: tuple[bytes, int, bytes]) -> bytes:
    """Bytes replaced at an offset from a signature's last occurrence."""
    out = bytearray(data)
    for signature, offset, new in changes:
        at = data.rindex(signature) + offset
        out[at : at + len(new)] = new
    return bytes(out)


LOCAL, CENTRAL, END = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
SMALL = struct.pack("<I", 10)


def lying_zip(crc_of: int) -> bytes:
    """Declares 10 bytes and unpacks to 1,000; with the checksum of those 10, zipfile cuts it there and is content."""
    crc = struct.pack("<I", zlib.crc32(bytes(crc_of)))
    data = zipped(("a", bytes(1000)))
    return patched(
        data, (LOCAL, 14, crc), (LOCAL, 22, SMALL), (CENTRAL, 16, crc), (CENTRAL, 24, SMALL)
    )


def greedy_xz() -> bytes:
    """Asks for a window of 4 GiB in its block header: byte 4 of what follows the 12 of the stream's."""
    data = bytearray(lzma.compress(plain_tar()))
    end = 12 + 4 * data[12]
    data[16] = 40
    data[end : end + 4] = struct.pack("<I", zlib.crc32(data[12:end]))
    return bytes(data)


def overlapping_zip() -> bytes:
    """Two directory entries, one content: the way to unpack petabytes from megabytes."""
    data = zipped(("a", b"x" * 500), ("b", b"y" * 500), method=zipfile.ZIP_STORED)
    return patched(data, (CENTRAL, 42, struct.pack("<I", 5)))


def sparse() -> bytes:
    info, data = entry("a", b"1\n0\n512\n" + bytes(504))
    info.pax_headers = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.realsize": str(1 << 40),
    }
    return tar((info, data))


def many_headers() -> bytes:
    extended = header(b"x", b"00000000013\0", b"x") + b"11 path=ab\n".ljust(512, b"\0")
    return extended * 3000 + plain_tar()


ZEROS = bytes(1 << 20)
LINK = {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}
OCTAL, BACK = b"00000000012\0", b"\xff" * 10 + b"\xfc\0"  # 10, and -1024

HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    # names
    "tar-absolute": (lambda: tar(entry("/etc/halfstep", b"x")), "'/etc/halfstep': its name is absolute"),
    "tar-dotdot": (lambda: tar(entry("a/../../b", b"x")), "leads out of the folder"),
    "tar-dotdot-alone": (lambda: tar(entry("..", type=tarfile.DIRTYPE)), "leads out of the folder"),
    "tar-backslash": (lambda: tar(entry("..\\..\\b", b"x")), "a backslash"),
    "tar-drive": (lambda: tar(entry("C:b", b"x")), "a drive letter"),
    "tar-control": (lambda: tar(entry("a\x1b[2Jb", b"x")), r"'a\\x1b\[2Jb': its name has .* a control character"),
    "tar-not-utf8": (lambda: tar(entry("a\udcff", b"x"), format=tarfile.GNU_FORMAT), "not UTF-8"),
    "tar-no-name": (lambda: tar(entry("./.", b"x")), "a file without a name"),
    "tar-long-part": (lambda: tar(entry("n" * 256, b"x")), "255 in one part"),
    "tar-long-path": (lambda: tar(entry("n/" * 1000 + "n", b"x")), "longer than 1024 bytes"),
    "zip-absolute": (lambda: zipped(("/etc/halfstep", b"x")), "its name is absolute"),
    "zip-dotdot": (lambda: zipped(("../b", b"x")), "leads out of the folder"),
    "zip-backslash": (lambda: zipped(("..\\b", b"x")), "a backslash"),
    "zip-drive": (lambda: zipped(("c:/b", b"x")), "a drive letter"),
    "zip-nul": (lambda: zipped(("aQ.bin", b"x")).replace(b"aQ.bin", b"a\0.bin"), "a control character"),
    # collisions
    "tar-twice": (lambda: tar(entry("a", b"x"), entry("a", b"y")), "'a': its name collides with 'a'"),
    "tar-case": (lambda: tar(entry("Data/a", b"x"), entry("data/b", b"y")), "'data/b': its name collides with 'Data'"),
    "tar-sharp-s": (lambda: tar(entry("straße", b"x"), entry("STRASSE", b"y")), "collides with 'straße'"),
    "tar-accents": (lambda: tar(entry("\u00e9", b"x"), entry("e\u0301", b"y")), "collides with"),
    "tar-file-as-folder": (lambda: tar(entry("a", b"x"), entry("a/b", b"y")), "'a/b': its name collides with 'a'"),
    "tar-folder-as-file": (lambda: tar(entry("a/b", b"x"), entry("a", b"y")), "'a': its name collides with 'a'"),
    "zip-case": (lambda: zipped(("A", b"x"), ("a", b"y")), "collides with 'A'"),
    # kinds
    "tar-symlink": (lambda: tar(entry("a", **LINK)), "'a' is no plain file but a link"),
    "tar-link-then-write": (lambda: tar(entry("a", **LINK | {"linkname": ".."}), entry("a/b", b"x")), "but a link"),
    "tar-hardlink": (lambda: tar(entry("a", type=tarfile.LNKTYPE, linkname="/etc/passwd")), "but a link"),
    "tar-fifo": (lambda: tar(entry("a", type=tarfile.FIFOTYPE)), "but a device, pipe"),
    "tar-device": (lambda: tar(entry("a", type=tarfile.CHRTYPE, devmajor=1, devminor=5)), "but a device"),
    "tar-unknown-kind": (lambda: tar(entry("a", b"x", type=b"Z")), "unknown entry"),
    "tar-sparse": (sparse, "sparse"),
    "zip-symlink": (lambda: zipped((zip_info("a", stat.S_IFLNK | 0o777), b"/etc")), "but a link"),
    "zip-fifo": (lambda: zipped((zip_info("a", stat.S_IFIFO), b"")), "device or pipe"),
    # sizes; Python 3.12's tarfile refuses the first three in words of its own
    "tar-negative-size": (
        lambda: header(b"a", b"\xff" * 11 + b"\0") + bytes(1024), "'a' has a negative size|invalid offset",
    ),
    "tar-negative-unknown": (
        lambda: header(b"a", OCTAL) + bytes(512) + header(b"b", BACK, b"Z"), "'b' has a negative|cut off at byte 1536",
    ),
    "tar-negative-header": (lambda: header(b"a", BACK, b"x") + bytes(1024), "found one of -1024|invalid offset"),
    "tar-beyond-its-end": (lambda: header(b"a", b"00000010000\0") + bytes(512), "ends after 512 of 4096 bytes"),
    "tar-huge-size": (lambda: header(b"a", b"\x80" + b"\xff" * 11) + bytes(1024), "more than limit_bytes=8388608"),
    "tar-huge-header": (
        lambda: gzip.compress(header(b"a", b"00200000000\0", b"x") + ZEROS * 32, 1), "headers of at most 16384"),
    "tar-headers-in-headers": (many_headers, "damaged .*recursion|headers included"),
    "tar-bomb": (lambda: tar(*(entry(f"{i}", ZEROS) for i in range(9))), "'8': with its 1048576 bytes .* limit_bytes"),
    "tar-gz-bomb-after-the-end": (lambda: gzip.compress(plain_tar() + ZEROS * 32, 1), "headers included"),
    "zip-bomb": (lambda: zipped(*((f"{i}", ZEROS) for i in range(9))), "'8': .* more than limit_bytes=8388608"),
    "zip-lies": (lambda: lying_zip(1000), "'a': it unpacks to more than the 10 bytes it declares"),
    "zip-lies-twice": (lambda: lying_zip(10), "'a': the archive is damaged .*CRC"),
    "zip-overlap": (overlapping_zip, "overlaps the one before it|Overlapped entries"),  # newer zipfiles see it too
    "tar-too-many": (lambda: tar(*(entry(f"{i}") for i in range(101))), "more than limit_files=100"),
    "tar-too-deep": (lambda: tar(*(entry(f"{i}/" * 60) for i in range(2))), "more than limit_files=100"),
    "zip-too-many": (lambda: zipped(*((f"{i}", b"") for i in range(101))), "more than limit_files=100"),
    "zip-directory-too-long": (lambda: zipped(*(("n" * 200 + f"{i}", b"") for i in range(2000))), "Raise limit_files"),
    # damage
    "nothing": (lambda: b"", "expected a tar archive"),
    "noise": (lambda: b"not an archive at all " * 100, "expected a tar archive .* found 6e 6f 74"),
    "gz-of-an-idx-file": (lambda: gzip.compress(b"\0\0\x08\x03" + bytes(1000)), "expected a tar archive"),
    "no-files": (lambda: tar(entry("a", type=tarfile.DIRTYPE)), "expected files, found none"),
    "tar-cut-in-data": (lambda: plain_tar()[:5000], "ends after .* of 25600 bytes"),
    "tar-cut-in-header": (lambda: plain_tar()[: 512 + 25600 + 100], "damaged or cut off"),
    "tar-cut-before-end": (lambda: plain_tar()[: 512 + 25600], "damaged or cut off"),
    "tar-bad-header": (lambda: plain_tar().replace(b"set/deep", b"set/dEEp"), "damaged or cut off"),
    "tar-tail": (lambda: plain_tar() + plain_tar(), "more after the archive's end mark"),
    "gz-cut": (lambda: gzip.compress(plain_tar())[:-40], "damaged"),
    "gz-crc": (lambda: gzip.compress(plain_tar())[:-8] + bytes(8), "damaged .*CRC"),
    "bz2-cut": (lambda: bz2.compress(plain_tar())[:-10], "damaged"),
    "xz-cut": (lambda: lzma.compress(plain_tar())[:-40], "damaged"),
    "xz-memory": (greedy_xz, "damaged .*Memory usage limit"),
    "zip-cut": (lambda: plain_zip()[:-30], "damaged"),
    "zip-crc": (lambda: patched(plain_zip(), (b"PK\x03\x04", 14, bytes(4)), (CENTRAL, 16, b"\1\1\1\1")), "damaged"),
    "zip-other-name": (lambda: plain_zip().replace(b"set/a.bin", b"set/c.bin", 1), "damaged .*differ"),
    "zip-encrypted": (lambda: patched(plain_zip(), (LOCAL, 6, b"\1"), (CENTRAL, 8, b"\1")), "is encrypted"),
    "zip-bz2": (lambda: zipped(("a", ZEROS), method=zipfile.ZIP_BZIP2), "another method than deflate"),
}  # fmt: skip


def listing(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("kind", HOSTILE)
def test_refused(tmp_path: Path, kind: str) -> None:
    make, match = HOSTILE[kind]
    archive = tmp_path / "home" / "archive"
    archive.parent.mkdir()
    archive.write_bytes(make())
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"archive: ") as caught:
            unpack(archive, archive.parent / "out", limit_bytes=8 << 20, limit_files=100)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    named, said = str(caught.value)[: len(f"{archive}: ")], str(caught.value)[len(f"{archive}: ") :]
    assert named == f"{archive}: "
    assert re.search(match, said), said  # not in the path, which has the test's name in it
    assert "Nothing was unpacked. Get the archive again" in str(caught.value)
    assert listing(tmp_path) == ["home", "home/archive"]
    assert (
        peak < 16 << 20
    )  # 8 MiB of them the window of a plain xz; naively read, several need 32 MiB, one 4 GiB


@pytest.mark.parametrize(
    "make", [plain_tar, plain_zip, lambda: gzip.compress(plain_tar())], ids=["tar", "zip", "gz"]
)
def test_random_damage_is_refused_or_harmless(tmp_path: Path, make) -> None:
    data, draw, refused = make(), random.Random(0), 0
    for i in range(100):
        out = bytearray(data)
        for _ in range(draw.choice((1, 4))):
            out[draw.randrange(len(out))] = draw.randrange(256)
        (tmp_path / "a").write_bytes(out[: draw.choice((len(out), draw.randrange(len(out))))])
        try:
            unpack(tmp_path / "a", tmp_path / "all" / f"{i}", limit_bytes=8 << 20, limit_files=100)
        except ValueError:
            refused += 1
        assert os.listdir(tmp_path) in (["a", "all"], ["all", "a"])
    assert refused >= 50  # every cut one, and what was hit in a header or under a checksum
    assert len(os.listdir(tmp_path / "all")) == 100 - refused


@pytest.mark.parametrize(
    "pack", [bytes, gzip.compress, bz2.compress, lzma.compress], ids=["tar", "gz", "bz2", "xz"]
)
@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_plain_tars_unpack(tmp_path: Path, pack, format: int) -> None:
    long = "folder/" * 20 + "é" * 40  # 220 bytes: over the 100 of a bare header
    files = FILES | ({} if format == tarfile.USTAR_FORMAT else {long: b"long"})
    folders = [
        entry("./", type=tarfile.DIRTYPE),
        entry("set", type=tarfile.DIRTYPE),
        entry("set", type=tarfile.DIRTYPE),
    ]
    (tmp_path / "a").write_bytes(
        pack(tar(*folders, *(entry(*each) for each in files.items()), format=format))
    )
    folder = unpack(tmp_path / "a", tmp_path / "new" / "out")
    assert {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    } == files
    assert listing(tmp_path / "new")[0] == "out"


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_plain_zips_unpack(tmp_path: Path, method: int) -> None:
    (tmp_path / "a").write_bytes(zipped(("set/", b""), *FILES.items(), method=method))
    folder = unpack(tmp_path / "a", tmp_path / "out")
    assert {
        str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    } == FILES


def test_modes_and_owners_stay_behind(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(tar(entry("tool", b"x", mode=0o6777, uid=12345, gid=12345)))
    found = (unpack(tmp_path / "a", tmp_path / "out") / "tool").stat()
    assert (found.st_uid, found.st_gid) == (os.getuid(), os.getgid())
    assert found.st_mode & 0o7111 == 0


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(plain_tar())
    (tmp_path / "out").mkdir()
    with pytest.raises(FileExistsError, match="expected a new folder"):
        unpack(tmp_path / "a", tmp_path / "out")
    assert listing(tmp_path) == ["a", "out"]


def test_limits_hold_to_the_byte_and_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(plain_tar())
    size = sum(map(len, FILES.values()))
    unpack(
        tmp_path / "a", tmp_path / "enough", limit_bytes=size, limit_files=5
    )  # 3 files, 2 implied folders
    with pytest.raises(ValueError, match=f"limit_bytes={size - 1}"):
        unpack(tmp_path / "a", tmp_path / "out", limit_bytes=size - 1)
    with pytest.raises(ValueError, match="limit_files=4"):
        unpack(tmp_path / "a", tmp_path / "out", limit_files=4)
    assert not (tmp_path / "out").exists()


# The modules alone, without the package around them, which would load torch for seconds.
ALONE = """
import sys, types
for name in ("halfstep", "halfstep.data"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [name.replace(".", "/")]
from halfstep.data.download.archive import unpack
unpack(*sys.argv[1:])
"""


def child(
    archive: Path, folder: Path, before: Callable[[], None] | None = None
) -> subprocess.Popen:
    command, root = [sys.executable, "-c", ALONE, archive, folder], Path(__file__).parents[2]
    return subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, text=True, preexec_fn=before)


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """The kernel's own refusal to write on: a limit on the file size stands in for a disk that is full."""
    (tmp_path / "a").write_bytes(plain_tar())
    process = child(
        tmp_path / "a",
        tmp_path / "out",
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000)),
    )
    error = process.communicate()[1]
    assert "OSError: [Errno 27] File too large" in error
    assert listing(tmp_path) == ["a"]


def test_a_killed_process_leaves_no_folder_and_the_next_one_succeeds(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(tar(entry("big", bytes(200 << 20))), 1))
    process = child(tmp_path / "a", tmp_path / "out")
    while not (parts := [p for p in tmp_path.glob(".out.*.part/big") if p.stat().st_size]):
        assert process.poll() is None, process.communicate()
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out").exists()
    left = parts[0].parent
    (tmp_path / "a").write_bytes(plain_tar())
    unpack(tmp_path / "a", tmp_path / "out")
    assert left.exists()  # it may be another process's work
    os.utime(left, (0, 0))
    unpack(tmp_path / "a", tmp_path / "out2")
    os.rename(tmp_path / "out", tmp_path / "out3")
    unpack(tmp_path / "a", tmp_path / "out")
    assert not left.exists()  # a day later it is not
