"""Objects in a store: listed, read, uploaded and created, with retries, and verified.

A store fails now and then: it answers 500, resets connections, cuts answers short. Every call here
tries again a few times, and waits longer each time. An object counts as uploaded when the store has
its size and its content: the checksum that the store itself computed agrees, or it was read back.
"""

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from halfstep.checkpoint.manifest import FileEntry
from halfstep.errors import CheckpointError, StoreError
from halfstep.storage.private_random import STORE_PACKAGES, PrivateRandom
from halfstep.storage.url import StoreURL, hide_credentials, open_filesystem
from halfstep.utils.text import first_line

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

Result = TypeVar("Result")

READ_BYTES = 8 << 20  # of one request; one that fails costs no more

# In these stores, folders are nothing but the beginnings of names.
BUCKET_SCHEMES = {"s3", "s3a", "obs", "gs", "gcs", "az", "abfs", "oss", "memory"}

# Errors that waiting does not mend, by name where the class is in an optional package.
PERMANENT_ERRORS = {"NoCredentialsError", "PartialCredentialsError", "NoRegionError"}

# S3 takes larger files in parts of this size, and computes its checksum part by part.
PART_BYTES = 64 << 20


@dataclass(frozen=True)
class RetryPolicy:
    """How often a call is tried, and how long it waits in between: twice as long each time."""

    tries: int = 5
    first_delay_s: float = 0.2
    max_delay_s: float = 10.0
    max_total_s: float = 40.0
    """No new try after this time: the libraries of some stores try for long by themselves."""

    def delays(self) -> Iterator[float]:
        """Before each try but the first. At random a bit shorter, so that runs do not keep step."""
        for index in range(self.tries - 1):
            longest = min(self.first_delay_s * 2**index, self.max_delay_s)
            yield longest * random.Random().uniform(0.5, 1.0)


@dataclass(frozen=True)
class StoredObject:
    """What a listing says about an object."""

    size: int
    etag: str
    """The store's checksum or version of the content; empty where it has none."""


class Store:
    """The objects below a URL, by their names relative to it."""

    def __init__(
        self,
        url: StoreURL,
        what: str,
        retries: RetryPolicy | None = None,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        self.url = url
        self.what = what
        self.retries = retries or RetryPolicy()
        self.filesystem: AbstractFileSystem = open_filesystem(url, what)
        self._root: str = self.filesystem._strip_protocol(url.path)
        self._wait = wait
        self._private_random = PrivateRandom(STORE_PACKAGES)

    def list(self, folder: str = "") -> dict[str, StoredObject]:
        """All objects below a folder, in order of their names."""
        root = self._path(folder) if folder else self._root

        def find() -> dict[str, StoredObject]:
            try:
                infos = self.filesystem.find(root, detail=True)
            except FileNotFoundError:
                return {}
            objects = {}
            for path, info in sorted(infos.items()):
                if not path.startswith(f"{root}/"):
                    continue
                etag = str(info.get("ETag", info.get("mtime", info.get("created", ""))))
                objects[path[len(self._root) + 1 :]] = StoredObject(int(info["size"]), etag)
            return objects

        return self._try("list", folder or ".", find)

    def read(self, name: str) -> bytes:
        """The content of a small object. FileNotFoundError if it is not there."""
        return self._try("read", name, lambda: self._read(name))

    def read_chunks(self, name: str, size: int) -> Iterator[bytes]:
        """The first `size` bytes of an object, piece by piece."""
        for start in range(0, size, READ_BYTES):
            end = min(start + READ_BYTES, size)
            yield self._try("read", name, partial(self._read_range, name, start, end))

    def upload(self, source: Path | bytes, name: str, entry: FileEntry) -> None:
        """Uploads a file or bytes, and verifies what the store has. Skips what it has already."""
        is_s3 = "s3" in self.filesystem.protocol
        sha256, etag = _hash(source, with_etag=is_s3)
        if sha256 != entry.sha256:
            raise CheckpointError(
                f"{source if isinstance(source, Path) else name}: expected sha256 "
                f"{entry.sha256[:16]}…, found {sha256[:16]}…. The file was changed or is damaged."
            )

        def put_and_verify() -> None:
            if self._has(name, entry, etag):
                return
            self._make_folder(name)
            options = {"chunksize": PART_BYTES} if is_s3 else {}
            if isinstance(source, Path):
                self.filesystem.put_file(str(source), self._path(name), **options)
            else:
                self.filesystem.pipe_file(self._path(name), source, **options)
            if not self._has(name, entry, etag):
                raise OSError("what arrived is not what was sent")

        self._try("write", name, put_and_verify)

    def create(self, name: str, content: bytes) -> bool:
        """Creates an object that is not there: True. False if something else has the name.

        After an error nobody knows whether the store took it, so it is read back in any case.
        """

        def create_and_read() -> bool:
            try:
                self._make_folder(name)
                self._create(name, content)
            except FileExistsError:
                pass
            except Exception:
                if not self.filesystem.exists(self._path(name)):
                    raise
            return self._read(name) == content

        return self._try("create", name, create_and_read)

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects, one after the other. What is gone already is no error."""
        for name in names:
            self._try("remove", name, partial(self._remove, name))

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.filesystem.rm_file(self._path(name))
        if self.url.scheme not in BUCKET_SCHEMES:
            # The folder goes with its last file.
            with suppress(OSError):
                self.filesystem.rmdir(self._path(name).rpartition("/")[0])

    def _read(self, name: str) -> bytes:
        size = int(self.filesystem.info(self._path(name))["size"])
        return self._read_range(name, 0, size)

    def _read_range(self, name: str, start: int, end: int) -> bytes:
        if start == end:
            return b""
        content = bytes(self.filesystem.cat_file(self._path(name), start=start, end=end))
        if len(content) != end - start:
            raise OSError(f"expected {end - start} bytes, {len(content)} came")
        return content

    def _create(self, name: str, content: bytes) -> None:
        """Writes an object by the request of the store that fails when there is one."""
        from fsspec import AbstractFileSystem
        from fsspec.asyn import AsyncFileSystem

        path = self._path(name)
        has_request = isinstance(self.filesystem, AsyncFileSystem) or (
            type(self.filesystem).pipe_file is not AbstractFileSystem.pipe_file
        )
        try:
            if has_request:
                self.filesystem.pipe_file(path, content, mode="create")
            else:
                with self.filesystem.open(path, "xb") as file:
                    file.write(content)
        except (TypeError, ValueError, NotImplementedError):
            # A store without such a request: asked first, and read back by the caller.
            if self.filesystem.exists(path):
                raise FileExistsError(path) from None
            self.filesystem.pipe_file(path, content)

    def _has(self, name: str, entry: FileEntry, etag: str | None) -> bool:
        """Whether the store has an object of this content. `etag`: what S3 computes for it."""
        try:
            info = self.filesystem.info(self._path(name))
        except FileNotFoundError:
            return False
        if int(info["size"]) != entry.size:
            return False
        if etag is not None and str(info.get("ETag", "")).strip('"') == etag:
            return True

        # Other stores have no such checksum, and S3 has another one for what it encrypts.
        digest = hashlib.sha256()
        for start in range(0, entry.size, READ_BYTES):
            digest.update(self._read_range(name, start, min(start + READ_BYTES, entry.size)))
        return digest.hexdigest() == entry.sha256

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _make_folder(self, name: str) -> None:
        if self.url.scheme not in BUCKET_SCHEMES:
            self.filesystem.makedirs(self._path(name).rpartition("/")[0], exist_ok=True)

    def _try(self, action: str, name: str, call: Callable[[], Result]) -> Result:
        """Calls until there is a result, as often as the policy says, then raises StoreError.

        The error holds no secret, and has no cause whose text could.
        """
        delays = self.retries.delays()
        last_try = time.monotonic() + self.retries.max_total_s
        while True:
            try:
                return self._call(call)
            except FileNotFoundError as error:
                if action == "read":
                    raise FileNotFoundError(f"{self.url}/{name}: not there") from None
                reason: Exception = error
                delay = None
            except Exception as error:
                reason = error
                is_over = _is_permanent(error) or time.monotonic() > last_try
                delay = None if is_over else next(delays, None)
            if delay is None:
                raise StoreError(
                    f"{self.what}: cannot {action} {self.url}/{name}: {_describe(reason)}"
                ) from None
            self._wait(delay)

    def _call(self, call: Callable[[], Result]) -> Result:
        """Calls without a draw from the random generators of this process.

        What a library imports in its first call is seen only then. The main thread waits meanwhile,
        so its generators can be put back.
        """
        self._private_random.apply()
        if threading.current_thread() is not threading.main_thread():
            return call()
        state = random.getstate()
        try:
            return call()
        finally:
            random.setstate(state)


def hash_file(path: Path) -> FileEntry:
    """The size and sha256 of a file."""
    return FileEntry(path.stat().st_size, _hash(path)[0])


def hash_bytes(content: bytes) -> FileEntry:
    """The size and sha256 of bytes."""
    return FileEntry(len(content), _hash(content)[0])


def _hash(source: Path | bytes, *, with_etag: bool = False) -> tuple[str, str | None]:
    """The sha256, and the ETag that S3 gives the content."""
    sha256 = hashlib.sha256()
    part_md5s = []
    for part in _parts(source):
        part_md5 = hashlib.md5(usedforsecurity=False)
        for chunk in part:
            sha256.update(chunk)
            if with_etag:
                part_md5.update(chunk)
        part_md5s.append(part_md5)
    etag = None
    if with_etag and len(part_md5s) == 1:
        etag = part_md5s[0].hexdigest()
    elif with_etag:
        md5 = hashlib.md5(b"".join(part.digest() for part in part_md5s), usedforsecurity=False)
        etag = f"{md5.hexdigest()}-{len(part_md5s)}"
    return sha256.hexdigest(), etag


def _parts(source: Path | bytes) -> Iterator[Iterable[bytes]]:
    """The content in the parts that are uploaded, each in chunks."""
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    # s3fs sends as a whole what would be less than two parts.
    part_bytes = PART_BYTES if size >= 2 * PART_BYTES else 2 * PART_BYTES
    if isinstance(source, bytes):
        for start in range(0, max(size, 1), part_bytes):
            yield [source[start : start + part_bytes]]
        return
    with source.open("rb") as file:
        for _ in range(0, max(size, 1), part_bytes):
            yield _chunks(file, part_bytes)


def _chunks(file: BinaryIO, byte_count: int) -> Iterator[bytes]:
    """The next bytes of a file, in chunks."""
    while byte_count > 0 and (chunk := file.read(min(READ_BYTES, byte_count))):
        byte_count -= len(chunk)
        yield chunk


def _is_permanent(error: Exception) -> bool:
    return isinstance(error, PermissionError) or type(error).__name__ in PERMANENT_ERRORS


def _describe(error: Exception) -> str:
    text: Any = hide_credentials(first_line(error))
    return f"{type(error).__name__}: {text}"
