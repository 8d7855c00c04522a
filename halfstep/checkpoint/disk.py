"""A folder that appears whole or not at all: written beside its place under a temporary name, then renamed.

A temporary's name says whose it is: host and pid namespace, pid, birth of the process, and a random part. A later
save removes those whose process is gone; one from another host goes when nothing in it was written for an hour.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfstep.checkpoint.disk__files import sync_folder
from halfstep.errors import CheckpointError, checkpoint_error

_TEMPORARY, _TRASH = ".halfstep-tmp-", ".halfstep-trash-"
_SILENT_S = 3600
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}
_NO_PLACE = {errno.ENOTDIR, errno.EEXIST, errno.ELOOP, errno.ENOENT}


@contextmanager
def writing(folder: Path, need: int) -> Iterator[Path]:
    """A temporary folder to fill with files; it becomes `folder` when the block ends, and is removed when it fails.

    `need` is the number of bytes to come, for the message when the disk is full.
    """
    try:
        make(folder.parent)
        _check_free(folder)
        sweep(folder.parent)
        with _temporary(folder.parent) as temporary:
            yield temporary
            sync_folder(temporary)
            os.rename(temporary, folder)  # fails on a folder with anything in it
        sync_folder(folder.parent)
    except OSError as error:
        raise explained(error, folder, need) from error


def remove(folder: Path) -> None:
    """The folder is gone at once for every reader, then deleted; a link is removed, not followed."""
    trash = folder.parent / f"{_TRASH}{secrets.token_hex(8)}"
    try:
        os.rename(folder, trash)
        sync_folder(folder.parent)
        _delete(trash)
    except FileNotFoundError:
        pass  # someone else removed it
    except OSError as error:
        came, advice = (
            error.strerror or str(error),
            "Check who owns the folder, or remove it by hand.",
        )
        raise checkpoint_error(folder, "a folder that can be removed", came, advice) from error


def sweep(parent: Path) -> None:
    """Removes what killed processes left: temporaries that nobody fills any more, and trash."""
    for name in os.listdir(parent):
        if name.startswith(_TRASH) or (name.startswith(_TEMPORARY) and _is_left(parent / name)):
            _delete(parent / name)


def make(folder: Path) -> None:
    """The folder and its parents, on the disk."""
    if not folder.exists():
        make(folder.parent)
        with contextlib.suppress(FileExistsError):  # someone else's is as good
            folder.mkdir()
        sync_folder(folder.parent)


def explained(error: OSError, folder: Path, need: int) -> CheckpointError:
    """What the system's error means for a save, and what to do about it."""
    reason = error.strerror or str(error)
    if error.errno == errno.ENOSPC:
        free = _free(folder)
        more = max(need - free, 1) if free < need else need
        advice = f"Free {more:,} bytes or more, or save to another disk."
        return checkpoint_error(
            folder, f"room for {need:,} bytes", f"{free:,} free ({reason})", advice
        )
    if error.errno == errno.EDQUOT:
        return checkpoint_error(
            folder, f"room for {need:,} bytes", reason, f"Free {need:,} bytes of your quota."
        )
    if error.errno == errno.EFBIG:
        advice = f"Allow files of {need:,} bytes (ulimit -f), or save to another file system."
        return checkpoint_error(folder, f"files of up to {need:,} bytes", reason, advice)
    if error.errno == errno.ENAMETOOLONG:
        return checkpoint_error(
            folder, "a name that the file system takes", reason, "Choose a shorter one."
        )
    if error.errno in _READ_ONLY:
        return checkpoint_error(
            folder,
            "a folder that can be written",
            reason,
            "Save to a folder that you may write to.",
        )
    if error.errno in _NO_PLACE or error.errno == errno.ENOTEMPTY:
        return checkpoint_error(
            folder, "a place for a new folder", reason, "Choose a path under an existing folder."
        )
    return checkpoint_error(
        folder,
        "a disk that takes the checkpoint",
        reason,
        "Check the disk, or save to another one.",
    )


def _check_free(folder: Path) -> None:
    try:
        os.lstat(folder)  # raises for a name that is too long, too: now, and not after gigabytes
    except FileNotFoundError:
        return
    advice = "Choose another name, or remove it first: a checkpoint is never overwritten."
    raise checkpoint_error(folder, "a name that is not taken", "a file or folder there", advice)


@contextmanager
def _temporary(parent: Path) -> Iterator[Path]:
    pid = os.getpid()
    temporary = parent / f"{_TEMPORARY}{_host()}-{pid}-{_birth(pid)}-{secrets.token_hex(4)}"
    temporary.mkdir()
    try:
        yield temporary
    except BaseException:
        _delete(temporary)
        raise


def _is_left(temporary: Path) -> bool:
    owner = temporary.name.removeprefix(_TEMPORARY).split("-")
    if len(owner) == 4 and owner[0] == _host() and owner[1].isdecimal():
        return (
            _birth(int(owner[1])) != owner[2]
        )  # another birth: the number was given to another process
    with contextlib.suppress(OSError):
        written = max(path.lstat().st_mtime for path in (temporary, *temporary.iterdir()))
        return time.time() - written > _SILENT_S
    return False


def _host() -> str:
    """Where a pid means what it means here."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(
            f"{os.uname().nodename} {os.readlink('/proc/self/ns/pid')}".encode()
        ).hexdigest()[:8]
    return hashlib.sha256(os.uname().nodename.encode()).hexdigest()[:8]


def _birth(pid: int) -> str:
    """When the process started, in ticks since boot; "gone" without one. Where no /proc tells, "0" for a live one."""
    if not Path("/proc/self/stat").exists():
        return "0" if _is_alive(pid) else "gone"
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "gone"
    return "gone" if fields[0] in "ZX" else fields[19]  # dead, but its parent has not asked yet


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free
