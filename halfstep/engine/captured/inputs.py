"""Batches where a graph finds them: gathered from a resident data set by numbers on the device, or staged."""

from collections.abc import Hashable, Iterator

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from halfstep.cuda_graphs.capture import MOST
from halfstep.data import Dataset
from halfstep.data.pipeline.collate import Batch
from halfstep.data.pipeline.source import Columns
from halfstep.engine.captured.inputs__gather import gather, parted, row_bytes
from halfstep.engine.captured.record_buffer__ring import RecordBuffer
from halfstep.engine.feed import Args, Feed
from halfstep.step.objective import batch_size as samples_of

TOKENS = 1 << 20  # samples whose numbers are computed at once
ROWS = 1 << 13  # steps between two resets of the ring, at most
AHEAD = (
    1 << 25
)  # bytes of batches gathered at once: they wait for their steps in the L2 cache, 50 MB of an H200
BEGINS = 512  # bytes: where torch's allocator for CUDA lets memory begin


UNCAPTURABLE = object()
"""The key of a batch that cannot be in a graph: it holds more than tensors and plain values, or one shape too many."""
_PLAIN = (bool, int, float, str, bytes, type(None))


class Resident:
    """Sample numbers of many batches in a table on the device; a graph gathers the batch at the ring's place."""

    def __init__(self, feed: Feed, ring: RecordBuffer, data: Dataset) -> None:
        self.feed, self.ring, self.data = feed, ring, data
        self.samples, self.row = 0, 0
        size = min(data.plan.batch, data.plan.samples)
        room = min(ring.rows, max(1, TOKENS // size))
        self._samples = torch.zeros(room, size, dtype=torch.int64, device=ring.device)
        self._epochs = torch.zeros_like(self._samples)
        self._lengths: tuple[int, ...] = ()

    def start(self) -> None:
        """The pass from the feed's position on."""
        self.mark = self.data.begin()
        self._lengths, self.row = (), 0

    def next(self) -> Hashable | None:
        if self.row == len(self._lengths) and not self._refill():
            return None
        self.samples = self._lengths[self.row]
        self.row += 1
        self.mark.step += 1
        return self.samples

    def batch(self) -> Args:
        """The current batch, in a graph or out of it: its numbers by the device's own counter."""
        found = self._gathered(1) if self.ring.use_kernels else None
        return self.feed.arguments(self._fetched() if found is None else self._mapped(*found[0]))

    def batches(self, count: int) -> Iterator[Args]:
        """The current batch and those after it, each to be asked for when its step begins: the step before it moves the
        counter. By one kernel where `_ahead` allows it."""
        found = self._gathered(count) if self._ahead(count) else None
        for i in range(count):
            yield self.batch() if found is None else self.feed.arguments(self._mapped(*found[i]))

    def _ahead(self, count: int) -> bool:
        """Whether so many batches may be gathered at once: whole rows of the table, few bytes, and each begins where
        memory of its own would. cuBLAS and compiled code choose kernels by that, and with them bits."""
        if count == 1 or not self.ring.use_kernels or self.samples != self._samples.shape[1]:
            return False
        columns, told = self._sources()
        sizes = [
            self.samples * each
            for each in (*map(row_bytes, columns.values()), *(t.itemsize for t in told))
        ]
        return count * sum(sizes) <= AHEAD and not any(size % BEGINS for size in sizes)

    def _sources(self) -> tuple[dict[str, Tensor], tuple[Tensor, ...]]:
        """The columns, and the tables that maps draw random numbers by, where any does."""
        plan = self.mark.plan
        assert isinstance(plan.source, Columns)
        return plan.source.tensors, (self._samples, self._epochs) if plan.random else ()

    def _gathered(self, count: int) -> list[tuple[Batch, Tensor, Tensor]] | None:
        """The columns of so many batches by one kernel, where that can be, and samples and epochs of each."""
        columns, told = self._sources()
        found = gather(columns, self._samples, self.ring.next_row, count * self.samples, told)
        if found is None:
            return None
        standing = self._samples[0, : self.samples]  # in their place where nothing is drawn
        parts = {name: parted(column, count) for name, column in found[0].items()}
        samples, epochs = [parted(t, count) for t in found[1]] or [[standing] * count] * 2
        return [
            ({name: part[i] for name, part in parts.items()}, samples[i], epochs[i])
            for i in range(count)
        ]

    def _mapped(self, columns: Batch, samples: Tensor, epochs: Tensor) -> Batch:
        for change in self.mark.plan.maps:
            columns = change(columns, epochs, samples)
        return columns

    def _fetched(self) -> Batch:
        samples = self._samples.index_select(0, self.ring.next_row).view(-1)[: self.samples]
        epochs = samples  # a stand-in where nothing is drawn from them: a kernel less
        if self.mark.plan.random:
            epochs = self._epochs.index_select(0, self.ring.next_row).view(-1)[: self.samples]
        return self.mark.plan.fetch(samples, epochs)

    def alike(self, most: int) -> int:
        """Batches from the current one on that have its size and are in the table: they may run as one graph."""
        first = self.row - 1
        run = self._lengths[first : first + most]
        return next((i for i, n in enumerate(run) if n != self.samples), len(run))

    def skip(self, batches: int) -> None:
        """As many have run beside the current one."""
        self.row += batches
        self.mark.step += batches

    def full(self) -> bool:
        """Whether the next batch needs the table, and the ring's rows beside it, anew."""
        return self.row == len(self._lengths)

    def _refill(self) -> bool:
        plan = self.mark.plan
        count = min(len(self._samples), plan.size - self.mark.step)
        if count <= 0:
            return False
        tokens = plan.tokens(self.mark.epoch, self.mark.step, count, self.ring.device)
        self._samples[:count].copy_(tokens.samples)
        self._epochs[:count].copy_(tokens.epochs)
        self._lengths, self.row = tokens.lengths, 0
        self.ring.reset()
        return True


class Staged:
    """Batches from anywhere, copied into inputs that stay where they are: one set for each structure and shape."""

    def __init__(self, feed: Feed, ring: RecordBuffer) -> None:
        self.feed, self.ring = feed, ring
        self.samples, self.row = 0, 0
        self._source: Iterator[Args] | None = None
        self._held: dict[Hashable, list[Tensor]] = {}  # for good: graphs read from there
        self._now: Args = ()

    def start(self) -> None:
        self._source = self.feed.start()
        self.row = 0
        self.ring.reset()

    def full(self) -> bool:
        return self.row == self.ring.rows

    def next(self) -> Hashable | None:
        assert self._source is not None
        args = next(self._source, None)
        if args is None:
            return None
        if self.full():
            self.row = 0
            self.ring.reset()
        self.samples = samples_of(args)
        self.row += 1
        return self._stage(args)

    def batch(self) -> Args:
        return self._now

    def batches(self, count: int) -> Iterator[Args]:
        assert count == 1
        yield self._now

    def alike(self, most: int) -> int:
        return 1

    def skip(self, batches: int) -> None:
        assert not batches

    def _stage(self, args: Args) -> Hashable:
        """This batch's tensors in inputs that stay, its other values as they are: those are part of the key."""
        flat = all(isinstance(arg, Tensor) for arg in args)
        leaves, spec = (list(args), None) if flat else tree_flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        rest = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        shapes = tuple([(tuple(t.shape), t.dtype, t.stride()) for t in tensors])
        full = shapes not in self._held and len(self._held) >= MOST
        if full or not all(type(leaf) in _PLAIN for leaf in rest):
            self._now = args
            return UNCAPTURABLE
        room = self._held.get(shapes)
        if room is None:
            room = self._held[shapes] = [
                torch.empty_like(t, device=self.ring.device) for t in tensors
            ]
        for mine, given in zip(room, tensors, strict=True):
            cross = (
                self.ring.device.type == "cuda"
                and given.device.type == "cpu"
                and not given.is_pinned()
            )
            mine.copy_(given.pin_memory() if cross else given, non_blocking=True)
        filled = iter(room)
        placed = [next(filled) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._now = tuple(placed) if spec is None else tree_unflatten(placed, spec)
        return (str(spec), shapes, tuple([(type(leaf), repr(leaf)) for leaf in rest]))


def resident_dataset(feed: Feed, device: torch.device) -> Dataset | None:
    """The feed's data set, where its batches can be gathered on the device by numbers alone."""
    data = feed.data
    ours = isinstance(data, Dataset) and data.plan.ours and data.plan.source.device == device
    return data if ours and isinstance(data, Dataset) else None
