"""What a pipeline is: a source, stages that order its items, maps that change them. It knows no position.

source → stages on samples → maps on samples → batch → stages on batches → maps on batches
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfstep.data.pipeline.maps import Chain, Function, Map, Select, joined
from halfstep.data.pipeline.maps__parts import Batch, checked
from halfstep.data.pipeline.seeding import seeded
from halfstep.data.pipeline.source import Columns, Source, first_of
from halfstep.data.pipeline.stages import Shard, Stage, Window
from halfstep.data.transforms import spec

_CPU = torch.device("cpu")
Key = tuple[
    int, int
]  # pass and number of a batch's first sample, on the host: what a user's random code is seeded by


@dataclass(frozen=True)
class Tokens:
    """Which samples of which pass make up some batches: int64 [batches, batch size], a short batch's tail repeated."""

    samples: Tensor
    epochs: Tensor
    lengths: tuple[int, ...]
    keys: tuple[Key, ...] = ()  # where code of the user's runs

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        n = self.lengths[i]
        return self.samples[i, :n], self.epochs[i, :n]


@dataclass(frozen=True)
class Plan:
    """The chain, and what follows from it: sizes, tokens, fetched batches."""

    source: Source
    seed: int = 0
    stages: tuple[Stage, ...] = ()
    maps: tuple[Map, ...] = ()
    batch: int = 0  # 0: not batched
    drop_remainder: bool = False
    batch_stages: tuple[Stage, ...] = ()

    @property
    def samples(self) -> int:
        """Samples in one pass, before batching."""
        return self.stages[-1].size if self.stages else self.source.size

    @property
    def batches(self) -> int:
        """Batches in one pass of the samples, before any stage on batches."""
        n = self.batch or 1
        return self.samples // n if self.drop_remainder else -(-self.samples // n)

    @property
    def size(self) -> int:
        """Items in one pass: batches, or samples where nothing is batched."""
        return self.batch_stages[-1].size if self.batch_stages else self.batches

    @property
    def indexable(self) -> bool:
        """Whether the order is arithmetic that runs on any device; a window is a walk on the host."""
        return not any(isinstance(stage, Window) for stage in (*self.stages, *self.batch_stages))

    @property
    def ours(self) -> bool:
        """Whether no code of the user's runs in a fetch."""
        return isinstance(self.source, Columns) and not any(
            isinstance(m, Function) for m in self.maps
        )

    @property
    def versions(self) -> list[int]:
        """How often each column in memory has been written to."""
        return (
            [t._version for t in self.source.tensors.values()]
            if isinstance(self.source, Columns)
            else []
        )

    @property
    def random(self) -> bool:
        """Whether a transform draws random numbers, and with them the pass matters to a fetch."""
        return any(t.draws for m in self.maps if isinstance(m, Chain) for t in m.transforms)

    @property
    def per_sample(self) -> Function | None:
        """The first function that must see single samples on the host, if any."""
        return next((m for m in self.maps if isinstance(m, Function) and m.per_sample), None)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of what a fetched batch holds, in order."""
        names = self.source.names
        for change in self.maps:
            names = change.names(names)
        return names

    def staged(self, stage: Stage) -> "Plan":
        if self.batch:
            return replace(self, batch_stages=(*self.batch_stages, stage))
        return replace(self, stages=(*self.stages, stage))

    def mapped(self, maps: list[Map]) -> "Plan":
        plan = replace(self, maps=joined((*self.maps, *maps), self.seed))
        plan.specs()  # a chain that does not fit its column fails here, not in the first batch
        return plan

    def specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape (after the batch dimension) and dtype of the columns whose values no function of the user's decides."""
        source = self.source.tensors if isinstance(self.source, Columns) else {}
        found = {name: (tuple(column.shape[1:]), column.dtype) for name, column in source.items()}
        for change in self.maps:
            if isinstance(change, Function):
                found = {
                    name: known
                    for name, known in found.items()
                    if name not in (*change.columns, *change.output)
                }
            elif not isinstance(change, Select):
                for name in found.keys() & set(change.columns):
                    shape, dtype = spec(change.transforms, (2, *found[name][0]), found[name][1])
                    found[name] = shape[1:], dtype
        return found

    def tokens(
        self, epoch: int, start: int, count: int, device: torch.device | str = "cpu"
    ) -> Tokens:
        """The samples of items start..start+count−1 of a pass, in a fixed number of kernels and without a host sync."""
        n = min(self.batch or 1, self.samples)  # a batch larger than the set is the set
        samples, epochs = self._places(epoch, start, count, n, torch.device(device))
        keys: tuple[Key, ...] = ()
        if not self.ours:
            firsts, passes = self._places(epoch, start, count, 1, _CPU)
            keys = tuple(zip(passes.flatten().tolist(), firsts.flatten().tolist(), strict=True))
        return Tokens(samples, epochs, self._lengths(epoch, start, count), keys)

    def _places(
        self, epoch: int, start: int, count: int, width: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The first `width` samples of each batch, and the pass of each."""
        where = device if self.indexable else _CPU
        epochs, items = self._items(epoch, start, count, where)
        places = items * (self.batch or 1) + torch.arange(width, device=where)
        if self.samples % (self.batch or 1):
            places = places.clamp(max=self.samples - 1)
        for stage in reversed(self.stages):
            epochs, places = stage.back(epochs, places)
        return places.to(device), epochs.expand_as(places).to(device)

    def _items(
        self, epoch: int, start: int, count: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        items = torch.arange(start, start + count, device=device).unsqueeze(1)
        epochs = torch.full_like(items, epoch)
        for stage in reversed(self.batch_stages):
            epochs, items = stage.back(epochs, items)
        return epochs, items

    def _lengths(self, epoch: int, start: int, count: int) -> tuple[int, ...]:
        n, rest = self.batch or 1, self.samples % (self.batch or 1)
        if not rest or self.drop_remainder:
            return (n,) * count
        items = self._items(epoch, start, count, _CPU)[1]  # on the host: shapes must be known there
        return tuple(rest if item == self.batches - 1 else n for item in items.flatten().tolist())

    def fetch(self, samples: Tensor, epochs: Tensor, key: Key | None = None) -> Batch:
        """Columns with all maps applied. With columns on a device and transforms only: no host sync. Code of the
        user's runs with the host's generators seeded for this batch, so that it repeats in any process."""
        if self.ours:
            return self._fetch(samples, epochs)
        with seeded(self.seed, *(key or (int(epochs[0]), int(samples[0])))):
            return self._fetch(samples, epochs)

    def _fetch(self, samples: Tensor, epochs: Tensor) -> Batch:
        batch = self.source.fetch(samples)
        for change in self.maps:
            batch = change(batch, epochs, samples)
        return (
            {name: checked(name, column) for name, column in batch.items()} if self.batch else batch
        )

    def item(self, samples: Tensor, epochs: Tensor, key: Key | None = None) -> Batch:
        """What is delivered: a batch, or where nothing is batched the sample itself."""
        fetched = self.fetch(samples, epochs, key)
        return fetched if self.batch else first_of(fetched)

    def describe(self) -> tuple[str, ...]:
        """A line per part that decides what is delivered. Of the last shard count and index are left open, for they may
        change on resume."""
        batch = [f"batch({self.batch}, drop_remainder={self.drop_remainder})"] if self.batch else []
        last = self.last_shard()
        before, after = (
            [s.open if s is last else str(s) for s in each]
            for each in (self.stages, self.batch_stages)
        )
        return (
            str(self.source),
            *before,
            *batch,
            *after,
            *map(str, self.maps),
            f"seed {self.seed}",
        )

    def last_shard(self) -> Shard | None:
        shards = [stage for stage in (*self.stages, *self.batch_stages) if isinstance(stage, Shard)]
        return shards[-1] if shards else None

    def with_source(self, source: Source, maps: tuple[Map, ...] | None = None) -> "Plan":
        return replace(self, source=source, maps=self.maps if maps is None else maps)
