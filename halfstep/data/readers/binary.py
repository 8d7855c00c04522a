"""Checked reading of binary files, plain or gzip: in order, in bounded memory, with the byte named where trouble is."""

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import TypeAlias

AGAIN = "Fetch the file again or name another one."
_PIECE = 1 << 16  # unpacked fivefold, as images are, this still fits a core's cache
_DENSEST = 1032  # deflate's best: 258 bytes from 2 bits
_KINDS = (
    (b"\x1f\x8b", "gzip"),
    (b"\xfd7zXZ", "xz"),
    (b"BZh", "bzip2"),
    (b"PK", "zip"),
    *(
        (start, "a web page") for start in (b"<!", b"<?", b"<h", b"<H")
    ),  # one byte alone may be a wrong label
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
    *((bytes([0x80, protocol]), "a pickle") for protocol in range(2, 6)),
)


@contextmanager
def opened(path: Path) -> Iterator[BufferedReader]:
    """The file, open for reading; whatever the system refuses, then or while it is read, names the file."""
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        # two arguments: Python picks the subclass by the number, so a missing file stays a FileNotFoundError
        came = error.strerror or str(error)
        raise OSError(
            error.errno or 0, f"{path}: expected a file that can be read, found: {came}. {AGAIN}"
        ) from error


def damaged(path: Path, expected: str, came: str, *, at: str, advice: str = AGAIN) -> ValueError:
    """The error that names the file, the place, what was expected there, what came and what to do."""
    return ValueError(f"{path}: expected {expected} at {at}, found {came}. {advice}")


def kind(head: bytes) -> str | None:
    """What a file that starts so is, when it is one of the usual mix-ups; the tar signature takes 262 bytes."""
    if head[257:262] == b"ustar":
        return "tar"
    return next((name for start, name in _KINDS if head.startswith(start)), None)


def shown(head: bytes, count: int = 4) -> str:
    """The first bytes in hex, with the kind of file they betray."""
    name = kind(head)
    return (head[:count].hex(" ") or "the end of the file") + (f" ({name})" if name else "")


class Plain:
    """A file's bytes in order."""

    unit = "byte"

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.path, self._file = path, file

    def read(self, count: int) -> bytes:
        """The next bytes, at most `count`; none at the end."""
        return self._file.read(count)

    def room(self) -> int | None:
        """The most bytes the file can hold, where reading to the end to find out would be unwise."""
        return None


class Gzip:
    """A gzip file's content in order, unpacked as it is asked for; each member's checksum is verified at its end."""

    unit = "unpacked byte"

    def __init__(self, path: Path, file: BufferedReader) -> None:
        self.path, self._file = path, file
        self._inflate = zlib.decompressobj(wbits=31)  # 31: gzip's header and trailer, 32 KiB window
        self._packed = b""  # read from the file, not yet used
        self._used = 0  # packed bytes before those

    def read(self, count: int) -> bytes:
        """The next bytes, at most `count`; none at the end."""
        while True:
            last = not self._packed and not self._refill()
            if self._inflate.eof:
                if last:
                    return b""
                self._next_member()
            data = self._unpack(count)
            if data:
                return data
            if last and not self._inflate.eof:
                raise damaged(
                    self.path,
                    "more of a gzip stream",
                    "the end of the file",
                    at=f"byte {self._used}",
                )

    def room(self) -> int | None:
        """The most bytes the file can hold, by its size: more is known to be missing before any is unpacked."""
        return _DENSEST * os.fstat(self._file.fileno()).st_size

    def _refill(self) -> bool:
        self._packed = self._file.read(_PIECE)
        return bool(self._packed)

    def _next_member(self) -> None:
        if not self._packed.startswith(b"\x1f"):
            expected = "another gzip member or the end of the file"
            raise damaged(self.path, expected, shown(self._packed), at=f"byte {self._used}")
        self._inflate = zlib.decompressobj(wbits=31)

    def _unpack(self, count: int) -> bytes:
        before = self._inflate.copy()
        try:
            data = self._inflate.decompress(self._packed, count)
        except zlib.error as error:
            at = f"byte {self._used + _first_bad(before, self._packed)}"
            raise damaged(
                self.path, "a sound gzip stream", f"a damaged one ({error})", at=at
            ) from error
        rest = self._inflate.unconsumed_tail or self._inflate.unused_data
        self._used += len(self._packed) - len(rest)
        self._packed = rest
        return data


Content: TypeAlias = Plain | Gzip


def unpacked(path: Path, file: BufferedReader) -> Content:
    """The file's content, unpacked when it starts as gzip does: the name need not tell."""
    return (Gzip if file.peek(2).startswith(b"\x1f\x8b") else Plain)(path, file)


def take(content: Content, count: int) -> bytearray:
    """The next `count` bytes, fewer only at the end; memory grows with what comes, never with what is asked for."""
    data = bytearray()
    while len(data) < count and (piece := content.read(min(count - len(data), 16 * _PIECE))):
        data += piece
    return data


def _first_bad(inflate: "zlib._Decompress", packed: bytes) -> int:
    """Where zlib first objects: it says only that a piece is bad, so the piece goes in again byte by byte."""
    for at in range(len(packed)):
        try:
            inflate.decompress(packed[at : at + 1])
        except zlib.error:
            return at
    return len(packed)
