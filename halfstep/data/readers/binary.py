"""Checked reading of binary files, plain or gzip: in order, in bounded memory.

Every error names the file and the byte.
"""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TypeAlias

from halfstep.utils.text import printable

FETCH_AGAIN = "Fetch the file again or name another one."
PACKED_CHUNK = 1 << 16  # bytes; unpacked fivefold, as images are, they still fit a core's cache
READ_CHUNK = 16 * PACKED_CHUNK  # bytes of content read at once
MAX_DEFLATE_RATIO = 1032  # deflate's best: 258 bytes from 2 bits
GZIP_WBITS = 31  # for zlib: gzip's header and trailer, window of 32 KiB

# What a file that begins so is. For web pages two bytes: one alone may be a wrong label.
FILE_SIGNATURES = (
    (b"\x1f\x8b", "gzip"),
    (b"\xfd7zXZ", "xz"),
    (b"BZh", "bzip2"),
    (b"PK", "zip"),
    (b"<!", "a web page"),
    (b"<?", "a web page"),
    (b"<h", "a web page"),
    (b"<H", "a web page"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"\x80\x05", "a pickle"),
)


@contextmanager
def open_binary(path: Path) -> Iterator[BufferedReader]:
    """The file, open for reading. An OSError, now or while it is read, is raised with its name."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        # Two arguments: Python picks the subclass by the number, so that a missing file stays a
        # FileNotFoundError.
        reason = error.strerror or str(error)
        raise OSError(
            error.errno or 0,
            f"{printable(path)}: expected a file that can be read, found: {reason}. {FETCH_AGAIN}",
        ) from error


def damaged_file_error(
    path: Path, expected: str, actual: str, *, at: str, advice: str = FETCH_AGAIN
) -> ValueError:
    """An error with the file, the position, what was expected there, what was found, and advice."""
    return ValueError(f"{printable(path)}: expected {expected} at {at}, found {actual}. {advice}")


def guess_file_kind(head: bytes) -> str | None:
    """What a file that begins so is, if it is a usual mix-up; a tar needs its first 262 bytes."""
    if head[257:262] == b"ustar":
        return "tar"
    for signature, kind in FILE_SIGNATURES:
        if head.startswith(signature):
            return kind
    return None


def describe_head(head: bytes) -> str:
    """The first four bytes in hex, and the kind of file if they give it away."""
    text = head[:4].hex(" ") or "the end of the file"
    kind = guess_file_kind(head)
    if kind is None:
        return text
    return f"{text} ({kind})"


class PlainContent:
    """A file's bytes in order."""

    unit = "byte"

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.path = path
        self._file = file

    def read(self, count: int) -> bytes:
        """The next bytes, at most `count`; none at the end."""
        return self._file.read(count)

    def max_size(self) -> int | None:
        """None: a plain file is read to find out how much it holds."""
        return None


class GzipContent:
    """The content of a gzip file in order, unpacked while it is read.

    The checksum of each member is verified at its end.
    """

    unit = "unpacked byte"

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.path = path
        self._file = file
        self._decoder = zlib.decompressobj(wbits=GZIP_WBITS)
        self._packed = b""  # read from the file, not yet unpacked
        self._packed_offset = 0  # where `_packed` begins in the file

    def read(self, count: int) -> bytes:
        """The next bytes, at most `count`; none at the end."""
        while True:
            if not self._packed:
                self._packed = self._file.read(PACKED_CHUNK)
            at_end = not self._packed
            if self._decoder.eof:
                if at_end:
                    return b""
                self._start_member()
            data = self._unpack(count)
            if data:
                return data
            if at_end and not self._decoder.eof:
                raise damaged_file_error(
                    self.path,
                    "more of a gzip stream",
                    "the end of the file",
                    at=f"byte {self._packed_offset}",
                )

    def max_size(self) -> int | None:
        """The most bytes a gzip file of this size can hold.

        A file that declares more is known to be cut off before anything is unpacked.
        """
        return MAX_DEFLATE_RATIO * os.fstat(self._file.fileno()).st_size

    def _start_member(self) -> None:
        if not self._packed.startswith(b"\x1f"):
            raise damaged_file_error(
                self.path,
                "another gzip member or the end of the file",
                describe_head(self._packed),
                at=f"byte {self._packed_offset}",
            )
        self._decoder = zlib.decompressobj(wbits=GZIP_WBITS)

    def _unpack(self, count: int) -> bytes:
        decoder_before = self._decoder.copy()
        try:
            data = self._decoder.decompress(self._packed, count)
        except zlib.error as error:
            bad_byte = self._packed_offset + _first_bad_byte(decoder_before, self._packed)
            raise damaged_file_error(
                self.path,
                "a sound gzip stream",
                f"a damaged one ({error})",
                at=f"byte {bad_byte}",
            ) from error
        remaining = self._decoder.unconsumed_tail or self._decoder.unused_data
        self._packed_offset += len(self._packed) - len(remaining)
        self._packed = remaining
        return data


Content: TypeAlias = PlainContent | GzipContent


def open_content(path: Path, file: BufferedReader) -> Content:
    """The file's content, unpacked if it begins as gzip does, whatever its name."""
    if file.peek(2).startswith(b"\x1f\x8b"):
        return GzipContent(path, file)
    return PlainContent(path, file)


def read_up_to(content: Content, count: int) -> bytearray:
    """The next `count` bytes, fewer only at the end of the content.

    Memory grows with the bytes that are there, not with `count`.
    """
    data = bytearray()
    while len(data) < count:
        chunk = content.read(min(count - len(data), READ_CHUNK))
        if not chunk:
            break
        data += chunk
    return data


def _first_bad_byte(decoder: "zlib._Decompress", packed: bytes) -> int:
    """The index of the byte that zlib rejects.

    zlib only says that a chunk is bad, so the chunk is decoded again, byte by byte.
    """
    for index in range(len(packed)):
        try:
            decoder.decompress(packed[index : index + 1])
        except zlib.error:
            return index
    return len(packed)
