"""Copies a folder or an object of a store into a folder of the cache: all of it, or nothing of it.

Each URL has a folder of its own, with

    copy-DIGEST/   what was listed under that digest: manifest.json, and the objects below files/
    partial/       a copy under way: files/, and journal.jsonl, which says what of them is right

A copy takes its name when every object was checked and written. A copy that was killed goes on
where it stood: its journal has the SHA-256 of each object, and of the first part of a large one.
"""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from halfstep.data.download.archive import ArchiveRefused, Inventory
from halfstep.data.download.byte_progress import byte_progress
from halfstep.data.download.store_reads import (
    StoppedReading,
    StoreObject,
    StoreReads,
    StoreUnreachable,
    now,
)
from halfstep.errors import Notice
from halfstep.storage.url import StoreURL, local_name
from halfstep.utils.atomic_files import make_folder, sync_folder, sync_tree, trash_folder
from halfstep.utils.files import read_json, write_json
from halfstep.utils.text import format_bytes, list_some, plural, printable

MANIFEST_FILE = "manifest.json"
MANIFEST_VERSION = 1
JOURNAL_FILE = "journal.jsonl"
FILES_FOLDER = "files"
PARTIAL_FOLDER = "partial"
COPY_PREFIX = "copy-"

OBJECTS_AT_ONCE = 16
BLOCK_BYTES = 4 << 20  # of one request; memory is bounded by OBJECTS_AT_ONCE · BLOCKS_AHEAD of them
BLOCKS_AHEAD = 4  # of one object
JOURNAL_EVERY_BYTES = 64 << 20  # a large object that was killed goes on after such a part
OBJECT_ATTEMPTS = 3  # for an object whose content is not what the store says of it
SILENT_WAIT_S = 2.0  # for another process that copies the same
MAX_OBJECTS = 50_000_000
MAX_NAMED = 5  # damaged files

DISK_ADVICE = (
    "Free some space, or set HALFSTEP_CACHE to a folder on a larger disk. What is copied already "
    "stays there, and the next start goes on with it"
)


@dataclass(frozen=True)
class CopiedObject:
    """An object as the manifest names it."""

    name: str
    size: int
    version: str
    sha256: str


@dataclass(frozen=True)
class StoreCopy:
    """A complete copy: its files, below a folder, and whether the URL names a single object."""

    folder: Path
    objects: tuple[CopiedObject, ...]
    is_folder: bool

    @property
    def path(self) -> Path:
        """The local path of what the URL names."""
        files = self.folder / FILES_FOLDER
        return files if self.is_folder else files / self.objects[0].name


def copy_store(
    url: StoreURL, cache: Path, *, what: str = "data", progress: bool | None = None
) -> StoreCopy:
    """A copy of what is at the URL now, below `cache`.

    The store is listed; what was copied before and has not changed is not read again. A store that
    cannot be reached leaves the newest copy to use, with a notice. Another process that copies the
    same is waited for.
    """
    root = cache / "stores" / local_name(url)
    make_folder(root.parent)
    reads = StoreReads(url, what)
    try:
        objects, is_folder = reads.list_objects()
    except StoreUnreachable as error:
        copy = _newest_copy(root)
        if copy is None:
            raise
        manifest = read_json(copy.folder / MANIFEST_FILE)
        message = f"{error}. The copy of {manifest['copied']} is used: {copy.folder}"
        warnings.warn(message, Notice, stacklevel=2)
        return copy
    _check_names(url, what, objects)

    folder = root / f"{COPY_PREFIX}{_digest(objects)}"
    with _one_at_a_time(root.with_name(f"{root.name}.lock"), url, what):
        copy = _read_copy(folder)
        if copy is not None and not _is_whole(copy):
            warnings.warn(
                f"{what}: files were changed in {folder}: {url} is copied again",
                Notice,
                stacklevel=2,
            )
            trash_folder(folder)
            copy = None
        if copy is None:
            make_folder(root)
            copy = _Copying(reads, root, folder, objects, is_folder, progress).run()
    return copy


@contextlib.contextmanager
def _one_at_a_time(lock_file: Path, url: StoreURL, what: str) -> Iterator[None]:
    """Waits while another process copies from the same URL, and says so."""
    from filelock import FileLock, Timeout

    lock = FileLock(lock_file)
    try:
        lock.acquire(timeout=SILENT_WAIT_S)
    except Timeout:
        message = f"{what}: another process copies {url} at the moment: waiting for it"
        warnings.warn(message, Notice, stacklevel=4)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _digest(objects: list[StoreObject]) -> str:
    """A name for the state of a listing."""
    listing = [[item.name, item.size, item.version] for item in objects]
    return hashlib.sha256(json.dumps(listing).encode(errors="surrogatepass")).hexdigest()[:16]


def _check_names(url: StoreURL, what: str, objects: list[StoreObject]) -> None:
    """Refuses names that lead out of the folder, or of which two are one file on some disk."""
    inventory = Inventory(limit_bytes=1 << 62, limit_files=MAX_OBJECTS)
    for item in objects:
        try:
            inventory.add_name(item.name, is_folder=False)
        except ArchiveRefused as refused:
            raise ValueError(
                f"{what}: {url}: the object {printable(repr(item.name))} is refused: {refused}. "
                "Nothing was copied. Rename it in the store, or name a folder without it"
            ) from None


# Complete copies


def _read_copy(folder: Path) -> StoreCopy | None:
    """The copy in that folder; None where there is none."""
    manifest = read_json(folder / MANIFEST_FILE)
    if manifest is None:
        return None
    if manifest["version"] != MANIFEST_VERSION:
        raise ValueError(
            f"{folder}: expected a copy of version {MANIFEST_VERSION}, "
            f"got {manifest['version']!r}. Remove the folder"
        )
    objects = tuple(CopiedObject(**entry) for entry in manifest["objects"])
    return StoreCopy(folder, objects, manifest["is_folder"])


def _is_whole(copy: StoreCopy) -> bool:
    """Whether every file is there, in its size."""
    files = copy.folder / FILES_FOLDER
    try:
        return all(os.path.getsize(files / item.name) == item.size for item in copy.objects)
    except OSError:
        return False


def _newest_copy(root: Path) -> StoreCopy | None:
    copies = []
    for folder in root.glob(f"{COPY_PREFIX}*"):
        manifest = read_json(folder / MANIFEST_FILE)
        if manifest is not None:
            copies.append((manifest["copied"], folder))
    for _, folder in sorted(copies, reverse=True):
        copy = _read_copy(folder)
        if copy is not None and _is_whole(copy):
            return copy
    return None


def checked_copy(url: StoreURL, cache: Path, *, what: str = "data") -> StoreCopy:
    """A copy whose files all have the SHA-256 that they were copied with; made anew if they do not.

    Reads every file.
    """
    copy = copy_store(url, cache, what=what)
    damaged = find_damage(copy)
    if damaged:
        names = printable(list_some(damaged, MAX_NAMED))
        warnings.warn(
            f"{what}: {plural(len(damaged), 'file')} in {copy.folder} changed since they were "
            f"copied: {names}. {url} is copied again",
            Notice,
            stacklevel=2,
        )
        trash_folder(copy.folder)
        copy = copy_store(url, cache, what=what)
    return copy


def find_damage(copy: StoreCopy) -> list[str]:
    """The names of the files whose content is not what was copied."""
    damaged = []
    for item in copy.objects:
        with open(copy.folder / FILES_FOLDER / item.name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != item.sha256:
                damaged.append(item.name)
    return damaged


# A copy under way


class _Copying:
    """One copy, by threads: some for objects, and some for the blocks of large ones."""

    def __init__(
        self,
        reads: StoreReads,
        root: Path,
        folder: Path,
        objects: list[StoreObject],
        is_folder: bool,
        progress: bool | None,
    ) -> None:
        self.reads = reads
        self.root = root
        self.folder = folder
        self.objects = objects
        self.is_folder = is_folder
        self.progress = progress
        self.partial = root / PARTIAL_FOLDER
        self.files = self.partial / FILES_FOLDER
        self.lock = threading.Lock()
        self.bytes_here = 0
        self.show: Any = None
        self.blocks = ThreadPoolExecutor(OBJECTS_AT_ONCE, "halfstep-blocks")
        # Whether an ETag that looks like an MD5 is none: of objects that the store encrypts.
        self.etags_are_no_md5 = False

    def run(self) -> StoreCopy:
        """Copies what is missing; the folder has its name at the end."""
        with self._disk_errors():
            make_folder(self.files)
            self._remove_unlisted()
            journal_lines = self._read_journal()
            earlier = _newest_copy(self.root)
            self._link_unchanged(earlier, journal_lines)
            self._check_free_space()
            with open(self.partial / JOURNAL_FILE, "a", encoding="utf-8") as journal:
                copied = self._copy_all(journal, journal_lines)
            self._finish(copied)
        if earlier is not None:
            self._announce_change(earlier)
        return StoreCopy(self.folder, tuple(copied), self.is_folder)

    def _copy_all(
        self, journal: IO[str], journal_lines: dict[str, dict[str, Any]]
    ) -> list[CopiedObject]:
        total = sum(item.size for item in self.objects)
        title = f"{self.reads.what}: {self.reads.url}, {plural(len(self.objects), 'object')}"
        copied: list[CopiedObject | None] = [None] * len(self.objects)
        numbers = iter(range(len(self.objects)))

        def copy_next_ones() -> None:
            while not self.reads.stop.is_set():
                with self.lock:
                    number = next(numbers, None)
                if number is None:
                    return
                item = self.objects[number]
                copied[number] = self._copy_object(item, journal, journal_lines.get(item.name))

        pool = ThreadPoolExecutor(OBJECTS_AT_ONCE, "halfstep-objects")
        with byte_progress(title, total, self.progress, lines=True) as self.show:
            futures = [pool.submit(copy_next_ones) for _ in range(OBJECTS_AT_ONCE)]
            try:
                _wait_until_one_fails(futures)
            finally:
                self.reads.stop.set()
                pool.shutdown(cancel_futures=True)
                self.blocks.shutdown(cancel_futures=True)
        whole = [item for item in copied if item is not None]
        assert len(whole) == len(self.objects)
        return whole

    def _copy_object(
        self, item: StoreObject, journal: IO[str], line: dict[str, Any] | None
    ) -> CopiedObject:
        """Copies one object, from where its journal line says; returns it with its SHA-256."""
        path = self.files / item.name
        path.parent.mkdir(parents=True, exist_ok=True)
        start, sha256, md5 = self._known_start(item, path, line)
        if line is not None and line.get("whole") and start == item.size:
            self._count(item.size)
            return CopiedObject(item.name, item.size, item.version, line["sha256"])

        earlier_digests: set[str] = set()
        for _ in range(OBJECT_ATTEMPTS):
            self._count(start)
            if not start:  # an earlier copy may share the file
                path.unlink(missing_ok=True)
            with open(path, "r+b" if start else "wb") as file:
                file.truncate(start)
                file.seek(start)
                next_entry = start + JOURNAL_EVERY_BYTES
                position = start
                for block in self._read_blocks(item, start):
                    file.write(block)
                    sha256.update(block)
                    md5.update(block)
                    position += len(block)
                    self._count(len(block))
                    if next_entry <= position < item.size:
                        file.flush()
                        self._write_journal(journal, item, sha256.hexdigest(), position)
                        next_entry = position + JOURNAL_EVERY_BYTES
            digest = sha256.hexdigest()
            if self._is_right(item, digest, md5.hexdigest(), earlier_digests):
                self._write_journal(journal, item, digest, item.size, whole=True)
                return CopiedObject(item.name, item.size, item.version, digest)
            self._count(-item.size)
            earlier_digests.add(digest)
            start = 0
            sha256 = hashlib.sha256()
            md5 = _new_md5()
        raise OSError(
            f"{self.reads.what}: {printable(item.name)} of {self.reads.url} changes while it is "
            "copied, or comes damaged. Start again when nobody writes there"
        )

    def _read_blocks(self, item: StoreObject, start: int) -> Iterator[bytes]:
        """The content in order; of a large object several blocks are read at once."""
        starts = range(start, item.size, BLOCK_BYTES)
        if len(starts) <= 1:
            for begin in starts:
                yield self.reads.read(item, begin, item.size)
            return
        futures: list[Future[bytes]] = []
        try:
            for begin in starts:
                end = min(begin + BLOCK_BYTES, item.size)
                futures.append(self.blocks.submit(self.reads.read, item, begin, end))
                if len(futures) == BLOCKS_AHEAD:
                    yield futures.pop(0).result()
            while futures:
                yield futures.pop(0).result()
        finally:
            for future in futures:
                future.cancel()

    def _is_right(
        self, item: StoreObject, sha256: str, md5: str, earlier_digests: set[str]
    ) -> bool:
        """Whether what was read is what the store has, by its MD5 or by asking it again."""
        if item.md5 is not None and not self.etags_are_no_md5:
            if md5 == item.md5:
                return True
            # Of an encrypted object the ETag is no MD5. Two copies of the same bytes say so.
            if sha256 not in earlier_digests:
                return False
            self.etags_are_no_md5 = True
        now_there = self.reads.look_again(item)
        return (now_there.size, now_there.version) == (item.size, item.version)

    # What is here already

    def _known_start(
        self, item: StoreObject, path: Path, line: dict[str, Any] | None
    ) -> tuple[int, Any, Any]:
        """How many bytes of the object are here and right, and their hashes."""
        if line is not None and (line["size"], line["version"]) == (item.size, item.version):
            sha256 = hashlib.sha256()
            md5 = _new_md5()
            with contextlib.suppress(OSError), open(path, "rb") as file:
                left = line["bytes"]
                while left:
                    chunk = file.read(min(left, BLOCK_BYTES))
                    if not chunk:
                        break
                    sha256.update(chunk)
                    md5.update(chunk)
                    left -= len(chunk)
                if not left and sha256.hexdigest() == line["sha256"]:
                    return line["bytes"], sha256, md5
        return 0, hashlib.sha256(), _new_md5()

    def _remove_unlisted(self) -> None:
        """Removes what was copied and is no longer listed, and folders that are empty."""
        names = {item.name for item in self.objects}
        for parent, _, file_names in os.walk(self.files, topdown=False):
            for name in file_names:
                path = Path(parent, name)
                if path.relative_to(self.files).as_posix() not in names:
                    path.unlink()
            if parent != str(self.files) and not os.listdir(parent):
                os.rmdir(parent)

    def _read_journal(self) -> dict[str, dict[str, Any]]:
        """The newest line of each object; a last line that was cut off by a kill does not count."""
        lines: dict[str, dict[str, Any]] = {}
        path = self.partial / JOURNAL_FILE
        if not path.exists():
            return lines
        for text in path.read_text("utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                lines[line["name"]] = line
        # Behind half a line, the next one would be lost too.
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n")
        return lines

    def _write_journal(
        self, journal: IO[str], item: StoreObject, sha256: str, count: int, *, whole: bool = False
    ) -> None:
        line = {
            "name": item.name,
            "size": item.size,
            "version": item.version,
            "bytes": count,
            "sha256": sha256,
            "whole": whole,
        }
        with self.lock:
            journal.write(json.dumps(line) + "\n")
            journal.flush()

    def _link_unchanged(
        self, earlier: StoreCopy | None, journal_lines: dict[str, dict[str, Any]]
    ) -> None:
        """Takes what has not changed since an earlier copy from there, without a second copy."""
        if earlier is None:
            return
        known = {item.name: item for item in earlier.objects}
        for item in self.objects:
            before = known.get(item.name)
            if before is None or not item.version or item.name in journal_lines:
                continue
            if (before.size, before.version) != (item.size, item.version):
                continue
            target = self.files / item.name
            target.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(OSError):  # a disk without links: it is copied again
                os.link(earlier.folder / FILES_FOLDER / item.name, target)
                line = {**asdict(before), "bytes": before.size, "whole": True}
                journal_lines[item.name] = line

    def _check_free_space(self) -> None:
        here = sum(path.stat().st_size for path in self.files.rglob("*") if path.is_file())
        needed = sum(item.size for item in self.objects) - here
        free = shutil.disk_usage(self.partial).free
        if needed > free:
            raise OSError(
                errno.ENOSPC,
                f"{self.reads.what}: {self.reads.url} needs {format_bytes(needed)} more, and "
                f"{self.root} has {format_bytes(free)} free. {DISK_ADVICE}",
            )

    # The end

    def _finish(self, copied: list[CopiedObject]) -> None:
        """Flushes all to the disk, and gives it its name."""
        sync_tree(self.files)
        manifest = {
            "version": MANIFEST_VERSION,
            "url": str(self.reads.url),
            "copied": now(),
            "is_folder": self.is_folder,
            "objects": [asdict(item) for item in copied],
        }
        write_json(self.partial / MANIFEST_FILE, manifest)
        os.rename(self.partial, self.folder)
        sync_folder(self.root)
        # Not before: without it a copy that is killed here would be read again.
        (self.folder / JOURNAL_FILE).unlink()

    def _announce_change(self, earlier: StoreCopy) -> None:
        before = {item.name: (item.size, item.version) for item in earlier.objects}
        present = {item.name: (item.size, item.version) for item in self.objects}
        new = len(present.keys() - before.keys())
        gone = len(before.keys() - present.keys())
        changed = sum(before[name] != present[name] for name in before.keys() & present.keys())
        warnings.warn(
            f"{self.reads.what}: {self.reads.url} has changed since it was copied: {new:,} new, "
            f"{changed:,} changed, {gone:,} gone. The copy of before stays in {earlier.folder}",
            Notice,
            stacklevel=4,
        )

    def _count(self, count: int) -> None:
        with self.lock:
            self.bytes_here += count
            self.show(self.bytes_here)

    @contextlib.contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Gives the errors of this machine's disk an advice. The store's have no number."""
        try:
            yield
        except OSError as error:
            is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            if not is_full or DISK_ADVICE in str(error):
                raise
            raise OSError(
                error.errno,
                f"{self.reads.what}: {self.reads.url} cannot be copied to {self.root}: "
                f"{error.strerror}. {DISK_ADVICE}",
            ) from error


def _new_md5() -> Any:
    """For comparison with what the store says, not for security."""
    return hashlib.md5(usedforsecurity=False)


def _wait_until_one_fails(futures: list[Future[None]]) -> None:
    """Returns when all are done; raises the first error of any of them, at once."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    errors = [error for error in (future.exception() for future in done) if error is not None]
    for error in errors:
        if not isinstance(error, StoppedReading):
            raise error
    for error in errors:
        raise error
