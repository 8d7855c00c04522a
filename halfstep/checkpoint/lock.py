"""One writer at a time: a folder is locked by the process that writes there, until it is done or dies.

The kernel lets go of a lock (flock) with the process that holds it, so that a killed run stands in nobody's way. The
file in the folder says who holds it, for a person to read; by itself it locks nothing. Readers need no lock.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from halfstep.errors import CheckpointError, Notice

LOCK = ".halfstep-lock"


class Asks(NamedTuple):
    """Who wants a folder, by the name of what was given, which file there is the lock, and what to do instead."""

    who: str = "Checkpoint"
    file: str = LOCK
    instead: str = "name another folder"


_SAVES = Asks()
_held: dict[
    int, tuple[int, int]
] = {}  # descriptors of this process's locks, and the files they are
_hooked: list[bool] = []


@contextmanager
def held(folder: Path, asks: Asks = _SAVES) -> Iterator[None]:
    """Inside, `folder` is this block's to write: another process, thread or block that wants it is refused.

    Where the file system has no locks, a Notice says so and the block runs all the same.
    """
    descriptor, owner = _take(folder, asks), os.getpid()
    try:
        yield
    finally:
        if descriptor in _held and os.getpid() == owner:  # a fork of the holder holds nothing
            _release(folder / asks.file, descriptor)


def unwritable(folder: Path, error: OSError, asks: Asks = _SAVES) -> CheckpointError:
    """What a folder that takes no files is told as."""
    came, instead = error.strerror or str(error), asks.instead[0].upper() + asks.instead[1:]
    return CheckpointError(
        f"{asks.who}: expected a folder that can be written, {folder} cannot: {came}. {instead}."
    )


def _take(folder: Path, asks: Asks) -> int:
    """The descriptor that holds the lock; -1 where there are no locks."""
    import fcntl

    path = folder / asks.file
    while True:
        descriptor = _opened(path, asks)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            error = _in_use(folder, descriptor, asks)
            os.close(descriptor)
            raise error from None
        except OSError as error:
            os.close(descriptor)
            return _without(path, error, asks)
        if _is(path, descriptor):
            _sign(descriptor)
            return descriptor
        os.close(
            descriptor
        )  # removed by its holder between our open and our lock: the next one is another file


def _opened(path: Path, asks: Asks) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise unwritable(path.parent, error, asks) from error


def _sign(descriptor: int) -> None:
    """Who holds it; a fork closes its copy, since DataLoader workers outlive a killed parent by seconds."""
    if not _hooked:
        os.register_at_fork(after_in_child=_forget)
        _hooked.append(True)
    _held[descriptor] = _file(descriptor)
    with suppress(OSError):  # a full disk: it is held all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}\n".encode(), 0)


def _release(path: Path, descriptor: int) -> None:
    import fcntl

    with suppress(OSError):  # the folder may be gone
        if _is(path, descriptor):
            path.unlink()  # while it is still held: whoever waits to open it makes a new one
    del _held[descriptor]
    fcntl.flock(
        descriptor, fcntl.LOCK_UN
    )  # a copy in a process that was forked without Python's knowledge lets go too
    os.close(descriptor)


def _forget() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


def _in_use(folder: Path, descriptor: int, asks: Asks) -> CheckpointError:
    if _file(descriptor) in _held.values():
        return CheckpointError(
            f"{asks.who}: {folder} is in use in this very process, by another fit or another Checkpoint of this one. "
            f"Wait for it, or {asks.instead}; one Checkpoint can take every_steps= and best= together."
        )
    owner = os.pread(descriptor, 300, 0).decode(errors="replace").strip() or "another process"
    return CheckpointError(
        f"{asks.who}: {folder} is in use: {owner} writes there, and two would overwrite and remove each other's files. "
        f"Wait until it has ended, stop it, or {asks.instead}."
    )


def _without(path: Path, error: OSError, asks: Asks) -> int:
    with suppress(OSError):
        path.unlink()
    warnings.warn(
        f"{asks.who}: {path.parent} cannot be locked on this file system ({error.strerror or error}). Training goes "
        "on; see to it that no other run saves there.", Notice, stacklevel=9,
    )  # fmt: skip
    return -1


def _is(path: Path, descriptor: int) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except OSError:
        return False
    return (there.st_dev, there.st_ino) == _file(descriptor)


def _file(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
