"""Tar shards that are read once from beginning to end, from a disk or a store, in batches.

    order of shards → samples one after the other → a buffer that shuffles → decode → maps → batch

The order of shards is a function of (seed, epoch), and a draw of the buffer of (seed, epoch, number
of the draw). A position is a place in the shards and where the samples in the buffer lie, so that
a resumed stream reads these again, and goes on with the very next sample.
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from halfstep.data import hashing
from halfstep.data.order import Order
from halfstep.data.pipeline.collate import Batch, stack_or_raise, unstacked_column
from halfstep.data.pipeline.function_map import FunctionMap
from halfstep.data.pipeline.maps import Map, as_list, build_maps, is_transform, join_chains
from halfstep.data.pipeline.seeding import seeded_generators
from halfstep.data.readers.image_folder import MAX_PIXELS, MAX_THREADS
from halfstep.data.shards.member_decoding import Decode
from halfstep.data.shards.shard_names import list_shards
from halfstep.data.shards.shard_reads import THREADS, OpenShard
from halfstep.data.shards.tar_samples import scan_samples
from halfstep.data.shards.tar_shards import make_decoder
from halfstep.utils.checks import whole_number
from halfstep.utils.saved_state import SavedValue

VERSION = 1
BATCHES_AHEAD = 2
DRAWS_AT_ONCE = 4096
# Keys that a stream's own hashes begin with: its order of shards, and its draws from the buffer.
SHARD_ORDER_KEY = 1
BUFFER_KEY = 2
MAX_SAMPLES_PER_SHARD = 1 << 40  # numbers the samples of all shards, for random transforms


class SamplePlace(NamedTuple):
    """Where a sample lies: its shard, its number there, and its bytes."""

    shard: int
    number: int
    start: int
    end: int


@dataclass
class StreamPosition:
    """Where a pass stands.

    `place` counts the shards of this part that are done; the next sample to read begins at byte
    `offset` of the shard behind them, and is number `number` there.
    """

    epoch: int = 0
    place: int = 0
    offset: int = 0
    number: int = 0
    draws: int = 0
    buffer: list[SamplePlace] = field(default_factory=list)

    def to_state(self) -> dict[str, Any]:
        """The position as plain values."""
        return {
            "epoch": self.epoch,
            "place": self.place,
            "offset": self.offset,
            "number": self.number,
            "draws": self.draws,
            "buffer": [list(sample) for sample in self.buffer],
        }


class _PendingBatch(NamedTuple):
    """A batch whose samples are being decoded, and the position behind it."""

    places: list[SamplePlace]
    decoded: list["Future[Batch]"]
    after: StreamPosition


class ShardStream(IterableDataset[tuple[Any, ...]]):
    """Batches from tar shards that are read in order, each once in a pass; nothing is kept.

    For data that does not fit a disk, or lies on a slow one. `shards`, `columns`, `decode`, `size`
    and `mode` are those of TarShards; shards in a store are read from there. A pass takes the
    shards in the order of (seed, epoch), and its samples through a buffer of `buffer_size`, from
    which one is drawn at random for the next place in a batch; None keeps their order.

    `count` and `index` take the part of one rank: every `count`-th shard. In the workers of a
    DataLoader (`batch_size=None`) each takes a part of these.

    `state_dict` says where the newest pass stands; after `load_state_dict` the next `for` goes on
    there.
    """

    def __init__(
        self,
        shards: str | Path | Sequence[str | Path],
        columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
        *,
        batch_size: int,
        buffer_size: int | None = 1000,
        seed: int = 0,
        count: int = 1,
        index: int = 0,
        drop_remainder: bool = False,
        decode: Mapping[str, Decode] | None = None,
        size: int | tuple[int, int] | None = None,
        mode: Literal["RGB", "L"] = "RGB",
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.decoder = make_decoder(columns, decode, size, mode, max_pixels)
        self.batch_size = whole_number("batch_size", batch_size, minimum=1)
        self.buffer_size = 1
        if buffer_size is not None:
            self.buffer_size = whole_number("buffer_size", buffer_size, minimum=2)
        self.seed = whole_number("seed", seed)
        self.count = whole_number("count", count, minimum=1)
        self.index = whole_number("index", index, minimum=0)
        self.drop_remainder = bool(drop_remainder)
        self.shards = list_shards(shards, "ShardStream")
        if not self.index < self.count <= len(self.shards):
            raise ValueError(
                f"ShardStream: expected 0 <= index < count <= {len(self.shards)} shards, got index "
                f"{index}, count {count}. Each rank takes whole shards: write more of them"
            )
        self.maps: tuple[Map, ...] = ()
        self._next = StreamPosition()
        self._newest: StreamPosition | None = None
        self._before_last: StreamPosition | None = None

    def map(
        self, operations: Any, columns: str | Sequence[str] | None = None, *, output: Any = None
    ) -> "ShardStream":
        """Changes columns of whole batches, by transforms of hs.data or functions.

        A random transform depends on (seed, epoch, shard, number of the sample in it) alone.
        """
        if columns is None and any(map(is_transform, as_list(operations))):
            raise ValueError("map: expected the columns that the transform is for")
        names = self._columns() if columns is None else columns
        inputs = (names,) if isinstance(names, str) else tuple(names)
        outputs = inputs if output is None else output
        outputs = (outputs,) if isinstance(outputs, str) else tuple(outputs)
        stream = copy(self)
        maps = build_maps(operations, inputs, outputs, per_sample=False)
        stream.maps = join_chains((*self.maps, *maps), self.seed)
        stream._next = replace(self._next)
        stream._newest = None
        return stream

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        position = self._next
        self._newest = position
        self._before_last = None
        self._next = StreamPosition(position.epoch + 1)
        return self._batches(position)

    def set_epoch(self, epoch: int) -> None:
        """Lets the next `for` begin that pass, if it does not go on inside of it."""
        if self._next.epoch != epoch:
            self._next = StreamPosition(whole_number("epoch", epoch, minimum=0))

    def state_dict(self) -> dict[str, Any]:
        """Where the newest pass stands, by what was delivered: integers and lists of them."""
        return self._state_of(self._newest or self._next)

    def previous_state_dict(self) -> dict[str, Any]:
        """Where the newest pass stood before its last batch, for one that was not trained on."""
        return self._state_of(self._before_last or self._newest or self._next)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next `for` go on there. ValueError for the state of another stream."""
        saved = SavedValue(state, "ShardStream: the saved position")
        if saved.field("version").whole_number() != VERSION:
            saved.field("version").refuse(f"version {VERSION}")
        here = self._describe()
        for name, value in here.items():
            received = saved.field("stream").field(name)
            if received.value != value:
                received.refuse(f"{value!r}, as in this stream")
        buffer = [self._saved_place(place) for place in saved.field("buffer").items()]
        if len(buffer) >= max(self.buffer_size, 1):
            saved.field("buffer").refuse(f"fewer than {self.buffer_size} samples")
        shard_count = len(self._shards_of_part(0, 0, 1))
        self._next = StreamPosition(
            epoch=saved.field("epoch").whole_number(),
            place=saved.field("place").whole_number(maximum=shard_count),
            offset=saved.field("offset").whole_number(),
            number=saved.field("number").whole_number(),
            draws=saved.field("draws").whole_number(),
            buffer=buffer,
        )
        self._newest = None

    # A pass

    def _batches(self, position: StreamPosition) -> Iterator[tuple[Any, ...]]:
        """The batches from a position on, which moves with each one delivered."""
        threads = min(MAX_THREADS, os.cpu_count() or 1)
        with (
            ThreadPoolExecutor(THREADS, "halfstep-shards") as reading,
            ThreadPoolExecutor(threads, "halfstep-decode") as decoding,
            closing(OpenShard(self.shards, reading, "ShardStream")) as source,
        ):
            walk = _Walk(self, source, position)
            pending: deque[_PendingBatch] = deque()
            is_over = False
            try:
                while True:
                    while not is_over and len(pending) <= BATCHES_AHEAD:
                        samples = list(islice(walk, self.batch_size))
                        is_over = len(samples) < self.batch_size
                        if not samples or (is_over and self.drop_remainder):
                            break
                        places = [place for place, _ in samples]
                        decoded = [self._decode(decoding, *sample) for sample in samples]
                        pending.append(_PendingBatch(places, decoded, walk.position()))
                    if not pending:
                        break
                    batch = pending.popleft()
                    columns = self._collate(position.epoch, batch.places, batch.decoded)
                    if position is self._newest:
                        self._before_last = replace(position)
                    vars(position).update(vars(batch.after))
                    yield columns
            finally:
                for batch in pending:
                    for future in batch.decoded:
                        future.cancel()
        # The state of a finished pass is the start of the next one.
        vars(position).update(vars(StreamPosition(position.epoch + 1)))

    def samples_in_order(
        self, source: OpenShard, position: StreamPosition
    ) -> Iterator[tuple[SamplePlace, bytes]]:
        """The samples of this part from a position on, which moves along."""
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        shards = self._shards_of_part(position.epoch, number, workers)
        while position.place < len(shards):
            shard = shards[position.place]
            reads = source.open(shard)
            for start, end in scan_samples(reads, self.shards[shard], position.offset):
                body = reads.read(start, end - start)
                place = SamplePlace(shard, position.number, start, end)
                position.offset = end
                position.number += 1
                reads.forget(before=end)
                yield place, body
            if not position.number:
                raise ValueError(
                    f"{self.shards[shard]}: expected samples, members such as 0001.jpg and "
                    "0001.cls, found none"
                )
            position.place += 1
            position.offset = 0
            position.number = 0

    def _shards_of_part(self, epoch: int, worker: int, workers: int) -> list[int]:
        """The shards that this rank, and this worker of it, reads in a pass, in order."""
        order = list(range(len(self.shards)))
        if self.buffer_size > 1:
            shuffle = Order(len(order), hashing.key(self.seed, SHARD_ORDER_KEY))
            order = shuffle.indices(epoch, 0, len(order)).tolist()
        return order[self.index :: self.count][worker::workers]

    def _decode(self, pool: ThreadPoolExecutor, place: SamplePlace, body: bytes) -> "Future[Batch]":
        """The sample's columns, by a thread, or at once where functions of the user's do it."""
        name = self.shards[place.shard]
        if not self.decoder.decode:
            return pool.submit(self.decoder, body, name)
        future: Future[Batch] = Future()
        future.set_result(self.decoder(body, name))
        return future

    def _collate(
        self, epoch: int, places: list[SamplePlace], decoded: list["Future[Batch]"]
    ) -> tuple[Any, ...]:
        rows = [future.result() for future in decoded]
        names = list(rows[0])
        for row, place in zip(rows, places, strict=True):
            if list(row) != names:
                raise ValueError(
                    f"{self.shards[place.shard]}: expected samples with {names}, found one with "
                    f"{list(row)}. Name the parts by columns="
                )
        batch: Batch = {name: unstacked_column(row[name] for row in rows) for name in names}
        if self.maps:
            batch = self._apply_maps(batch, epoch, places)
        return tuple(stack_or_raise(name, column) for name, column in batch.items())

    def _apply_maps(self, batch: Batch, epoch: int, places: list[SamplePlace]) -> Batch:
        numbers = [place.shard * MAX_SAMPLES_PER_SHARD + place.number for place in places]
        samples = torch.tensor(numbers)
        epochs = torch.full_like(samples, epoch)
        if not any(isinstance(operation, FunctionMap) for operation in self.maps):
            for operation in self.maps:
                batch = operation(batch, epochs, samples)
            return batch
        with seeded_generators(self.seed, epoch, numbers[0]):
            for operation in self.maps:
                batch = operation(batch, epochs, samples)
        return batch

    # The state

    def _state_of(self, position: StreamPosition) -> dict[str, Any]:
        return {"version": VERSION, "stream": self._describe(), **position.to_state()}

    def _describe(self) -> dict[str, Any]:
        """What decides the order of samples."""
        names = [name.rpartition("/")[2] for name in self.shards]
        digest = hashing.key(*(byte for name in names for byte in (len(name), *name.encode())))
        return {
            "shards": len(self.shards),
            "names": f"{digest:016x}",
            "batch_size": self.batch_size,
            "buffer_size": self.buffer_size,
            "seed": self.seed,
            "count": self.count,
            "index": self.index,
        }

    def _saved_place(self, saved: SavedValue) -> SamplePlace:
        shard, number, start, end = saved.items(4)
        place = SamplePlace(
            shard.whole_number(maximum=len(self.shards) - 1),
            number.whole_number(),
            start.whole_number(),
            end.whole_number(),
        )
        if place.end <= place.start:
            end.refuse("an end behind the start")
        return place

    def _columns(self) -> Sequence[str]:
        if self.decoder.columns is None:
            raise ValueError("map: expected columns, as the stream was made without names of them")
        return tuple(self.decoder.columns)


class _Walk:
    """The samples of a pass from a position on, through the buffer."""

    def __init__(self, stream: ShardStream, source: OpenShard, start: StreamPosition) -> None:
        self.buffer_size = stream.buffer_size
        self.places = list(start.buffer)
        self.bodies: list[bytes] = []
        if self.places:
            with ThreadPoolExecutor(THREADS) as pool:
                read = pool.map(lambda p: source.read_range(p.shard, p.start, p.end), self.places)
                self.bodies = list(read)
        self._reader = replace(start)
        self._coming = stream.samples_in_order(source, self._reader)
        self._is_over = False
        seed = hashing.key(stream.seed, BUFFER_KEY)
        self._words = _draw_words(seed, start.epoch, start.draws)

    def __iter__(self) -> "_Walk":
        return self

    def __next__(self) -> tuple[SamplePlace, bytes]:
        while not self._is_over and len(self.places) < self.buffer_size:
            sample = next(self._coming, None)
            if sample is None:
                self._is_over = True
                break
            self.places.append(sample[0])
            self.bodies.append(sample[1])
        if not self.places:
            raise StopIteration
        # The last one moves into the gap, so that the next one comes in behind.
        slot = next(self._words) * len(self.places) >> 32
        drawn = (self.places[slot], self.bodies[slot])
        self.places[slot] = self.places[-1]
        self.bodies[slot] = self.bodies[-1]
        self.places.pop()
        self.bodies.pop()
        self._reader.draws += 1
        return drawn

    def position(self) -> StreamPosition:
        """The position behind the last sample."""
        return replace(self._reader, buffer=list(self.places))


def _draw_words(seed: int, epoch: int, start: int) -> Iterator[int]:
    """The 32-bit word of each draw, from number `start` on."""
    first_draw = torch.tensor([hashing.draw_key(0)])
    while True:
        numbers = torch.arange(start, start + DRAWS_AT_ONCE)
        epochs = torch.full_like(numbers, epoch)
        yield from hashing.words(seed, epochs, numbers, first_draw)[0].tolist()
        start += DRAWS_AT_ONCE
