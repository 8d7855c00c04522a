"""The members of a tar or zip archive from a stranger, in order, with every lie about sizes and kinds refused.

A tar is read from a stream that only moves forward, so a size that runs backwards is met where it stands. tarfile's
data filter is not enough: it lets links, duplicates and cut-off archives pass, and counts nothing.
"""

import bz2
import gzip
import io
import lzma
import stat
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

CHUNK = (
    1 << 14
)  # also the longest tar header: tarfile searches one in quadratic time, and holds it in memory
_XZ_BYTES = 256 << 20  # decoder memory; xz -9 needs 65 MiB, a hostile header may ask for 4 GiB


class Refused(Exception):
    """Why a member or an archive is not taken, in words."""


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class Member:
    """One file or folder; `size` is what the archive declares, `read` gives what is there."""

    name: str
    is_folder: bool
    size: int
    read: Callable[[int], bytes]


def members(file: "Bounded", limit_bytes: int, limit_files: int) -> Iterator[Member]:
    """Told by content: tar (plain, gz, bz2, xz) or zip (stored, deflated)."""
    start = file.read(6)
    file.seek(0)
    if start.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        return _zip_members(file)
    # headers and padding come on top of the content: 4 KiB a member, and 1 MiB for the archive's own padding
    stream = _Forward(_decoded(file, start), limit_bytes + 4096 * limit_files + (1 << 20))
    return _tar_members(stream, start)


def _decoded(file: IO[bytes], start: bytes) -> _Readable:
    if start.startswith(b"\x1f\x8b"):
        return gzip.GzipFile(fileobj=file)
    if start.startswith(b"BZh"):
        return bz2.BZ2File(file)
    return _Xz(file) if start == b"\xfd7zXZ\0" else file


def _tar_members(stream: "_Forward", start: bytes) -> Iterator[Member]:
    try:
        tar: Any = tarfile.TarFile(fileobj=stream, encoding="utf-8")  # type: ignore[arg-type]
    except tarfile.ReadError as error:
        raise Refused(
            f"expected a tar archive (plain, gz, bz2, xz) or a zip, found {start.hex(' ')} ({error})"
        ) from error
    while (member := tar.next()) is not None:
        tar.members = []  # tarfile would keep every header
        if member.size < 0:
            raise Refused(f"member {member.name!r} has a negative size")
        if not (member.isreg() or member.isdir()) or member.issparse():
            kind = "link" if member.issym() or member.islnk() else "device, pipe, sparse or unknown"
            raise Refused(
                f"member {member.name!r} is no plain file but a {kind} entry (type {member.type!r})"
            )
        yield Member(member.name, member.isdir(), member.size, _Part(stream, member.size).read)
    if stream.last != bytes(tarfile.BLOCKSIZE):  # tarfile takes a broken header for the end
        raise Refused(f"the archive is damaged or cut off at byte {stream.tell()} of its tar")
    while rest := stream.read(CHUNK):  # to the end, where gzip and xz keep their checksums
        if rest.strip(b"\0"):
            raise Refused("there is more after the archive's end mark")


def _zip_members(file: "Bounded") -> Iterator[Member]:
    with zipfile.ZipFile(file) as archive:
        end = 0
        for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
            kind = stat.S_IFMT(info.external_attr >> 16)
            if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
                raise Refused(
                    f"member {info.filename!r} is no plain file but a link, device or pipe"
                )
            if info.flag_bits & 0x41 or info.compress_type not in (
                zipfile.ZIP_STORED,
                zipfile.ZIP_DEFLATED,
            ):
                raise Refused(
                    f"member {info.filename!r} is encrypted or packed by another method than deflate"
                )
            if info.header_offset < end:
                raise Refused(f"member {info.filename!r} overlaps the one before it")
            end = info.header_offset + zipfile.sizeFileHeader + info.compress_size  # type: ignore[attr-defined]
            size, info.file_size = (
                info.file_size,
                1 << 62,
            )  # zipfile would cut the data at the declared size
            with archive.open(info) as content:
                yield Member(info.orig_filename, info.is_dir(), size, content.read)


class _Forward:
    """What tarfile reads from: moves on, never back, and no further than `limit`; remembers the last block."""

    def __init__(self, source: _Readable, limit: int) -> None:
        self.source, self.limit, self.position, self.last = source, limit, 0, b""

    def tell(self) -> int:
        return self.position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= CHUNK:
            raise Refused(f"expected headers of at most {CHUNK} bytes, found one of {size}")
        self.last = self.source.read(size)
        self.position += len(self.last)
        if self.position > self.limit:
            raise Refused(f"the archive unpacks to more than {self.limit} bytes, headers included")
        return self.last

    def seek(self, position: int) -> None:
        if position < self.position:
            raise Refused("a member of negative size leads backwards")
        while self.position < position and self.read(min(CHUNK, position - self.position)):
            pass


class _Part:
    """The next `left` bytes of a stream."""

    def __init__(self, stream: _Readable, left: int) -> None:
        self.stream, self.left = stream, left

    def read(self, size: int) -> bytes:
        data = self.stream.read(min(size, self.left))
        self.left -= len(data)
        return data


class _Xz:
    """One xz stream, decoded within _XZ_BYTES of memory; lzma.open takes no such limit."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.decoder = file, lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_BYTES)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and not self.decoder.eof:
            packed = self.file.read(CHUNK) if self.decoder.needs_input else b""
            if self.decoder.needs_input and not packed:
                raise EOFError("the xz stream is cut off")
            data += self.decoder.decompress(packed, size - len(data))
        return data


class Bounded(io.BufferedReader):
    """A file that gives no more at once than the directory of a zip of `files` members: zipfile holds it whole."""

    def __init__(self, path: Path, files: int) -> None:
        super().__init__(io.FileIO(path))
        self.most = 128 * files + (1 << 18)

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(self.most + 1 if size is None or not 0 <= size <= self.most else size)
        if len(data) > self.most:
            raise Refused(
                f"expected a zip directory of at most {self.most} bytes. Raise limit_files if that is too few"
            )
        return data
