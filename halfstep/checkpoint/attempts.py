"""Which attempt of a job may write in a folder: the newest one.

torchrun starts a job again when a process was lost. The lock of a folder (lock.py) keeps a second
writer out while the first one lives. That is not enough here: the first one may live on, stopped or
cut off, on a host that nobody reaches, or where the file system has no locks. So every attempt
writes its number into the folder when it begins, and looks there again before a checkpoint gets its
name and before one is removed. An older attempt that wakes up finds a newer number, and ends.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from halfstep.checkpoint.lock import LOCK_FILE, MAX_OWNER_BYTES, this_process
from halfstep.checkpoint.manifest import parse_json
from halfstep.errors import CheckpointError, NewerAttemptError, checkpoint_error
from halfstep.utils.atomic_files import remove_temporaries, write_chunks

ATTEMPT_FILE = "attempt.json"
MAX_ATTEMPT_BYTES = 10_000


class Job(NamedTuple):
    """A job of torchrun as one of its attempts sees it."""

    name: str  # the same for all attempts
    restart: int  # how often torchrun had started it again: never falls, but may stay as it is
    ranks: int


@dataclass(frozen=True)
class Attempt:
    """One attempt. The fields are keys of attempt.json, in the folder and in each checkpoint."""

    number: int
    job: str
    restart: int
    ranks: int
    process: str

    def encode(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode() + b"\n"


class FolderClaim:
    """The right of one attempt to write in a folder, until a newer one begins there."""

    def __init__(self, folder: Path, attempt: Attempt) -> None:
        self.folder = folder
        self.attempt = attempt

    def check(self) -> None:
        """NewerAttemptError if a newer attempt has begun."""
        newest = read_attempt(self.folder)
        if newest is None or newest == self.attempt:
            return
        raise NewerAttemptError(
            f"Checkpoint: this is attempt {self.attempt.number} of the run in {self.folder} "
            f"({self.attempt.process}), and attempt {newest.number} ({newest.process}) has begun "
            "since. This one was given up, so it saves and removes nothing there any more, and ends"
        )


def claim_folder(folder: Path, job: Job | None) -> FolderClaim | None:
    """Begins an attempt in a folder that the caller has locked.

    None for a process that was started alone, in a folder that only such processes have written to.
    """
    previous = read_attempt(folder)
    if job is None and previous is None:
        return None
    attempt = Attempt(
        number=1 if previous is None else previous.number + 1,
        job="" if job is None else job.name,
        restart=0 if job is None else job.restart,
        ranks=1 if job is None else job.ranks,
        process=this_process(),
    )
    try:
        write_chunks(folder / ATTEMPT_FILE, [attempt.encode()])
        # What an older attempt is writing can no longer get its name.
        remove_temporaries(folder)
    except OSError as error:
        reason = error.strerror or str(error)
        raise checkpoint_error(
            folder / ATTEMPT_FILE, "a file that can be written", reason, "Name another folder."
        ) from error
    return FolderClaim(folder, attempt)


def release_older_attempt(folder: Path, job: Job | None) -> None:
    """Removes the lock of an older attempt of the same job, which torchrun has given up.

    It may live all the same, stopped or on another host. The lock of anybody else stays.
    """
    if job is None:
        return
    previous = read_attempt(folder)
    if previous is None or previous.job != job.name or previous.restart > job.restart:
        return
    lock_path = folder / LOCK_FILE
    with suppress(OSError):
        owner = lock_path.read_bytes()[:MAX_OWNER_BYTES].decode(errors="replace").strip()
        if owner == previous.process and owner != this_process():
            lock_path.unlink()


def read_attempt(folder: Path) -> Attempt | None:
    """The newest attempt in a folder; None if there has been none."""
    path = folder / ATTEMPT_FILE
    try:
        data = path.read_bytes()[:MAX_ATTEMPT_BYTES]
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
        raise checkpoint_error(path, "a file that can be read", reason, _ADVICE) from error
    content: Any = parse_json(path, data)
    types = {"number": int, "job": str, "restart": int, "ranks": int, "process": str}
    is_attempt = isinstance(content, dict) and set(content) == set(types)
    if not is_attempt or any(type(content[name]) is not types[name] for name in types):
        raise CheckpointError(f"{path}: expected an attempt, found something else. {_ADVICE}")
    return Attempt(**content)


_ADVICE = "Remove it when nothing writes in the folder; the next attempt is then number 1."
