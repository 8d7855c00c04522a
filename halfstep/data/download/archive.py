"""Unpacks archives from strangers: plain files inside one new folder, all of them or nothing.

Two passes. The scan reads the archive to its end, writes nothing, and refuses whatever is not a
plain file or folder inside the folder, within the limits, and undamaged. Then the standard library
extracts it: tarfile with filter="data" (where Python has it: from 3.11.4 on), or zipfile.

The scan is our own because the libraries accept too much: tarfile's filter lets links, duplicate
names and cut-off archives pass and counts nothing, and zipfile cuts a member off at the size that
it declares.
"""

import bz2
import copy
import errno
import gzip
import io
import lzma
import os
import re
import stat
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

from halfstep.utils.atomic_files import atomic_folder, sync_tree

# What is read at once. Also the longest tar header: tarfile searches a header in quadratic time,
# and holds it in memory.
CHUNK_BYTES = 1 << 14

# A second line of defence behind our own scan. Python before 3.11.4 does not know it.
TAR_FILTER: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}

XZ_DECODER_BYTES = 256 << 20  # xz -9 needs 65 MiB; a hostile header may ask for 4 GiB
MAX_NAME_BYTES = 255  # of one part of a path: the limit of file systems
MAX_PATH_BYTES = 1024  # more than any data set needs
TAR_OVERHEAD_PER_MEMBER = 4096  # bytes of headers and padding
TAR_OVERHEAD = 1 << 20  # bytes of padding at the end of a tar
ZIP_SIGNATURES = (b"PK\x03\x04", b"PK\x05\x06")
ZIP_ENCRYPTED_FLAGS = 0x41
ADVICE = (
    "Nothing was unpacked. Get the archive again from its publisher, "
    "or pass a folder of plain files."
)


class ArchiveRefused(Exception):
    """Why a member or an archive is refused; unpack() turns it into a ValueError."""


def unpack(
    archive: str | Path,
    folder: str | Path,
    *,
    limit_bytes: int = 4 << 30,
    limit_files: int = 100_000,
) -> Path:
    """Unpacks an archive into a new folder, and returns the folder.

    tar (plain, gz, bz2, xz) and zip (stored, deflated), recognised by content. Anything but plain
    files and folders is a ValueError, and nothing of the archive is left on the disk. The limits
    are on what is written. Owners, modes and times are not taken over. A killed process leaves
    nothing under the name `folder`.
    """
    archive = Path(archive)
    folder = Path(folder)
    if os.path.lexists(folder):
        raise FileExistsError(
            errno.EEXIST, "expected a new folder to unpack into, this one is there", str(folder)
        )
    try:
        # The folder before the scan: a place that cannot be written to is an error at once.
        with (
            _naming(str(archive)),
            BoundedFile(archive, limit_files) as file,
            atomic_folder(folder) as temporary,
        ):
            inventory = Inventory(limit_bytes, limit_files)
            signature = file.read(6)
            if signature.startswith(ZIP_SIGNATURES):
                with zipfile.ZipFile(file) as opened_zip:
                    _scan_zip(opened_zip, inventory)
                    for info in opened_zip.infolist():
                        opened_zip.extract(info, temporary)
            else:
                max_tar_bytes = limit_bytes + TAR_OVERHEAD_PER_MEMBER * limit_files + TAR_OVERHEAD
                _scan_tar(TarStream(file, signature, max_tar_bytes), inventory)
                _extract_tar(TarStream(file, signature, max_tar_bytes), temporary)
            sync_tree(temporary)
    except ArchiveRefused as refused:
        raise ValueError(f"{refused}. {ADVICE}") from refused
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR) and os.path.lexists(folder):
            raise FileExistsError(
                errno.EEXIST, "another process was quicker to unpack", str(folder)
            ) from error
        raise
    return folder


@contextmanager
def _naming(location: str) -> Iterator[None]:
    """Turns every fault of the archive into an ArchiveRefused that begins with its location.

    Errors of this machine's disk and memory pass as they are.
    """
    try:
        yield
    except ArchiveRefused as refused:
        raise ArchiveRefused(f"{location}: {refused}") from refused
    except MemoryError:
        raise
    except Exception as error:  # parsers of hostile bytes raise almost anything
        if isinstance(error, OSError) and error.errno is not None:
            raise
        reason = str(error) or type(error).__name__
        raise ArchiveRefused(f"{location}: the archive is damaged ({reason})") from error


# tar


def _open_tar(stream: "TarStream") -> Any:
    try:
        return tarfile.TarFile(fileobj=stream, encoding="utf-8")  # type: ignore[arg-type]
    except tarfile.ReadError as error:
        raise ArchiveRefused(
            "expected a tar archive (plain, gz, bz2, xz) or a zip, "
            f"found {stream.signature.hex(' ')} ({error})"
        ) from error


def _tar_members(tar: Any) -> Iterator[Any]:
    """The headers of a tar archive in order, as TarInfo."""
    member = tar.next()
    while member is not None:
        tar.members = []  # tarfile would keep every header in memory
        yield member
        member = tar.next()


def _scan_tar(stream: "TarStream", inventory: "Inventory") -> None:
    for member in _tar_members(_open_tar(stream)):
        if member.size < 0:
            raise ArchiveRefused(f"member {member.name!r} has a negative size")
        if not (member.isreg() or member.isdir()) or member.issparse():
            is_link = member.issym() or member.islnk()
            kind = "link" if is_link else "device, pipe, sparse or unknown"
            raise ArchiveRefused(
                f"member {member.name!r} is no plain file but a {kind} entry (type {member.type!r})"
            )
        with _naming(f"member {member.name!r}"):
            inventory.add_name(member.name, is_folder=member.isdir())
            if not member.isdir():
                inventory.add_bytes(member.size)
                start = stream.tell()
                stream.seek(start + member.size)
                _check_size(stream.tell() - start, member.size)

    # tarfile takes a broken header for the end of the archive; its true end is a block of zeros.
    if stream.last_read != bytes(tarfile.BLOCKSIZE):
        raise ArchiveRefused(
            f"the archive is damaged or cut off at byte {stream.tell()} of its tar"
        )
    # Read on to the end, where gzip and xz keep their checksums.
    padding = stream.read(CHUNK_BYTES)
    while padding:
        if padding.strip(b"\0"):
            raise ArchiveRefused("there is more after the archive's end mark")
        padding = stream.read(CHUNK_BYTES)
    inventory.check_has_files()


def _extract_tar(stream: "TarStream", folder: Path) -> None:
    tar = _open_tar(stream)
    for member in _tar_members(tar):
        member.name = "/".join(_split_name(member.name)) or "."
        tar.extract(member, folder, set_attrs=False, **TAR_FILTER)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


class TarStream:
    """The bytes of a tar file, unpacked, for tarfile to read.

    It moves forward only, so a member of negative size is noticed. It refuses long headers and more
    than `limit` bytes in all, and remembers what was read last.
    """

    def __init__(self, file: IO[bytes], signature: bytes, limit: int) -> None:
        file.seek(0)
        self.source: _Readable = file
        if signature.startswith(b"\x1f\x8b"):
            self.source = gzip.GzipFile(fileobj=file)
        elif signature.startswith(b"BZh"):
            self.source = bz2.BZ2File(file)
        elif signature == b"\xfd7zXZ\0":
            self.source = XzReader(file)
        self.signature = signature
        self.limit = limit
        self.position = 0
        self.last_read = b""

    def tell(self) -> int:
        return self.position

    def read(self, size: int) -> bytes:
        if not 0 <= size <= CHUNK_BYTES:
            raise ArchiveRefused(
                f"expected headers of at most {CHUNK_BYTES} bytes, found one of {size}"
            )
        self.last_read = self.source.read(size)
        self.position += len(self.last_read)
        if self.position > self.limit:
            raise ArchiveRefused(
                f"the archive unpacks to more than {self.limit} bytes, headers included"
            )
        return self.last_read

    def seek(self, position: int) -> None:
        """Reads on to a position, or to the end of the file."""
        if position < self.position:
            raise ArchiveRefused("a member of negative size leads backwards")
        while self.position < position:
            if not self.read(min(CHUNK_BYTES, position - self.position)):
                return


class XzReader:
    """One xz stream, decoded in bounded memory; lzma.open takes no such limit."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.decoder = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=XZ_DECODER_BYTES)

    def read(self, size: int) -> bytes:
        data = b""
        while len(data) < size and not self.decoder.eof:
            packed = b""
            if self.decoder.needs_input:
                packed = self.file.read(CHUNK_BYTES)
                if not packed:
                    raise EOFError("the xz stream is cut off")
            data += self.decoder.decompress(packed, size - len(data))
        return data


# zip


def _scan_zip(archive: zipfile.ZipFile, inventory: "Inventory") -> None:
    end_of_previous = 0
    for info in sorted(archive.infolist(), key=lambda info: info.header_offset):
        name = info.orig_filename
        file_type = stat.S_IFMT(info.external_attr >> 16)
        if file_type not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise ArchiveRefused(f"member {name!r} is no plain file but a link, device or pipe")
        is_encrypted = bool(info.flag_bits & ZIP_ENCRYPTED_FLAGS)
        if is_encrypted or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ArchiveRefused(
                f"member {name!r} is encrypted or packed by another method than deflate"
            )
        # Members that share their content would unpack to petabytes from megabytes.
        if info.header_offset < end_of_previous:
            raise ArchiveRefused(f"member {name!r} overlaps the one before it")
        header_size = zipfile.sizeFileHeader  # type: ignore[attr-defined]
        end_of_previous = info.header_offset + header_size + info.compress_size

        # zipfile cuts the content off at the size that is declared. A larger size in a copy of the
        # entry shows all that is there; at its end, zipfile checks the CRC.
        uncut = copy.copy(info)
        uncut.file_size = 1 << 62
        with archive.open(uncut) as content, _naming(f"member {name!r}"):
            inventory.add_name(name, is_folder=info.is_dir())
            if not info.is_dir():
                inventory.add_bytes(info.file_size)
                size = 0
                chunk = content.read(CHUNK_BYTES)
                while chunk and size <= info.file_size:
                    size += len(chunk)
                    chunk = content.read(CHUNK_BYTES)
                _check_size(size, info.file_size)
    inventory.check_has_files()


class BoundedFile(io.BufferedReader):
    """A file that gives a limited number of bytes at once.

    zipfile holds the directory of a zip in memory: the limit is what `limit_files` members need.
    """

    def __init__(self, path: Path, limit_files: int) -> None:
        super().__init__(io.FileIO(path))
        self.max_bytes = 128 * limit_files + (1 << 18)

    def read(self, size: int | None = -1, /) -> bytes:
        if size is None or not 0 <= size <= self.max_bytes:
            size = self.max_bytes + 1
        data = super().read(size)
        if len(data) > self.max_bytes:
            raise ArchiveRefused(
                f"expected a zip directory of at most {self.max_bytes} bytes. "
                "Raise limit_files if that is too few"
            )
        return data


# names and sizes


class Inventory:
    """The names and bytes of an archive so far, checked against the limits and each other."""

    def __init__(self, limit_bytes: int, limit_files: int) -> None:
        self.limit_bytes = limit_bytes
        self.limit_files = limit_files
        self.total_bytes = 0
        self.member_count = 0
        # Path and whether it is a file, folders that a path implies included. The key is how a file
        # system that ignores case and composes accents sees the path.
        self.paths: dict[str, tuple[str, bool]] = {}

    def add_name(self, name: str, *, is_folder: bool) -> None:
        """Refuses a name that leaves the folder, or that another member has."""
        parts = _split_name(name)
        if not parts and not is_folder:
            raise ArchiveRefused("a file without a name")
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            is_file = depth == len(parts) and not is_folder
            key = unicodedata.normalize("NFC", path).casefold()
            is_taken = key in self.paths
            known_path, known_is_file = self.paths.setdefault(key, (path, is_file))
            same_folder = not is_file and not known_is_file and known_path == path
            if is_taken and not same_folder:
                raise ArchiveRefused(f"its name collides with {known_path!r}")
        self.member_count += 1
        if max(self.member_count, len(self.paths)) > self.limit_files:
            raise ArchiveRefused(
                f"there are more than limit_files={self.limit_files} files and folders"
            )

    def add_bytes(self, size: int) -> None:
        """Refuses a file that does not fit what is left of the limit."""
        self.total_bytes += size
        if self.total_bytes > self.limit_bytes:
            raise ArchiveRefused(
                f"with its {size} bytes there are more than limit_bytes={self.limit_bytes}"
            )

    def check_has_files(self) -> None:
        if not any(is_file for _, is_file in self.paths.values()):
            raise ArchiveRefused("expected files, found none")


def _check_size(size: int, declared_size: int) -> None:
    if size > declared_size:
        raise ArchiveRefused(f"it unpacks to more than the {declared_size} bytes it declares")
    if size < declared_size:
        raise ArchiveRefused(f"it ends after {size} of {declared_size} bytes")


def _split_name(name: str) -> list[str]:
    """The parts of a member's path; refused unless it is a plain relative path."""
    if name.startswith("/"):
        raise ArchiveRefused("its name is absolute")
    has_drive = re.match("[A-Za-z]:", name) is not None
    has_control = any(unicodedata.category(letter) in ("Cc", "Cs") for letter in name)
    if "\\" in name or has_drive or has_control:
        raise ArchiveRefused(
            "its name has a backslash, a drive letter, a control character or bytes that are "
            "not UTF-8"
        )
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise ArchiveRefused("its name leads out of the folder")
    is_long = len(name.encode()) > MAX_PATH_BYTES
    if is_long or any(len(part.encode()) > MAX_NAME_BYTES for part in parts):
        raise ArchiveRefused(
            f"its name is longer than {MAX_PATH_BYTES} bytes, or {MAX_NAME_BYTES} in one part"
        )
    return parts
