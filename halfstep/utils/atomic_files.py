"""Files and folders that appear whole or not at all, whenever the process or the machine dies.

Everything that halfstep writes goes through here. A file is written under a temporary name in the
same folder, flushed to the disk, and takes its name in one step; until then, whatever had that name
stays as it is. A folder is filled under a temporary name, and renamed.

The name of a temporary says who fills it: a hash of the host, the pid, the start time of the
process, and a random part. The next write in the same folder removes temporaries whose process is
gone. One from another host is removed when nothing in it was written for an hour.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

TEMPORARY_PREFIX = ".halfstep-tmp-"
TRASH_PREFIX = ".halfstep-trash-"
ABANDONED_AFTER_S = 3600  # for temporaries of other hosts, whose processes cannot be looked up

# Some network and FUSE file systems cannot flush a folder; their names need no flush, or have none.
CANNOT_SYNC_FOLDERS = {errno.EINVAL, errno.ENOTSUP}

# Flushing more files than this one by one takes longer than flushing all disks at once.
MAX_FILES_TO_SYNC = 100

# /proc/PID/stat: its fields after the process's name in parentheses, as proc(5) numbers them.
STATE_FIELD = 0
START_TIME_FIELD = 19


# Files.


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Yields a file to write; when the block ends, it has the name `path`, whole and flushed.

    When the block fails, nothing has changed. A link stays, and the file that it names is replaced.
    The file may be read and written by whom a plain `open` would allow: the umask decides about a
    new file, an old one keeps its mode. A device or a pipe is written as it is.
    """
    try:
        old = _stat_old_file(path)
        if old is not None and not stat.S_ISREG(old.st_mode):
            with open(path, "wb") as file:
                yield file
            return
        target = Path(os.path.realpath(path))
        make_folder(target.parent)
        with contextlib.suppress(OSError):  # a folder that may be written may be unreadable
            remove_leftovers(target.parent)

        temporary = target.parent / _temporary_name()
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        descriptor = os.open(temporary, flags, 0o666)
        try:
            with os.fdopen(descriptor, "wb") as file:
                yield file
                file.flush()
                if old is not None:
                    _copy_permissions(old, file.fileno())
                os.fsync(file.fileno())
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_folder(target.parent)
    except OSError as error:
        if error.filename is None:  # of a write, which knows only a descriptor
            error.filename = str(path)
        raise


def write_chunks(path: str | Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Writes a file, whole or not at all."""
    with atomic_file(path) as file:
        for chunk in chunks:
            file.write(chunk)


def _stat_old_file(path: str | Path) -> os.stat_result | None:
    """What is known about the file that will be replaced; None if there is none.

    The errors of a plain `open`: for a folder, a loop of links, a file that may not be written.
    """
    try:
        old = os.stat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(old.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return old


def _copy_permissions(old: os.stat_result, descriptor: int) -> None:
    with contextlib.suppress(OSError):  # the owner can be another's only for root
        os.fchown(descriptor, old.st_uid, old.st_gid)
    with contextlib.suppress(OSError):
        os.fchmod(descriptor, stat.S_IMODE(old.st_mode))


# Folders.


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, which becomes `folder` when the block ends.

    It is removed when the block fails. The block flushes the files that it writes. OSError if
    something that is not an empty folder has the name by then.
    """
    make_folder(folder.parent)
    remove_leftovers(folder.parent)
    temporary = folder.parent / _temporary_name()
    temporary.mkdir()
    try:
        yield temporary
        sync_folder(temporary)
        os.rename(temporary, folder)
    except BaseException:
        _delete(temporary)
        raise
    sync_folder(folder.parent)


def make_folder(folder: Path) -> None:
    """Creates the folder and its parents, and flushes their names to the disk."""
    if folder.exists():
        return
    make_folder(folder.parent)
    with contextlib.suppress(FileExistsError):  # another process was faster
        folder.mkdir()
    sync_folder(folder.parent)


def trash_folder(folder: Path) -> None:
    """Removes the folder: at once for every reader, then from the disk. A link is not followed."""
    trash = folder.parent / f"{TRASH_PREFIX}{secrets.token_hex(8)}"
    os.rename(folder, trash)
    sync_folder(folder.parent)
    _delete(trash)


def sync_folder(folder: Path) -> None:
    """Flushes the folder's list of names to the disk: without this, a rename may be lost."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_SYNC_FOLDERS:
            raise
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Flushes every file and folder in a folder to the disk."""
    paths = []
    for parent, _, names in os.walk(folder):
        paths.append(parent)
        paths += [os.path.join(parent, name) for name in names]
    if len(paths) > MAX_FILES_TO_SYNC:
        os.sync()
        return
    for path in paths:
        sync_folder(Path(path))


# Temporaries.


def remove_leftovers(parent: Path) -> None:
    """Removes what killed processes left in a folder: abandoned temporaries, and trash."""
    for name in os.listdir(parent):
        path = parent / name
        if name.startswith(TRASH_PREFIX) or (
            name.startswith(TEMPORARY_PREFIX) and _is_abandoned(path)
        ):
            _delete(path)


def remove_temporaries(parent: Path) -> None:
    """Removes all temporaries in a folder, also those of processes that live.

    Whoever fills one gets an error when it is to take its name.
    """
    for name in os.listdir(parent):
        if name.startswith((TRASH_PREFIX, TEMPORARY_PREFIX)):
            _delete(parent / name)


def _temporary_name() -> str:
    pid = os.getpid()
    owner = f"{_host_id()}-{pid}-{_process_start(pid)}"
    return f"{TEMPORARY_PREFIX}{owner}-{secrets.token_hex(4)}"


def _is_abandoned(temporary: Path) -> bool:
    """Whether the process that filled the temporary file or folder is gone."""
    parts = temporary.name.removeprefix(TEMPORARY_PREFIX).split("-")
    if len(parts) == 4 and parts[0] == _host_id() and parts[1].isdecimal():
        # A process with this pid that started at another time is another process.
        return _process_start(int(parts[1])) != parts[2]

    # Another host's: its processes cannot be seen from here, but when it wrote last can.
    try:
        return not any(
            time.time() - os.lstat(path).st_mtime <= ABANDONED_AFTER_S
            for path in _paths_in(temporary)
        )
    except OSError:  # it is gone, or its owner has just renamed it
        return False


def _paths_in(path: Path) -> Iterator[str]:
    """The path itself, and everything below it."""
    yield str(path)
    for parent, folders, files in os.walk(path):
        for name in (*folders, *files):
            yield os.path.join(parent, name)


def _host_id() -> str:
    """A hash of the machine and its pid namespace: within them, a pid means the same process."""
    host = os.uname().nodename
    with contextlib.suppress(OSError):
        host = f"{host} {os.readlink('/proc/self/ns/pid')}"
    return hashlib.sha256(host.encode()).hexdigest()[:8]


def _process_start(pid: int) -> str:
    """When the process started, in ticks since boot; "gone" if there is no such process.

    Without /proc the time is not known: then "0" for a process that runs.
    """
    if not Path("/proc/self/stat").exists():
        return "0" if _is_running(pid) else "gone"
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return "gone"
    fields = text.rpartition(")")[2].split()
    if fields[STATE_FIELD] in "ZX":  # dead, but its parent has not collected it yet
        return "gone"
    return fields[START_TIME_FIELD]


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True


def _delete(path: Path) -> None:
    """Removes a file, a link or a folder with all that is in it, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        path.unlink()
