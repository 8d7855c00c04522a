"""The folder of a run on this machine, and the store that gets what is made in it.

Training writes into the folder, as it does without a store. A thread looks at the folder, uploads
what the store lacks, and verifies it. It waits when the store fails, for longer and longer, and the
files wait too: nothing stops training, and nothing is removed before its successors are in the
store.
"""

import hashlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from halfstep.checkpoint.disk import remove_folder
from halfstep.checkpoint.manifest import MANIFEST_FILE
from halfstep.checkpoint.runs import (
    REPLACEMENT_SUFFIX,
    good_checkpoints,
    listing,
    step_of,
)
from halfstep.checkpoint.store import verify
from halfstep.checkpoint.verified import VerifiedCheckpoints
from halfstep.errors import DAMAGED_ADVICE, CheckpointError, Notice, StoreError
from halfstep.storage.store_access import RetryPolicy, Store, hash_bytes, hash_file
from halfstep.storage.store_checkpoints import (
    ATTEMPTS_FOLDER,
    FROM_THE_BEGINNING,
    IndexReader,
    OlderAttemptError,
    StoredCheckpoint,
    StoreIndex,
    claim_attempt,
    commit_checkpoint,
    fetch_checkpoint,
    fetch_logs,
    find_missing_object,
    is_whole,
    prune_store,
)
from halfstep.storage.url import StoreURL, hide_credentials, local_name, parse_store_url
from halfstep.utils.atomic_files import make_folder
from halfstep.utils.files import read_json, write_json
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.text import list_some, plural

RECORD_FILE = ".halfstep-store.json"
ABANDONED_PREFIX = ".halfstep-abandoned-"

# Files that a run goes on in: they are saved with each checkpoint.
LINE_SUFFIXES = {".jsonl", ".csv", ".log", ".txt"}
LOG_SUFFIXES = {*LINE_SUFFIXES, ".json"}

READ_ONLY_SCHEMES = {"http", "https", "hf", "github", "data"}

RETRIES = RetryPolicy(tries=10)  # about a minute, where a store is not there at all

IDLE_S = 30.0  # between two looks at the folder, when no checkpoint is made: logs grow
FIRST_PAUSE_S = 1.0  # after a failure
LONGEST_PAUSE_S = 60.0

GIVE_UP_AFTER_S = 600.0  # at the end of a run, without anything that arrives
POLL_S = 0.05
SHOW_PROGRESS_AFTER_S = 1.0
SHOW_PROGRESS_EVERY_S = 0.5
PRINT_PROGRESS_EVERY_S = 30.0  # where lines cannot be overwritten

MAX_NAMES_SHOWN = 5


class FileStamp(NamedTuple):
    """What the file system keeps about a file: another one as soon as it was written."""

    inode: int
    size: int
    mtime_ns: int


class StoreMirror:
    """Uploads what a run makes in `folder`, and brings back what it goes on from."""

    def __init__(self, url: str | Path, what: str) -> None:
        self.url: StoreURL = parse_store_url(url, what)
        if self.url.scheme in READ_ONLY_SCHEMES:
            raise ValueError(
                f"{what}: expected a store that can be written, such as s3://bucket/run, "
                f"got {self.url}"
            )
        self.what = what
        self.folder = working_folder(self.url)
        self.keep = 5
        self.protected_steps: frozenset[int] = frozenset()
        """Beside the newest `keep`, these stay in the store."""
        self.give_up_after_s = GIVE_UP_AFTER_S
        self.retries = RETRIES
        self._starts_over = False
        self._has_fetched = False  # the run goes on from the newest that could be used
        self._replaced_files: list[str] = []
        self._reader: IndexReader | None = None
        self._attempt = 0
        self._thread: threading.Thread | None = None
        self._process = 0
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._requests = 0  # how often something new may be in the folder
        self._served = 0  # the last of these after which everything was uploaded
        self._uploaded: dict[str, FileStamp] = {}  # checkpoints that are in the store, verified
        self._refused: dict[str, FileStamp] = {}  # those that are not this run's, or damaged
        self._files: dict[str, FileStamp] = {}  # other files
        self._last_arrival = 0.0
        self._arrived_count = 0
        self._problem: str | None = None
        self._refusal: str | None = None
        self._end_of_uploads: str | None = None
        self._has_warned: set[str] = set()

    # Before a run.

    def fetch(self) -> None:
        """Brings the newest good checkpoint of the store into the folder, and its logs.

        Nothing is downloaded if the folder has it, or a newer one of this run. A Notice says which
        newer ones of the store are damaged. Checkpoints in the folder that another machine has not
        gone on from are moved aside.
        """
        if self._starts_over:
            return
        reader = self._connect()
        index = reader.read()
        verified = VerifiedCheckpoints()
        record = read_json(self.folder / RECORD_FILE) if self.folder.is_dir() else None
        local_attempt = int(record["attempt"]) if isinstance(record, dict) else 0
        self._move_aside(index, local_attempt)
        self._write_record(index.newest_attempt)

        self._has_fetched = True
        damaged: dict[str, str] = {}
        for stored in reversed(index.checkpoints):
            good = good_checkpoints(self.folder, verified)
            if good and step_of(good[-1]) >= stored.step:
                break
            try:
                missing = find_missing_object(index, stored)
                if missing is not None:
                    raise CheckpointError(f"{self.url}/{missing}. {DAMAGED_ADVICE}")
                self._fetch_one(reader.store, stored)
            except CheckpointError as error:
                damaged[stored.manifest_name] = str(error)
        self._warn_of_damage({**damaged, **index.broken}, good_checkpoints(self.folder, verified))

    def _warn_of_damage(self, damaged: dict[str, str], good: list[Path]) -> None:
        """A Notice about checkpoints of the store that are newer than the one to go on from."""
        newest = good[-1].name if good else ""
        reasons = [text for name, text in damaged.items() if name.partition("/")[0] > newest]
        if reasons:
            used = f"{newest} is used instead" if good else "no whole one is left"
            lines = "\n  ".join(reasons)
            warnings.warn(
                f"{self.what}: {plural(len(reasons), 'checkpoint')} of {self.url} damaged, {used}:"
                f"\n  {lines}",
                Notice,
                stacklevel=user_stacklevel(),
            )

    def _fetch_one(self, store: Store, stored: StoredCheckpoint) -> None:
        """The checkpoint with its logs, or CheckpointError and neither of them."""
        path = self.folder / stored.name
        if _content_of(path) == stored.content:
            try:
                verify(path)
                return
            except CheckpointError:
                remove_folder(path)
        # The logs first: a checkpoint without them would be gone on from.
        fetch_logs(store, stored, self.folder)
        fetch_checkpoint(store, stored, self.folder)

    def fetch_step(self, step: int) -> None:
        """Brings one checkpoint of the store into the folder. CheckpointError if it has none."""
        reader = self._connect()
        for stored in reversed(reader.read().checkpoints):
            if stored.step == step:
                make_folder(self.folder)
                fetch_checkpoint(reader.store, stored, self.folder)
                return
        raise CheckpointError(
            f"{self.url}: expected a checkpoint of step {step}, found none. It was removed."
        )

    def _write_record(self, attempt: int) -> None:
        """Notes the attempt up to which every checkpoint of the folder counts."""
        make_folder(self.folder)
        write_json(self.folder / RECORD_FILE, {"url": str(self.url), "attempt": attempt})

    def _move_aside(self, index: StoreIndex, local_attempt: int) -> None:
        """Hides the checkpoints of this folder which a newer attempt has not gone on from."""
        abandoned = [
            path for path in listing(self.folder) if not index.counts(step_of(path), local_attempt)
        ]
        if not abandoned:
            return
        aside = self.folder / f"{ABANDONED_PREFIX}{local_attempt:07d}-{time.time_ns()}"
        make_folder(aside)
        for path in abandoned:
            path.rename(aside / path.name)
        names = list_some([path.name for path in abandoned], MAX_NAMES_SHOWN)
        warnings.warn(
            f"{self.what}: attempt {index.newest_attempt} of this run went on elsewhere without "
            f"{names} of this machine, which are now in {aside}. Remove them when you need them "
            "no more.",
            Notice,
            stacklevel=user_stacklevel(),
        )

    def start_over(self, files: Iterable[str]) -> None:
        """The next run begins anew: what the store holds of another one no longer counts.

        Its checkpoints are removed when the first one of the new run is there; `files` at once.
        """
        self._starts_over = True
        self._replaced_files = list(files)

    def check_no_other_run(self, resumed_step: int | None) -> None:
        """FileExistsError if the store holds checkpoints that would be taken for this run's.

        `resumed_step` is the step that this run goes on from; None for a new one.
        """
        if self._starts_over:
            return
        index = self._connect().read()
        damaged = index.broken.keys() - index.cut_off
        if resumed_step is None and (index.checkpoints or damaged):
            newest = index.checkpoints[-1].name if index.checkpoints else "damaged ones"
            raise FileExistsError(
                f"{self.what}: {self.url} holds checkpoints of another run, up to {newest}. Go on "
                'from them with fit(resume="auto"), or name another place.'
            )
        # Later ones than the newest that could be used are damaged, or an older attempt that still
        # lives has just made them: they will not count.
        if resumed_step is None or self._has_fetched:
            return
        later = [
            stored.name
            for stored in index.checkpoints
            if stored.step > resumed_step and stored.health.is_good and is_whole(index, stored)
        ]
        if later:
            raise FileExistsError(
                f"{self.what}: this run goes on from step {resumed_step}, and {self.url} holds "
                f"checkpoints of later steps, up to {later[-1]}. Go on from the newest with "
                'fit(resume="auto"), or name another place.'
            )

    # During a run.

    def begin(self, resumed_step: int | None) -> None:
        """Makes this process the one that writes to the store, and starts to upload."""
        reader = self._connect()
        start = FROM_THE_BEGINNING if resumed_step is None else resumed_step
        self._attempt = claim_attempt(reader, start)
        self._write_record(self._attempt)
        self._refused = {
            path.name: stamp
            for path, stamp in self._complete_checkpoints()
            if step_of(path) > start
        }
        reader.store.remove(self._replaced_files)
        self._replaced_files = []
        self._starts_over = False
        self._has_fetched = False
        self._end_of_uploads = None
        self._refusal = None
        self._has_warned.clear()
        self._start_thread()

    def notify(self) -> None:
        """Something new is in the folder. Returns at once."""
        self._requests += 1
        self._wake.set()

    def uploaded(self) -> list[Path]:
        """The checkpoints of the folder that are in the store, verified."""
        paths = []
        for path, stamp in self._complete_checkpoints():
            if self._uploaded.get(path.name) == stamp:
                paths.append(path)
        return paths

    def warn_of_problems(self) -> None:
        """A Notice, once a run, if the store does not take what is made."""
        if self._refusal is not None:
            self._warn_once("refusal", self._refusal)
        if self._end_of_uploads is not None:
            self._warn_once("end", f"{self._end_of_uploads}. Its files stay in {self.folder}")
        elif self._problem is not None:
            self._warn_once(
                "problem",
                f"{self._problem}. Training goes on; what it makes waits in {self.folder}, and is "
                "uploaded when the store takes it",
            )

    def _warn_once(self, kind: str, text: str) -> None:
        if kind not in self._has_warned:
            self._has_warned.add(kind)
            warnings.warn(f"{self.what}: {text}", Notice, stacklevel=user_stacklevel())

    # After it.

    def finish(self, on_arrival: Callable[[], object] = lambda: None, *, show: bool = True) -> None:
        """Waits until everything is uploaded, and ends the uploads.

        `on_arrival` is called when something has arrived: it may remove what is no longer needed.
        After `give_up_after_s` without an arrival, a Notice names what is not in the store.
        """
        if self._attempt == 0 or self._process != os.getpid():
            return  # the run never began, or this is a fork of the process that uploads
        self._start_thread()
        progress = _ProgressLine(self, show=show)
        try:
            self._wait_for_uploads(on_arrival, progress)
        finally:
            progress.close()
            self._stop.set()
            self._wake.set()
        if self._end_of_uploads is None and self._served < self._requests:
            missing = list_some(self.missing(), MAX_NAMES_SHOWN)
            reason = "" if self._problem is None else f" ({self._problem})"
            warnings.warn(
                f"{self.what}: not uploaded to {self.url}, where nothing arrived for "
                f"{self.give_up_after_s:g} s{reason}: {missing}. All of it is in {self.folder}: "
                'fit(resume="auto") on this machine uploads it.',
                Notice,
                stacklevel=user_stacklevel(),
            )
            return
        self.warn_of_problems()
        if self._thread is not None:
            self._thread.join(self.give_up_after_s)

    def _wait_for_uploads(
        self, on_arrival: Callable[[], object], progress: "_ProgressLine"
    ) -> None:
        self.notify()
        self._last_arrival = time.monotonic()
        count = -1
        while self._end_of_uploads is None:
            is_done = self._served >= self._requests
            if count != self._arrived_count:
                count = self._arrived_count
                on_arrival()
            if is_done:
                return
            if time.monotonic() - self._last_arrival > self.give_up_after_s:
                return
            progress.show()
            time.sleep(POLL_S)

    def missing(self) -> list[str]:
        """What is in the folder and not in the store."""
        names = []
        for path, stamp in self._complete_checkpoints():
            if stamp not in (self._uploaded.get(path.name), self._refused.get(path.name)):
                names.append(path.name)
        for path in self._other_files():
            name = path.relative_to(self.folder).as_posix()
            if self._files.get(name) != _stamp(path):
                names.append(name)
        return names

    # The thread.

    def _start_thread(self) -> None:
        if self._thread is not None and self._thread.is_alive() and not self._stop.is_set():
            return
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._process = os.getpid()
        store = Store(self.url, self.what, self.retries, wait=self._stop.wait)
        reader = IndexReader(store)
        self._thread = threading.Thread(
            target=self._work, args=(reader, self._stop), name="halfstep-uploads", daemon=True
        )
        self._thread.start()

    def _work(self, reader: IndexReader, stop: threading.Event) -> None:
        failures = 0
        while not stop.is_set():
            request = self._requests
            try:
                self._upload_all(reader, stop)
            except OlderAttemptError as error:
                self._end_of_uploads = str(error)
                return
            except Exception as error:
                # Whatever it is, training goes on, and it is tried again.
                self._problem = self._describe(error)
                pause_s = min(FIRST_PAUSE_S * 2**failures, LONGEST_PAUSE_S)
                failures += 1
                self._wake.wait(pause_s)
                self._wake.clear()
                continue
            failures = 0
            self._problem = None
            self._served = request
            self._wake.wait(IDLE_S)
            self._wake.clear()

    def _upload_all(self, reader: IndexReader, stop: threading.Event) -> None:
        """Brings to the store what it lacks: checkpoints from the newest on, then other files."""
        index = reader.read()
        if index.newest_attempt > self._attempt:
            raise OlderAttemptError(
                f"attempt {index.newest_attempt} of this run writes to {self.url}, this one is "
                f"attempt {self._attempt}: it uploads nothing more"
            )
        while not stop.is_set():
            waiting = self._next_checkpoint(index)
            if waiting is None:
                break
            path, stamp = waiting
            try:
                stored = commit_checkpoint(reader, self._attempt, path, self._read_logs())
            except (CheckpointError, FileNotFoundError, StoreError) as error:
                if _stamp(path / MANIFEST_FILE) != stamp:
                    continue  # it was removed or replaced meanwhile
                if isinstance(error, StoreError):
                    raise
                self._refused[path.name] = stamp
                self._refusal = f"a checkpoint is not uploaded: {self._describe(error)}"
                continue
            index.checkpoints.append(stored)
            self._uploaded[path.name] = stamp
            self._note_arrival()
        for path in self._other_files():
            if not stop.is_set():
                self._upload_file(reader.store, path)
        try:
            if prune_store(reader, self._attempt, self.keep, self.protected_steps):
                self._note_arrival()
        except StoreError as error:
            # Some may write and not remove. What is to be there is there.
            self._refusal = f"older checkpoints stay in the store: {self._describe(error)}"

    def _next_checkpoint(self, index: StoreIndex) -> tuple[Path, FileStamp] | None:
        """The newest checkpoint that is not in the store: older ones may be superfluous by then."""
        in_store = {
            (stored.name, stored.content) for stored in index.checkpoints if is_whole(index, stored)
        }
        for path, stamp in reversed(list(self._complete_checkpoints())):
            if stamp in (self._uploaded.get(path.name), self._refused.get(path.name)):
                continue
            if (path.name, _content_of(path)) not in in_store:
                return path, stamp
            self._uploaded[path.name] = stamp
        return None

    def _upload_file(self, store: Store, path: Path) -> None:
        name = path.relative_to(self.folder).as_posix()
        stamp = _stamp(path)
        if stamp is None or self._files.get(name) == stamp:
            return
        try:
            if path.suffix in LOG_SUFFIXES:
                content = path.read_bytes()  # it may grow while it is uploaded
                store.upload(content, name, hash_bytes(content))
            else:
                store.upload(path, name, hash_file(path))
        except (CheckpointError, FileNotFoundError):
            return  # it was written or removed meanwhile: the next look uploads it
        self._files[name] = stamp
        self._note_arrival()

    def _read_logs(self) -> dict[str, bytes]:
        """The logs as they are, in whole lines."""
        logs = {}
        for path in self._other_files():
            if path.suffix in LOG_SUFFIXES:
                content = path.read_bytes()
                if path.suffix in LINE_SUFFIXES:
                    content = content[: content.rfind(b"\n") + 1]
                logs[path.relative_to(self.folder).as_posix()] = content
        return logs

    def _note_arrival(self) -> None:
        self._last_arrival = time.monotonic()
        self._arrived_count += 1

    def _describe(self, error: Exception) -> str:
        if isinstance(error, StoreError | CheckpointError):
            return str(error).removeprefix(f"{self.what}: ")
        return f"{type(error).__name__}: {hide_credentials(str(error))}"

    # The folder.

    def _complete_checkpoints(self) -> Iterator[tuple[Path, FileStamp]]:
        for path in listing(self.folder):
            stamp = _stamp(path / MANIFEST_FILE)
            if stamp is not None and not path.name.endswith(REPLACEMENT_SUFFIX):
                yield path, stamp

    def _other_files(self) -> Iterator[Path]:
        """Every file of the folder that is of no checkpoint, no link, and not hidden."""
        checkpoints = {path.name for path in listing(self.folder)}
        for parent, folders, names in os.walk(self.folder):
            if Path(parent) == self.folder:
                folders[:] = [n for n in folders if n not in checkpoints | {ATTEMPTS_FOLDER}]
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(names):
                path = Path(parent, name)
                if not name.startswith(".") and not path.is_symlink() and path.is_file():
                    yield path

    def _connect(self) -> IndexReader:
        if self._reader is None:
            self._reader = IndexReader(Store(self.url, self.what, self.retries))
        return self._reader


class _ProgressLine:
    """Says on stderr what is still to be uploaded: one line in a terminal, a few elsewhere."""

    def __init__(self, mirror: StoreMirror, *, show: bool) -> None:
        self._mirror = mirror
        self._shows = show
        self._is_terminal = sys.stderr.isatty()
        self._next = time.monotonic() + SHOW_PROGRESS_AFTER_S
        self._has_shown = False

    def show(self) -> None:
        now = time.monotonic()
        if not self._shows or now < self._next:
            return
        self._next = now + (SHOW_PROGRESS_EVERY_S if self._is_terminal else PRINT_PROGRESS_EVERY_S)
        self._has_shown = True
        missing = self._mirror.missing()
        text = f"halfstep: uploading to {self._mirror.url}: "
        text += list_some(missing, MAX_NAMES_SHOWN) if missing else "clearing up"
        if self._is_terminal:
            sys.stderr.write(f"\r\x1b[K{text}")
        else:
            sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def close(self) -> None:
        if self._has_shown and self._is_terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def working_folder(url: StoreURL) -> Path:
    """The folder for a URL's run: in $HALFSTEP_OUT, else in $XDG_STATE_HOME/halfstep/out."""
    root = os.environ.get("HALFSTEP_OUT", "")
    if not root:
        state = os.environ.get("XDG_STATE_HOME", "")
        if not os.path.isabs(state):  # by the XDG standard, a relative one counts as unset
            state = os.path.join(os.path.expanduser("~"), ".local", "state")
        root = os.path.join(state, "halfstep", "out")
    return Path(os.path.abspath(root), local_name(url))


def _stamp(path: Path) -> FileStamp | None:
    """None if there is no such file."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return FileStamp(stat.st_ino, stat.st_size, stat.st_mtime_ns)


def _content_of(checkpoint: Path) -> str | None:
    """The checksum of a checkpoint's manifest, which has those of its files; None without one."""
    try:
        return hashlib.sha256((checkpoint / MANIFEST_FILE).read_bytes()).hexdigest()
    except OSError:
        return None
