"""Which checkpoints are known to be whole, so that a long run does not hash each of them again.

A checkpoint whose checksums were right is remembered with the numbers that the file system keeps
about its files. As soon as a file was written, replaced, cut or copied, they differ, and the
checkpoint is read again. (A program can set a file's mtime back, but not its ctime.) What a disk
loses silently changes no number: for that, `read_again` reads a checkpoint whatever is known.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

from halfstep.checkpoint.health import Health, read_health
from halfstep.checkpoint.store import verify
from halfstep.errors import CheckpointError

# A file that changed this recently may change again without a new time: file systems keep times in
# ticks of up to 10 ms.
RECENT_CHANGE_S = 0.05


class FileSignature(NamedTuple):
    """What the file system keeps about a file. It differs as soon as the file was changed."""

    name: str
    st_dev: int
    st_ino: int
    st_size: int
    st_mtime_ns: int
    st_ctime_ns: int


class VerifiedCheckpoints:
    """Says whether checkpoints are whole, and their health, and remembers both."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[tuple[FileSignature, ...], Health]] = {}

    def examine(self, path: Path, *, read_again: bool = False) -> Health | None:
        """The health of a checkpoint whose files all have their checksums; None for any other.

        Reads it unless it is known and unchanged.
        """
        key = os.path.realpath(path)
        try:
            before = _sign_files(path)
            if not read_again and key in self._known and self._known[key][0] == before:
                return self._known[key][1]
            verify(path)
            health = read_health(path)
            after = _sign_files(path)
        except (CheckpointError, OSError):
            self._known.pop(key, None)
            return None

        last_change_ns = max(file.st_ctime_ns for file in after)
        is_settled = time.time_ns() - last_change_ns > RECENT_CHANGE_S * 1e9
        if before == after and is_settled:
            self._known[key] = (after, health)
        else:
            self._known.pop(key, None)
        return health


def _sign_files(folder: Path) -> tuple[FileSignature, ...]:
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            stat = entry.stat(follow_symlinks=False)
            numbers = (getattr(stat, name) for name in FileSignature._fields[1:])
            files.append(FileSignature(entry.name, *numbers))
    return tuple(sorted(files))
