"""What a pipeline is: a source, stages that order its items, maps that change them. It knows no position.

source → stages on samples → maps on samples → batch → stages on batches → maps on batches
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfstep.data.flow.maps import Function, Map, joined
from halfstep.data.flow.seeded import seeded
from halfstep.data.flow.source import Batch, Columns, Source, stacked
from halfstep.data.flow.stages import Stage, Window
from halfstep.data.transforms import spec


@dataclass(frozen=True)
class Tokens:
    """Which samples of which pass make up some batches: int64 [batches, batch size], a short batch's tail repeated."""

    samples: Tensor
    epochs: Tensor
    lengths: tuple[int, ...]

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
    names: tuple[str, ...] = ()  # select

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
        return isinstance(self.source, Columns) and not any(isinstance(m, Function) for m in self.maps)

    @property
    def per_sample(self) -> Function | None:
        """The first function that must see single samples on the host, if any."""
        return next((m for m in self.maps if isinstance(m, Function) and m.per_sample), None)

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
                found = {name: known for name, known in found.items() if name not in (*change.columns, *change.output)}
                continue
            for name in found.keys() & set(change.columns):
                shape, dtype = spec(change.transforms, (2, *found[name][0]), found[name][1])
                found[name] = shape[1:], dtype
        return found

    def tokens(self, epoch: int, start: int, count: int, device: torch.device | str = "cpu") -> Tokens:
        """The samples of items start..start+count−1 of a pass, in a fixed number of kernels and without a host sync."""
        if not self.indexable:
            host = self._tokens(epoch, start, count, torch.device("cpu"))
            return Tokens(host.samples.to(device), host.epochs.to(device), host.lengths)
        return self._tokens(epoch, start, count, torch.device(device))

    def _tokens(self, epoch: int, start: int, count: int, device: torch.device) -> Tokens:
        epochs, items = self._items(epoch, start, count, device)
        n = self.batch or 1
        places = items * n + torch.arange(n, device=device)
        if self.samples % n:
            places = places.clamp(max=self.samples - 1)
        for stage in reversed(self.stages):
            epochs, places = stage.back(epochs, places)
        return Tokens(places, epochs.expand_as(places), self._lengths(epoch, start, count))

    def _items(self, epoch: int, start: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
        items = torch.arange(start, start + count, device=device).unsqueeze(1)
        epochs = torch.full_like(items, epoch)
        for stage in reversed(self.batch_stages):
            epochs, items = stage.back(epochs, items)
        return epochs, items

    def _lengths(self, epoch: int, start: int, count: int) -> tuple[int, ...]:
        n, rest = self.batch or 1, self.samples % (self.batch or 1)
        if not rest or self.drop_remainder:
            return (n,) * count
        items = self._items(epoch, start, count, torch.device("cpu"))[1]  # on the host: shapes must be known there
        return tuple(rest if item == self.batches - 1 else n for item in items.flatten().tolist())

    def fetch(self, samples: Tensor, epochs: Tensor) -> Batch:
        """One batch with all maps applied. With columns on a device and transforms only: no host sync. Code of the
        user's runs with the host's generators seeded for this batch, so that it repeats in any process."""
        if self.ours:
            return self._fetch(samples, epochs)
        with seeded(self.seed, *(int(part[0]) for part in (epochs, samples))):
            return self._fetch(samples, epochs)

    def _fetch(self, samples: Tensor, epochs: Tensor) -> Batch:
        batch = self.source.fetch(samples)
        for change in self.maps:
            batch = change(batch, epochs, samples)
        ready = {name: stacked(batch[name]) for name in self.names or batch}
        return {name: _checked(name, column, self.batch) for name, column in ready.items()}

    def describe(self) -> tuple[str, ...]:
        """A line per part that decides what is delivered; shards are left out, for they may change on resume."""
        batch = [f"batch({self.batch}, drop_remainder={self.drop_remainder})"] if self.batch else []
        stages = [str(s) for s in self.stages if not str(s).startswith("shard")]
        maps = [str(m) for m in self.maps] + ([f"select({', '.join(self.names)})"] if self.names else [])
        return (str(self.source), *stages, *batch, *map(str, self.batch_stages), *maps, f"seed {self.seed}")

    def with_source(self, source: Source) -> "Plan":
        return replace(self, source=source)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of what a fetched batch holds, in order."""
        names = self.source.names
        for change in self.maps:
            names = change.names(names)
        return self.names or names


def _checked(name: str, column: Any, batch: int) -> Any:
    if batch and isinstance(column, list):
        shapes = sorted({tuple(part.shape) for part in column})
        raise ValueError(
            f"column {name!r}: expected samples of one shape in a batch, got {shapes[:4]}. Make them equal before "
            "batch(), for instance with .map(hs.data.Resize((224, 224)), ...)."
        )
    return column
