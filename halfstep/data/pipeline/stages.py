"""Stages of a pipeline that choose and order items.

Each is a pure function from its own numbering to that of its input: `to_input_index(epochs,
positions)` takes int64 tensors that broadcast, on any device, and returns the pass and the number
of the input's item for each position. The place where a pipeline stands is therefore two integers;
nothing else is saved and nothing is replayed.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from halfstep.data.hashing import draw_key, words
from halfstep.data.order import Order

# Draws of a buffer shuffle that are computed at a time.
_BLOCK = 4096


class Stage(Protocol):
    @property
    def size(self) -> int:
        """Items in one pass."""

    def to_input_index(self, epochs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The pass and the number of the input's item for each position."""


@dataclass(frozen=True)
class Shuffle:
    """A full shuffle, another one each pass; no memory, free to seek."""

    size: int
    seed: int

    def to_input_index(self, epochs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return epochs, Order(self.size, self.seed).at(epochs, positions)

    def __str__(self) -> str:
        return f"shuffle(seed={self.seed})"


@dataclass(frozen=True)
class Shard:
    """Every `count`-th item from `index` on.

    The first `start` items are left out: an earlier sharding of this pass has delivered them.
    """

    input_size: int
    count: int
    index: int
    uneven: str = "keep"
    start: int = 0

    @property
    def size(self) -> int:
        """Items in one pass. It may be 0 where few items are left for many shards."""
        full_rounds, remainder = divmod(self.input_size - self.start, self.count)
        if self.uneven == "keep":
            gets_one_more = self.index < remainder
        else:
            gets_one_more = self.uneven == "pad" and remainder > 0
        return full_rounds + int(gets_one_more)

    def to_input_index(self, epochs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        items = positions * self.count + (self.index + self.start)
        if self.uneven == "pad":
            items = items % self.input_size
        return epochs, items

    @property
    def open_text(self) -> str:
        """The call as text, with count and index left open."""
        return f"shard(count, index, uneven={self.uneven!r})"

    def __str__(self) -> str:
        return f"shard({self.count}, {self.index}, uneven={self.uneven!r})"


@dataclass(frozen=True)
class Slice:
    """`size` items from item `first` on: take and skip."""

    size: int
    first: int

    def to_input_index(self, epochs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return epochs, positions + self.first

    def __str__(self) -> str:
        return f"skip({self.first})" if self.first else f"take({self.size})"


@dataclass(frozen=True)
class Repeat:
    """`times` passes one after the other, each a pass of its own to the stages before."""

    input_size: int
    times: int

    @property
    def size(self) -> int:
        return self.input_size * self.times

    def to_input_index(self, epochs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        passes = torch.div(positions, self.input_size, rounding_mode="floor")
        return epochs * self.times + passes, positions - passes * self.input_size

    def __str__(self) -> str:
        return f"repeat({self.times})"


@dataclass(frozen=True)
class BufferShuffle:
    """MindSpore's shuffle by a sliding buffer.

    The buffer is filled with the first items. Then, again and again: a slot is drawn and its item
    emitted, the last item moves into the slot, and the next one of the input comes in.

    Only item numbers go through the buffer. Seeking back, or going on after a resume, draws again
    from the start of the pass: about a microsecond an item, and nothing is read.
    """

    size: int
    buffer_size: int
    seed: int
    _walks: dict[int, "_BufferWalk"] = field(default_factory=dict, repr=False, compare=False)

    def to_input_index(self, epochs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        epochs, positions = torch.broadcast_tensors(epochs, positions)
        items = torch.empty_like(positions)
        for epoch in torch.unique(epochs).tolist():
            mask = epochs == epoch
            items[mask] = self._items_of_pass(epoch, positions[mask])
        return epochs, items

    def _items_of_pass(self, epoch: int, positions: Tensor) -> Tensor:
        first = int(positions.min())
        last = int(positions.max())
        walk = self._walks.get(epoch)
        if walk is None or first < walk.first:
            walk = _BufferWalk(self, epoch)
            self._walks[epoch] = walk
            for old_epoch in list(self._walks)[:-2]:  # a batch may lie across two passes
                del self._walks[old_epoch]
        walk.advance(first, last)
        return torch.tensor(walk.emitted)[positions - walk.first]

    def __str__(self) -> str:
        return f"shuffle({self.buffer_size}, seed={self.seed})"


class _BufferWalk:
    """One pass through a buffer; holds the item numbers emitted from position `first` on."""

    def __init__(self, stage: BufferShuffle, epoch: int) -> None:
        self.size = stage.size
        self.seed = stage.seed
        self.epoch = epoch
        self.buffer = list(range(min(stage.buffer_size, stage.size)))
        self.next_item = len(self.buffer)
        self.first = 0
        self.emitted: list[int] = []

    def advance(self, first: int, last: int) -> None:
        """Emits up to position `last`; forgets what lies more than a block before `first`."""
        while self.first + len(self.emitted) <= last:
            self._emit_block()
            surplus = min(first - self.first, len(self.emitted)) - _BLOCK
            if surplus > 0:
                del self.emitted[:surplus]
                self.first += surplus

    def _emit_block(self) -> None:
        start = self.first + len(self.emitted)
        draws = torch.arange(start, min(start + _BLOCK, self.size))
        epochs = torch.full_like(draws, self.epoch)
        first_draw = torch.tensor([draw_key(0)])
        buffer = self.buffer
        for word in words(self.seed, epochs, draws, first_draw)[0].tolist():
            slot = word * len(buffer) >> 32
            self.emitted.append(buffer[slot])
            buffer[slot] = buffer[-1]
            if self.next_item < self.size:
                buffer[-1] = self.next_item
                self.next_item += 1
            else:
                buffer.pop()
