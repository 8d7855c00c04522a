"""One writer at a time: a folder is locked by the process that writes in it, until it ends or dies.

The lock is one of the library filelock, over the kernel's flock. The kernel releases it when its
process dies, so a killed run blocks nobody, and filelock closes it in forked children, so that
DataLoader workers, which outlive a killed parent by seconds, do not keep it. The file in the folder
says who holds the lock, for a person to read. The file alone locks nothing. Reading needs no lock.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from halfstep.errors import CheckpointError, Notice
from halfstep.utils.keywords import user_stacklevel

LOCK_FILE = ".halfstep-lock"

# How long to try. A file that its holder removes while we open it takes a second attempt.
ACQUIRE_TIMEOUT_S = 0.1
RETRY_EVERY_S = 0.01

# Bytes to read of the line that names the holder.
MAX_OWNER_BYTES = 300


class LockRequest(NamedTuple):
    """Who locks a folder, which file in it is the lock, and what to do if another run has it."""

    who: str = "Checkpoint"
    file_name: str = LOCK_FILE
    instead: str = "name another folder"


SAVE_REQUEST = LockRequest()


class _LockFileRemoved(Exception):
    """The file was removed by its holder after we had opened it: it locks nothing any more."""


class _LockFile:
    """The file that is locked, known by its inode: the path may name another one by now."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stat: os.stat_result | None = None

    def sign(self, descriptor: int) -> None:
        """Writes who holds the lock into the file that was just locked."""
        self._stat = os.fstat(descriptor)
        if not self._is_at_path():
            raise _LockFileRemoved
        with suppress(OSError):  # a full disk: the lock is held all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, _owner_line().encode(), 0)

    def remove(self) -> None:
        """Removes the file, unless the path names another process's by now."""
        if self._is_at_path():
            with suppress(OSError):
                self.path.unlink()

    def _is_at_path(self) -> bool:
        try:
            current = os.lstat(self.path)
        except OSError:  # the file, or its folder, is gone
            return False
        return self._stat is not None and os.path.samestat(current, self._stat)


@contextmanager
def hold_lock(folder: Path, request: LockRequest = SAVE_REQUEST) -> Iterator[None]:
    """Inside the block only this block may write to `folder`: a second one raises CheckpointError.

    That is true for other processes, other threads and other blocks of this thread. Where the file
    system has no locks, a Notice says so and the block runs without one.
    """
    from filelock import FileLock, Timeout

    path = folder / request.file_name
    lock_file = _LockFile(path)
    lock = FileLock(path, thread_local=False, fallback_to_soft=False, on_acquired=lock_file.sign)
    while not lock.is_locked:
        _create_lock_file(path, request)
        try:
            lock.acquire(timeout=ACQUIRE_TIMEOUT_S, poll_interval=RETRY_EVERY_S)
        except _LockFileRemoved:
            continue
        except Timeout:
            raise _in_use_error(path, request) from None
        except OSError as error:
            _warn_without_lock(path, error, request)
            break

    holder_pid = os.getpid()
    try:
        yield
    finally:
        # A fork of the holder may leave this block too, and holds nothing.
        if lock.is_locked and os.getpid() == holder_pid:
            # Removed while it is locked: whoever has opened it notices that, and makes a new one.
            lock_file.remove()
            lock.release()


def unwritable_folder(
    folder: Path, error: OSError, request: LockRequest = SAVE_REQUEST
) -> CheckpointError:
    """The error for a folder in which no file can be created."""
    reason = error.strerror or str(error)
    advice = request.instead[0].upper() + request.instead[1:]
    return CheckpointError(
        f"{request.who}: expected a folder that can be written, {folder} cannot: {reason}. "
        f"{advice}."
    )


def _create_lock_file(path: Path, request: LockRequest) -> None:
    """Creates the folder and the file, so that a refusal is told apart from a missing flock."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        os.close(os.open(path, flags, 0o666))
    except OSError as error:
        raise unwritable_folder(path.parent, error, request) from error


def this_process() -> str:
    """How the lock names its holder."""
    return f"process {os.getpid()} on {os.uname().nodename}"


def _owner_line() -> str:
    return f"{this_process()}\n"


def _in_use_error(path: Path, request: LockRequest) -> CheckpointError:
    """The error for a folder that is locked, with the process that holds it."""
    owner = ""
    with suppress(OSError):  # the holder may have just removed the file
        owner = path.read_bytes()[:MAX_OWNER_BYTES].decode(errors="replace")
    if owner == _owner_line():
        return CheckpointError(
            f"{request.who}: {path.parent} is in use in this very process, by another fit or "
            f"another Checkpoint of this one. Wait for it, or {request.instead}; one Checkpoint "
            "can take every_steps= and best= together."
        )
    owner = owner.strip() or "another process"
    return CheckpointError(
        f"{request.who}: {path.parent} is in use: {owner} writes there, and two would overwrite "
        "and remove each other's files. Wait until it has ended, stop it, or "
        f"{request.instead}."
    )


def _warn_without_lock(path: Path, error: OSError, request: LockRequest) -> None:
    """Removes the file, which would lock nothing, and warns at the line of the user's fit."""
    with suppress(OSError):
        path.unlink()
    reason = error.strerror or error
    warnings.warn(
        f"{request.who}: {path.parent} cannot be locked on this file system ({reason}). "
        "Training goes on; see to it that no other run saves there.",
        Notice,
        stacklevel=user_stacklevel(),
    )
