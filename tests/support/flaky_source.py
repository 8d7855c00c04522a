"""A store with a file system of its own for fsspec, whose answers can fail in every way.

`flaky://bucket/name`. The objects are in memory; each request is counted, and `fault` may raise or
change an answer.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import fsspec
from fsspec import AbstractFileSystem

PROTOCOL = "flaky"

# path, start, end, the right answer → the answer
Fault = Callable[[str, int, int, bytes], bytes]


class FlakySource(AbstractFileSystem):
    """Objects by path. Several instances share them, as several clients share a store."""

    protocol = PROTOCOL
    objects: ClassVar[dict[str, bytes]] = {}
    etags: ClassVar[dict[str, str]] = {}
    """Where an ETag is not the MD5 of the content."""
    fault: ClassVar[Fault | None] = None
    list_fault: ClassVar[Callable[[], None] | None] = None
    requests: ClassVar[list[tuple[str, int, int]]] = []
    delay_s: ClassVar[float] = 0.0
    log: ClassVar[str | None] = None
    """A file that gets a line for each read, for other processes."""

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return str(path).removeprefix(f"{PROTOCOL}://")

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        if FlakySource.list_fault is not None:
            FlakySource.list_fault()
        if path in self.objects:
            content = self.objects[path]
            etag = self.etags.get(path, hashlib.md5(content).hexdigest())
            return {"name": path, "size": len(content), "type": "file", "ETag": f'"{etag}"'}
        if any(name.startswith(f"{path}/") for name in self.objects):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def find(self, path: str, *args: Any, detail: bool = False, **kwargs: Any) -> Any:
        names = [name for name in self.objects if name.startswith(f"{path}/")]
        return {name: self.info(name) for name in names}

    def glob(self, path: str, **kwargs: Any) -> Any:
        import fnmatch

        return sorted(fnmatch.filter(self.objects, path))

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        content = self.objects[path]
        start = start or 0
        end = len(content) if end is None else end
        FlakySource.requests.append((path, start, end))
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{path} {start} {end}\n")
        time.sleep(self.delay_s)
        answer = content[start:end]
        return answer if FlakySource.fault is None else FlakySource.fault(path, start, end, answer)


@contextmanager
def flaky_source(objects: dict[str, bytes]) -> Iterator[type[FlakySource]]:
    """The store with these objects and no faults, as long as the block lasts."""
    fsspec.register_implementation(PROTOCOL, FlakySource, clobber=True)
    FlakySource.objects = dict(objects)
    FlakySource.etags = {}
    FlakySource.fault = None
    FlakySource.list_fault = None
    FlakySource.requests = []
    FlakySource.delay_s = 0.0
    FlakySource.log = None
    try:
        yield FlakySource
    finally:
        FlakySource.objects = {}
        FlakySource.fault = None
        FlakySource.list_fault = None


class FaultEvery:
    """A fault of each kind in turn, at every n-th request; counts them."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.count = 0
        self.faults = 0
        self.lock = threading.Lock()

    def __call__(self, path: str, start: int, end: int, answer: bytes) -> bytes:
        with self.lock:
            self.count += 1
            is_fault = self.count % self.every == 0
            if is_fault:
                self.faults += 1
            kind = self.faults % 4
        if not is_fault:
            return answer
        if kind == 0:
            raise OSError(5, "Internal Server Error (500)")
        if kind == 1:
            raise ConnectionResetError(104, "Connection reset by peer")
        if kind == 2:
            raise TimeoutError("Read timed out")
        return answer[: len(answer) // 2]


def seeded_bytes(seed: int, size: int) -> bytes:
    """The same bytes in every process."""
    block = hashlib.sha256(str(seed).encode()).digest()
    return (block * (size // len(block) + 1))[:size]


def count_log(path: os.PathLike[str]) -> int:
    """The bytes that were read, by the log of a store."""
    total = 0
    with open(path) as file:
        for line in file:
            _, start, end = line.rsplit(" ", 2)
            total += int(end) - int(start)
    return total
