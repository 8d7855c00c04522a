"""Files that are hashed while written or read, in a folder that appears whole or not at all."""

import errno
import hashlib
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from halfstep.checkpoint.manifest import FileEntry
from halfstep.errors import DAMAGED_ADVICE, CheckpointError, checkpoint_error
from halfstep.utils.atomic_files import atomic_folder, trash_folder

NO_PERMISSION = {errno.EROFS, errno.EACCES, errno.EPERM}
NO_SUCH_PATH = {errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENOENT, errno.ENOTEMPTY}


# Single files.


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> FileEntry:
    """Writes a new file and flushes it to the disk. Returns its size and sha256."""
    digest = hashlib.sha256()
    size = 0
    with path.open("xb", buffering=0) as file:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            # A nearly full disk takes a part of the chunk first, and refuses the next call.
            remaining = memoryview(chunk)
            while remaining:
                written = os.write(file.fileno(), remaining)
                remaining = remaining[written:]
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


class HashedReader:
    """An open file that is read from start to end. Every byte that is read goes into the hash."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self.size = os.fstat(descriptor).st_size
        self._descriptor = descriptor
        self._digest = hashlib.sha256()

    def read(self, byte_count: int) -> bytes:
        """The next bytes. The caller has checked that the file is that long."""
        data = bytearray(byte_count)
        self.read_into(memoryview(data))
        return bytes(data)

    def read_into(self, view: memoryview) -> None:
        """Fills the memory with the next bytes."""
        position = 0
        while position < len(view):
            byte_count = os.readv(self._descriptor, [view[position:]])
            if byte_count == 0:
                raise checkpoint_error(
                    self.path,
                    f"{self.size} bytes",
                    "fewer: it shrank while it was read",
                    DAMAGED_ADVICE,
                )
            position += byte_count
        self._digest.update(view)

    def check_hash(self, entry: FileEntry) -> None:
        """Raises unless the bytes read so far, which must be all, have the manifest's sha256."""
        sha256 = self._digest.hexdigest()
        if sha256 != entry.sha256:
            raise checkpoint_error(
                self.path, f"sha256 {entry.sha256[:16]}…", f"{sha256[:16]}…", DAMAGED_ADVICE
            )


@contextmanager
def open_file(path: Path, entry: FileEntry | None = None) -> Iterator[HashedReader]:
    """Opens a regular file for reading, and checks its size if an entry of the manifest is given.

    Links are not followed and pipes are not waited for. Every error of the system names the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        reason = error.strerror or str(error)
        if path.is_symlink():
            reason = "a symbolic link"
        raise checkpoint_error(path, "a file that can be read", reason, DAMAGED_ADVICE) from error

    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise checkpoint_error(path, "a regular file", "something else", DAMAGED_ADVICE)
        reader = HashedReader(path, descriptor)
        if entry is not None and reader.size != entry.size:
            manifest_path = path.parent / "manifest.json"
            raise checkpoint_error(
                path,
                f"{entry.size} bytes, as {manifest_path} says",
                f"{reader.size}",
                DAMAGED_ADVICE,
            )
        yield reader
    except OSError as error:
        reason = error.strerror or str(error)
        raise checkpoint_error(path, "a file that can be read", reason, DAMAGED_ADVICE) from error
    finally:
        os.close(descriptor)


# Folders.


@contextmanager
def write_folder(folder: Path, needed_bytes: int) -> Iterator[Path]:
    """Yields a temporary folder, which becomes `folder` when the block ends.

    It is removed when the block fails. `needed_bytes` are the bytes to come, for the message when
    the disk is full.
    """
    try:
        _check_name_is_free(folder)
        with atomic_folder(folder) as temporary:
            yield temporary
    except OSError as error:
        raise explain_save_error(error, folder, needed_bytes) from error


def remove_folder(folder: Path) -> None:
    """Removes the folder: at once for every reader, then from the disk. A link is not followed."""
    try:
        trash_folder(folder)
    except FileNotFoundError:
        pass  # another process removed it
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "Check who owns the folder, or remove it by hand."
        raise checkpoint_error(folder, "a folder that can be removed", reason, advice) from error


def explain_save_error(error: OSError, folder: Path, needed_bytes: int) -> CheckpointError:
    """The error of a save: what the system's error means, and what to do about it."""
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        free_bytes = _free_bytes(folder)
        missing_bytes = needed_bytes - free_bytes
        if missing_bytes <= 0:  # the disk was freed meanwhile, or keeps some space for root
            missing_bytes = needed_bytes
        expected = f"room for {needed_bytes:,} bytes"
        reason = f"{free_bytes:,} free ({reason})"
        advice = f"Free {missing_bytes:,} bytes or more, or save to another disk."
    elif error.errno == errno.EDQUOT:
        expected = f"room for {needed_bytes:,} bytes"
        advice = f"Free {needed_bytes:,} bytes of your quota."
    elif error.errno == errno.EFBIG:
        expected = f"files of up to {needed_bytes:,} bytes"
        advice = (
            f"Allow files of {needed_bytes:,} bytes (ulimit -f), or save to another file system."
        )
    elif error.errno == errno.ENAMETOOLONG:
        expected = "a name that the file system takes"
        advice = "Choose a shorter one."
    elif error.errno in NO_PERMISSION:
        expected = "a folder that can be written"
        advice = "Save to a folder that you may write to."
    elif error.errno in NO_SUCH_PATH:
        expected = "a place for a new folder"
        advice = "Choose a path under an existing folder."
    else:
        expected = "a disk that takes the checkpoint"
        advice = "Check the disk, or save to another one."
    return checkpoint_error(folder, expected, reason, advice)


def _check_name_is_free(folder: Path) -> None:
    try:
        # A name that is too long raises too: now, and not after gigabytes were written.
        os.lstat(folder)
    except FileNotFoundError:
        return
    advice = "Choose another name, or remove it first: a checkpoint is never overwritten."
    raise checkpoint_error(folder, "a name that is not taken", "a file or folder there", advice)


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
