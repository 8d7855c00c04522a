"""Unpack archives from strangers: plain files inside one folder, all of them or nothing."""

import errno
import os
import re
import shutil
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from halfstep.data.download.archive import CHUNK, Bounded, Member, Refused, members
from halfstep.data.download.fetch import unfinished

_NAME_BYTES, _PATH_BYTES = 255, 1024  # what file systems take, and more than a data set needs
_ADVICE = "Nothing was unpacked. Get the archive again from its publisher, or pass a folder of plain files"


def unpack(
    archive: str | Path,
    folder: str | Path,
    *,
    limit_bytes: int = 4 << 30,
    limit_files: int = 100_000,
) -> Path:
    """`folder`, new, with the archive's files; a ValueError and no trace for anything but plain files and folders.

    tar (plain, gz, bz2, xz) and zip (stored, deflated), told by content. Owners, modes and times are not taken over.
    The limits are on what is written; a killed process leaves nothing under the name `folder`.
    """
    archive, folder = Path(archive), Path(folder)
    if os.path.lexists(folder):
        raise FileExistsError(
            errno.EEXIST, "expected a new folder to unpack into, this one is there", str(folder)
        )
    part = unfinished(folder)
    try:
        with _placed(str(archive)), Bounded(archive, limit_files) as file:
            part.mkdir(parents=True)
            _write(members(file, limit_bytes, limit_files), part, limit_bytes, limit_files)
        part.rename(folder)
    except Refused as refused:
        raise ValueError(f"{refused}. {_ADVICE}.") from refused
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR) and os.path.lexists(folder):
            raise FileExistsError(
                errno.EEXIST, "another process was quicker to unpack", str(folder)
            ) from error
        raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


@contextmanager
def _placed(where: str) -> Iterator[None]:
    """Anything wrong with the archive as Refused, with its place; what the disk says stays as it is."""
    try:
        yield
    except Refused as refused:
        raise Refused(f"{where}: {refused}") from refused
    except Exception as error:  # parsers of hostile bytes raise almost anything
        if isinstance(error, MemoryError) or (
            isinstance(error, OSError) and error.errno is not None
        ):
            raise
        raise Refused(
            f"{where}: the archive is damaged ({error or type(error).__name__})"
        ) from error


def _write(members: Iterable[Member], part: Path, limit_bytes: int, limit_files: int) -> None:
    names, written = _Names(limit_files), 0
    for member in members:
        with _placed(f"member {member.name!r}"):
            path = part.joinpath(*names.claim(member.name, is_folder=member.is_folder))
            (path if member.is_folder else path.parent).mkdir(parents=True, exist_ok=True)
            if not member.is_folder:
                written += _copy(member, path, limit_bytes - written, limit_bytes)
    if not any(is_file for _, is_file in names.taken.values()):
        raise Refused("expected files, found none")


def _copy(member: Member, path: Path, room: int, limit_bytes: int) -> int:
    size = 0
    if member.size > room:
        raise Refused(f"with its {member.size} bytes there are more than limit_bytes={limit_bytes}")
    with open(path, "xb") as file:  # x: follows no link and replaces nothing
        while chunk := member.read(CHUNK):
            size += len(chunk)
            if size > member.size:
                raise Refused(f"it unpacks to more than the {member.size} bytes it declares")
            file.write(chunk)
    if size != member.size:
        raise Refused(f"it ends after {size} of {member.size} bytes")
    return size


@dataclass
class _Names:
    """The names so far, implied folders included, keyed as careless file systems do: without case, accents composed."""

    limit: int
    taken: dict[str, tuple[str, bool]] = field(default_factory=dict)
    count: int = 0

    def claim(self, name: str, *, is_folder: bool) -> list[str]:
        """The name's parts, when it stays inside the folder and nothing else is called so."""
        parts = _parts(name)
        if not parts and not is_folder:
            raise Refused("a file without a name")
        self.count += 1
        for i in range(1, len(parts) + 1):
            path, is_file = "/".join(parts[:i]), i == len(parts) and not is_folder
            key = unicodedata.normalize("NFC", path).casefold()
            if (is_file and key in self.taken) or self.taken.setdefault(key, (path, is_file)) != (
                path,
                is_file,
            ):
                raise Refused(f"its name collides with {self.taken[key][0]!r}")
        if max(self.count, len(self.taken)) > self.limit:
            raise Refused(f"there are more than limit_files={self.limit} files and folders")
        return parts


def _parts(name: str) -> list[str]:
    if name.startswith("/"):
        raise Refused("its name is absolute")
    if (
        "\\" in name
        or re.match("[A-Za-z]:", name)
        or any(unicodedata.category(c) in ("Cc", "Cs") for c in name)
    ):
        raise Refused(
            "its name has a backslash, a drive letter, a control character or bytes that are not UTF-8"
        )
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise Refused("its name leads out of the folder")
    if len(name.encode()) > _PATH_BYTES or any(len(part.encode()) > _NAME_BYTES for part in parts):
        raise Refused(f"its name is longer than {_PATH_BYTES} bytes, or {_NAME_BYTES} in one part")
    return parts
