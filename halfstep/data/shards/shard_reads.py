"""The bytes of one shard while it is streamed: from a file, or from a store with blocks read ahead.

Nothing is kept: a shard of a store takes the memory of a few blocks.
"""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO

from halfstep.data.download.store_reads import StoreReads
from halfstep.data.shards.shard_names import is_in_store
from halfstep.storage.url import parse_store_url

BLOCK_BYTES = 4 << 20  # of one request to a store
BLOCKS_AHEAD = 4
THREADS = 8


class FileReads:
    """A shard on this machine."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file

    def read(self, offset: int, size: int) -> bytes:
        """The bytes from `offset` on; fewer only at the end."""
        self.file.seek(offset)
        return self.file.read(size)

    def forget(self, before: int) -> None:
        """Nothing to forget."""


class StoreShard:
    """A shard in a store; the blocks behind the one that is read are requested ahead."""

    def __init__(self, url: str, pool: ThreadPoolExecutor, what: str) -> None:
        self.reads = StoreReads(parse_store_url(url, what), what)
        objects, is_folder = self.reads.list_objects()
        if is_folder:
            raise ValueError(f"{what}: expected a tar shard at {url}, found a folder")
        self.item = objects[0]
        self.pool = pool
        self.blocks: dict[int, Future[bytes]] = {}

    def read(self, offset: int, size: int) -> bytes:
        """The bytes from `offset` on; fewer only at the end."""
        end = min(offset + size, self.item.size)
        if end <= offset:
            return b""
        first = offset // BLOCK_BYTES
        last = (end - 1) // BLOCK_BYTES
        for number in range(first, last + BLOCKS_AHEAD):
            self._request(number)
        content = b"".join(self.blocks[number].result() for number in range(first, last + 1))
        start = first * BLOCK_BYTES
        return content[offset - start : end - start]

    def read_once(self, offset: int, size: int) -> bytes:
        """The same bytes by a request of their own, with nothing ahead."""
        return self.reads.read(self.item, offset, min(offset + size, self.item.size))

    def forget(self, before: int) -> None:
        """Frees the blocks that end before a position."""
        for number in list(self.blocks):
            if (number + 1) * BLOCK_BYTES <= before:
                self.blocks.pop(number).cancel()

    def close(self) -> None:
        """Ends what is under way."""
        self.reads.stop.set()
        for block in self.blocks.values():
            block.cancel()
        self.blocks.clear()

    def _request(self, number: int) -> None:
        start = number * BLOCK_BYTES
        if number in self.blocks or start >= self.item.size:
            return
        end = min(start + BLOCK_BYTES, self.item.size)
        self.blocks[number] = self.pool.submit(self.reads.read, self.item, start, end)


class OpenShard:
    """One open shard at a time, and single ranges of any, which threads may ask for."""

    def __init__(self, shards: list[str], pool: ThreadPoolExecutor, what: str) -> None:
        self.shards = shards
        self.pool = pool
        self.what = what
        self._number = -1
        self._file: IO[bytes] | None = None
        self._reads: FileReads | StoreShard | None = None
        self._lock = threading.Lock()
        self._stores: dict[int, StoreShard] = {}

    def open(self, number: int) -> "FileReads | StoreShard":
        """The shard of that number; the one before is closed."""
        if number != self._number or self._reads is None:
            self.close()
            self._reads = self._open(number)
            self._number = number
        return self._reads

    def read_range(self, number: int, start: int, end: int) -> bytes:
        """Some bytes of a shard; the open one stays as it is."""
        name = self.shards[number]
        if is_in_store(name):
            with self._lock:
                if number not in self._stores:
                    self._stores[number] = StoreShard(name, self.pool, self.what)
            return self._stores[number].read_once(start, end - start)
        with open(name, "rb") as file:
            return FileReads(file).read(start, end - start)

    def close(self) -> None:
        """Closes the open shard."""
        if isinstance(self._reads, StoreShard):
            self._reads.close()
        if self._file is not None:
            self._file.close()
        self._file = None
        self._reads = None
        self._number = -1

    def _open(self, number: int) -> "FileReads | StoreShard":
        name = self.shards[number]
        if is_in_store(name):
            return StoreShard(name, self.pool, self.what)
        self._file = open(name, "rb")  # noqa: SIM115 - close() closes it
        return FileReads(self._file)
