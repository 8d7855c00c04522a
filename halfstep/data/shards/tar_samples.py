"""Where the samples of a tar shard lie, and the members of one of them.

A sample is a run of members whose names are equal up to the first dot of the last part: its key.
What follows the dot is the name of the part: `0001.jpg`, `0001.cls`. Nothing is written to a disk,
so that names may be anything; they are keys, and texts of errors.
"""

import io
import re
import tarfile
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

from halfstep.utils.text import printable

MEMBER_NAME = re.compile(r"((?:.*/|)[^./][^.]*)\.([^/]+)", re.DOTALL)
MAX_HEADER_BYTES = 1 << 16  # tarfile holds a long header in memory, and searches it slowly
BLOCK = tarfile.BLOCKSIZE
END_MARK = bytes(BLOCK)
# The first two bytes of packed files.
PACKED_SIGNATURES = {
    b"\x1f\x8b": "gzip",
    b"BZ": "bzip2",
    b"\xfd7": "xz",
    b"PK": "zip",
    b"(\xb5": "zstd",
}
# What a global header may say; anything else would change members far behind it.
HARMLESS_GLOBALS = {"comment", "mtime", "atime", "ctime"}


class SampleRange(NamedTuple):
    """The bytes of one sample in its shard: headers and content of all its members."""

    start: int
    end: int


class ShardBytes(Protocol):
    def read(self, offset: int, size: int) -> bytes:
        """The bytes from `offset` on; fewer only at the end of the shard."""


def scan_samples(shard: ShardBytes, place: object, offset: int = 0) -> Iterator[SampleRange]:
    """The samples from `offset` on, where one of them begins. ValueError for a damaged shard."""
    headers = _Headers(shard, offset)
    key = ""
    start = end = -1
    for member in _members(headers, place):
        parts = _split_name(member)
        if parts is not None:
            if parts[0] != key or start < 0:
                if start >= 0:
                    yield SampleRange(start, end)
                key = parts[0]
                start = member.offset
            end = member.offset_data + -(-member.size // BLOCK) * BLOCK
    if start >= 0:
        yield SampleRange(start, end)


def read_members(content: bytes, place: object) -> tuple[str, dict[str, bytes]]:
    """The key of a sample and its members by the names of their parts, from the bytes it has."""
    key = ""
    members: dict[str, bytes] = {}
    for member in _members(io.BytesIO(content), place, check_end=False):
        parts = _split_name(member)
        if parts is None:
            continue
        if members and parts[0] != key:
            raise ValueError(
                f"{printable(place)}: expected members of {printable(key)!r}, found "
                f"{printable(member.name)!r}. The shard has changed since it was read first"
            )
        key, part = parts
        if part in members:
            raise ValueError(
                f"{printable(place)}: the member {printable(member.name)!r} is there twice. Name "
                "each part of a sample once"
            )
        body = content[member.offset_data : member.offset_data + member.size]
        if len(body) != member.size:
            raise _damaged(place, member.offset_data)
        members[part] = body
    if not members:
        raise _damaged(place, 0)
    return key, members


def _split_name(member: Any) -> tuple[str, str] | None:
    """The key and the part; None for what belongs to no sample: folders, hidden and plain names."""
    if member.isdir():
        return None
    match = MEMBER_NAME.fullmatch(member.name)
    return None if match is None else (match[1], match[2].lower())


def _members(file: Any, place: object, *, check_end: bool = True) -> Iterator[Any]:
    """The headers of the plain files and folders, as TarInfo."""
    try:
        begin = file.tell()
        tar: Any = tarfile.TarFile(fileobj=file, encoding="utf-8", errors="surrogateescape")
        member = tar.next()
        while member is not None:
            tar.members = []  # tarfile would keep every header
            _check_member(tar, member, place)
            yield member
            member = tar.next()
    except tarfile.ReadError as error:
        file.seek(begin)
        signature = file.read(2)
        if signature in PACKED_SIGNATURES:
            kind = PACKED_SIGNATURES[signature]
            raise ValueError(
                f"{printable(place)}: expected a plain tar, found {kind}: a packed shard cannot be "
                "entered in the middle. Unpack it; its images are packed already"
            ) from None
        raise ValueError(f"{printable(place)}: expected a tar shard, found {error}") from error
    except tarfile.TarError as error:
        raise ValueError(f"{printable(place)}: the shard is damaged ({error})") from error
    if check_end:
        # tarfile takes a broken header for the end. The true end is a block of zeros.
        file.seek(tar.offset)
        if file.read(BLOCK) != END_MARK:
            raise _damaged(place, tar.offset)


def _check_member(tar: Any, member: Any, place: object) -> None:
    if set(tar.pax_headers) - HARMLESS_GLOBALS:
        names = ", ".join(sorted(set(tar.pax_headers) - HARMLESS_GLOBALS))
        raise ValueError(
            f"{printable(place)}: expected no global headers, found one for {printable(names)}. "
            "Write the shard anew"
        )
    if not (member.isreg() or member.isdir()) or member.issparse() or member.size < 0:
        raise ValueError(
            f"{printable(place)}: the member {printable(member.name)!r} is refused: it is no plain "
            "file but a link, a device or sparse. Write the shard anew, with files only"
        )


def _damaged(place: object, offset: int) -> ValueError:
    return ValueError(
        f"{printable(place)}: the shard is damaged or cut off at byte {offset:,}. Get it again"
    )


class _Headers:
    """A shard as the file that tarfile reads headers from. It refuses headers without bounds."""

    def __init__(self, shard: ShardBytes, offset: int) -> None:
        self.shard = shard
        self.position = offset

    def tell(self) -> int:
        return self.position

    def seek(self, position: int) -> None:
        self.position = position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= MAX_HEADER_BYTES:
            raise tarfile.HeaderError(f"a header of {size} bytes")
        content = self.shard.read(self.position, size)
        self.position += len(content)
        return content
