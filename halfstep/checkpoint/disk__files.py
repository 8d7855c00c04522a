"""Single files of a checkpoint: written through to the disk, read with suspicion, hashed on the way."""

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from halfstep.checkpoint.manifest import File
from halfstep.errors import DAMAGED_ADVICE, checkpoint_error


def write(path: Path, content: Iterable[bytes | memoryview]) -> File:
    """A new file with this content, on the disk when this returns; its size and sha256."""
    digest, size = hashlib.sha256(), 0
    with path.open("xb", buffering=0) as file:
        for piece in content:
            digest.update(piece)
            size += len(piece)
            _put(file.fileno(), memoryview(piece))
        os.fsync(file.fileno())
    return File(size, digest.hexdigest())


def sync_folder(folder: Path) -> None:
    """The folder's entries are on the disk when this returns: a rename is not, before."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Reading:
    """An open file that is read in order; every byte that is read goes into the hash."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._descriptor = path, descriptor
        self.size = os.fstat(descriptor).st_size
        self._digest = hashlib.sha256()

    def take(self, count: int) -> bytes:
        """The next bytes; the caller knows that `count` is no more than the file's size."""
        data = bytearray(count)
        self.fill(memoryview(data))
        return bytes(data)

    def fill(self, view: memoryview) -> None:
        """Fills the memory with the next bytes."""
        at = 0
        while at < len(view):
            read = os.readv(self._descriptor, [view[at:]])
            if not read:
                raise checkpoint_error(
                    self.path,
                    f"{self.size} bytes",
                    "fewer: it shrank while it was read",
                    DAMAGED_ADVICE,
                )
            at += read
        self._digest.update(view)

    def check(self, entry: File) -> None:
        """All has been read; it must have been what the manifest says."""
        if self._digest.hexdigest() != entry.sha256:
            raise checkpoint_error(
                self.path,
                f"sha256 {entry.sha256[:16]}…",
                f"{self._digest.hexdigest()[:16]}…",
                DAMAGED_ADVICE,
            )


@contextmanager
def opened(path: Path, entry: File | None = None) -> Iterator[Reading]:
    """The regular file, open for reading, of the size that the manifest gives; no link is followed, no pipe waited
    for, and whatever the system refuses names the file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        came = "a symbolic link" if path.is_symlink() else error.strerror or str(error)
        raise checkpoint_error(path, "a file that can be read", came, DAMAGED_ADVICE) from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise checkpoint_error(path, "a regular file", "something else", DAMAGED_ADVICE)
        file = Reading(path, descriptor)
        if entry is not None and file.size != entry.size:
            raise checkpoint_error(
                path,
                f"{entry.size} bytes, as {path.parent / 'manifest.json'} says",
                f"{file.size}",
                DAMAGED_ADVICE,
            )
        yield file
    except OSError as error:
        raise checkpoint_error(
            path, "a file that can be read", error.strerror or str(error), DAMAGED_ADVICE
        ) from error
    finally:
        os.close(descriptor)


def _put(descriptor: int, view: memoryview) -> None:
    while view:  # a nearly full disk takes a part first, and refuses the next call
        view = view[os.write(descriptor, view) :]
