"""Stages of a pipeline that choose and order items, each a pure function from its own numbering to its input's.

`back(epochs, places)` takes int64 tensors that broadcast, on any device, and says which items of which pass of the
input stand there. Where a pipeline is, is therefore two integers; nothing else is saved and nothing is replayed.
"""

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from halfstep.data.hashing import draw_key, words
from halfstep.data.order import Order

_BLOCK = 4096  # draws of a window computed at a time


class Stage(Protocol):
    @property
    def size(self) -> int: ...

    def back(self, epochs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Shuffle:
    """A full shuffle, another one each pass; no memory, free to seek."""

    size: int
    seed: int

    def back(self, epochs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return epochs, Order(self.size, self.seed).at(epochs, places)

    def __str__(self) -> str:
        return f"shuffle(seed={self.seed})"


@dataclass(frozen=True)
class Shard:
    """Every `count`-th item from `index` on, after `start` items that an earlier sharding of this pass delivered."""

    input_size: int
    count: int
    index: int
    uneven: str = "keep"
    start: int = 0

    @property
    def size(self) -> int:
        """0 is possible where few items are left for many shards."""
        whole, rest = divmod(self.input_size - self.start, self.count)
        return (
            whole + {"drop": 0, "pad": int(rest > 0), "keep": int(self.index < rest)}[self.uneven]
        )

    def back(self, epochs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        places = places * self.count + (self.index + self.start)
        return epochs, places % self.input_size if self.uneven == "pad" else places

    @property
    def open(self) -> str:
        """As it is called, with count and index left open."""
        return f"shard(count, index, uneven={self.uneven!r})"

    def __str__(self) -> str:
        return f"shard({self.count}, {self.index}, uneven={self.uneven!r})"


@dataclass(frozen=True)
class Part:
    """`size` items from place `first` on: take and skip."""

    size: int
    first: int

    def back(self, epochs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        return epochs, places + self.first

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

    def back(self, epochs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        passes = torch.div(places, self.input_size, rounding_mode="floor")
        return epochs * self.times + passes, places - passes * self.input_size

    def __str__(self) -> str:
        return f"repeat({self.times})"


@dataclass(frozen=True)
class Window:
    """MindSpore's shuffle: a buffer is filled; a slot is drawn and emitted, the last moves into it, the next comes in.

    Only item numbers go through the buffer. Going back, or on after a resume, draws again from the start of the pass:
    about a microsecond an item, nothing is read.
    """

    size: int
    buffer: int
    seed: int
    _passes: dict[int, "_Pass"] = field(default_factory=dict, repr=False, compare=False)

    def back(self, epochs: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        epochs, places = torch.broadcast_tensors(epochs, places)
        found = torch.empty_like(places)
        for epoch in torch.unique(epochs).tolist():
            mask = epochs == epoch
            found[mask] = self._numbers(epoch, places[mask])
        return epochs, found

    def _numbers(self, epoch: int, places: Tensor) -> Tensor:
        first, last = int(places.min()), int(places.max())
        walk = self._passes.get(epoch)
        if walk is None or first < walk.first:
            walk = self._passes[epoch] = _Pass(self, epoch)
            for old in list(self._passes)[:-2]:  # a batch may lie across two passes
                del self._passes[old]
        walk.go_on(first, last)
        return torch.tensor(walk.emitted)[places - walk.first]

    def __str__(self) -> str:
        return f"shuffle({self.buffer}, seed={self.seed})"


class _Pass:
    """One pass through a window; holds the numbers emitted from place `first` on."""

    def __init__(self, window: Window, epoch: int) -> None:
        self.window, self.epoch = window, epoch
        self.buffer = list(range(min(window.buffer, window.size)))
        self.taken = len(self.buffer)
        self.first, self.emitted = 0, list[int]()

    def go_on(self, first: int, last: int) -> None:
        """Emit up to place `last`; what lies more than a block before `first` is forgotten."""
        while self.first + len(self.emitted) <= last:
            self._emit_block()
            surplus = min(first - self.first, len(self.emitted)) - _BLOCK
            if surplus > 0:
                del self.emitted[:surplus]
                self.first += surplus

    def _emit_block(self) -> None:
        start = self.first + len(self.emitted)
        draws = torch.arange(start, min(start + _BLOCK, self.window.size))
        buffer = self.buffer
        epochs, first = torch.full_like(draws, self.epoch), torch.tensor([draw_key(0)])
        for word in words(self.window.seed, epochs, draws, first)[0].tolist():
            slot = word * len(buffer) >> 32
            self.emitted.append(buffer[slot])
            buffer[slot] = buffer[-1]
            if self.taken < self.window.size:
                buffer[-1] = self.taken
                self.taken += 1
            else:
                buffer.pop()
