"""Where a captured step finds its batches: at the same addresses every time.

`ResidentInputs` serves a data set that lies on the device: the step itself gathers its samples, by
numbers in a table. `StagedInputs` serves batches from anywhere: each is copied into tensors that
stay.
"""

from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from halfstep.cuda_graphs.capture import MAX_GRAPHS
from halfstep.data import Dataset
from halfstep.data.pipeline.collate import Batch
from halfstep.data.pipeline.source import ColumnSource
from halfstep.engine.captured.gather import gather_samples, row_bytes, split_storage
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.feed import Args, Feed
from halfstep.step.objective import batch_size

# The most steps between two resets of the record buffer.
RECORD_ROWS = 1 << 13

# Sample numbers are computed for about so many samples at once.
SAMPLES_PER_REFILL = 1 << 20

# Batches of this size together are gathered at once. Until their steps run they stay in the L2
# cache, which has 50 MB on an H200.
MAX_GATHER_BYTES = 1 << 25

# torch's allocator for CUDA begins a tensor's memory at a multiple of this.
ALLOCATION_BYTES = 512

# The key of a batch that no graph can hold: it has values of unknown types, or one shape too many.
UNCAPTURABLE = object()

# Types of values that may be part of a key: two that look the same are the same.
PLAIN_TYPES = (bool, int, float, str, bytes, type(None))

# (count) → so many batches from the current one on, each made when its step begins.
MakeBatches: TypeAlias = Callable[[int], Iterator[Args]]


class GatheredBatch(NamedTuple):
    """The columns of a batch before the transforms, and what random transforms need."""

    columns: Batch
    samples: Tensor
    epochs: Tensor


class ResidentInputs:
    """Batches of a data set on the device.

    A table on the device has the sample numbers of many batches, a row for each. A step gathers the
    batch of row `records.next_row`, which is also the row of its record: a replayed graph goes on
    to the next batch by itself. When the table is used up, it is filled again, and the records
    start again with their first row.
    """

    def __init__(self, feed: Feed, records: RecordBuffer, data: Dataset) -> None:
        self.feed = feed
        self.records = records
        self.data = data
        self.batch_size = 0  # of the current batch

        width = min(data.plan.batch_size, data.plan.sample_count)
        rows = min(records.capacity, max(1, SAMPLES_PER_REFILL // width))
        self._samples = torch.zeros(rows, width, dtype=torch.int64, device=records.device)
        self._epochs = torch.zeros_like(self._samples)
        self._batch_sizes: tuple[int, ...] = ()  # one for each row that is filled
        self._pass_end = 0  # the batches of the pass
        self._row = 0  # of the next batch

    def start(self) -> None:
        """Begins a pass at the feed's position."""
        self.position = self.data.begin_pass()
        self._pass_end = self.position.plan.size
        batches_left = self.feed.batches_left()
        if self.feed.limit.value is not None and batches_left is not None:
            self._pass_end = min(self._pass_end, self.position.step + batches_left)
        self._batch_sizes = ()
        self._row = 0

    def next(self) -> Hashable | None:
        """Moves to the next batch. Returns the key of its shape; None at the end of the pass."""
        if self.needs_refill() and not self._refill():
            return None
        self.batch_size = self._batch_sizes[self._row]
        self._row += 1
        self.position.step += 1
        return self.batch_size

    def batch(self) -> Args:
        """The current batch, in a capture or outside: by the number of the row on the device."""
        gathered = None
        if self.records.use_kernels:
            gathered = self._gather_by_kernel(1)
        if gathered is None:
            return self.feed.arguments(self._gather_by_torch())
        return self.feed.arguments(self._transform(gathered[0]))

    def batches(self, count: int) -> Iterator[Args]:
        """The current batch and the following ones, `count` together.

        Ask for each when its step begins: the step before it moves `records.next_row`. One kernel
        gathers all of them where `_may_gather_at_once` allows it.
        """
        gathered = None
        if self._may_gather_at_once(count):
            gathered = self._gather_by_kernel(count)
        for i in range(count):
            if gathered is None:
                yield self.batch()
            else:
                yield self.feed.arguments(self._transform(gathered[i]))

    def count_same_shape(self, limit: int) -> int:
        """How many batches from the current one on have its size and are in the table."""
        current_row = self._row - 1
        sizes = self._batch_sizes[current_row : current_row + limit]
        for count, size in enumerate(sizes):
            if size != self.batch_size:
                return count
        return len(sizes)

    def skip(self, batch_count: int) -> None:
        """Moves on over batches that have run together with the current one."""
        self._row += batch_count
        self.position.step += batch_count

    def needs_refill(self) -> bool:
        """Whether the next batch needs a new table: the records then start again too."""
        return self._row == len(self._batch_sizes)

    def switch_feed(self, feed: Feed) -> bool:
        """Goes on with another feed; False if it does not have the same data on the device."""
        data = resident_dataset(feed, self.records.device)
        if data is None or data.plan is not self.data.plan:
            return False
        self.data = data
        self.feed = feed
        return True

    def _refill(self) -> bool:
        """Computes the sample numbers of the next batches; False at the end of the pass."""
        plan = self.position.plan
        count = min(len(self._samples), self._pass_end - self.position.step)
        if count <= 0:
            return False
        indices = plan.sample_indices(
            self.position.epoch, self.position.step, count, self.records.device
        )
        self._samples[:count].copy_(indices.samples)
        self._epochs[:count].copy_(indices.epochs)
        self._batch_sizes = indices.lengths
        self._row = 0
        self.records.reset()
        return True

    def _gather_by_torch(self) -> Batch:
        """The current batch, transforms applied."""
        plan = self.position.plan
        row = self.records.next_row
        samples = self._samples.index_select(0, row).view(-1)[: self.batch_size]
        if plan.has_random_transforms:
            epochs = self._epochs.index_select(0, row).view(-1)[: self.batch_size]
        else:
            # No transform reads the epochs, so any tensor will do and one kernel is saved.
            epochs = samples
        return plan.fetch(samples, epochs)

    def _may_gather_at_once(self, count: int) -> bool:
        """Whether one kernel may gather so many batches: whole rows of the table, few bytes.

        Each batch must also begin where memory of its own would begin: cuBLAS and compiled code
        choose kernels by that, and with the kernels the bits.
        """
        is_full_row = self.batch_size == self._samples.shape[1]
        if count == 1 or not self.records.use_kernels or not is_full_row:
            return False
        bytes_per_sample = [row_bytes(column) for column in self._columns().values()]
        bytes_per_sample += [table.itemsize for table in self._tables_of_random_numbers()]
        sizes = [self.batch_size * sample_bytes for sample_bytes in bytes_per_sample]
        is_aligned = all(size % ALLOCATION_BYTES == 0 for size in sizes)
        return is_aligned and count * sum(sizes) <= MAX_GATHER_BYTES

    def _gather_by_kernel(self, count: int) -> list[GatheredBatch] | None:
        """So many batches from the current one on, by one kernel; None where it cannot run."""
        result = gather_samples(
            self._columns(),
            self._samples,
            self.records.next_row,
            count * self.batch_size,
            self._tables_of_random_numbers(),
        )
        if result is None:
            return None
        columns, tables = result
        column_parts = {name: split_storage(column, count) for name, column in columns.items()}
        if tables:
            samples, epochs = [split_storage(table, count) for table in tables]
        else:
            # No transform reads them, so any tensor will do.
            samples = [self._samples[0, : self.batch_size]] * count
            epochs = samples
        batches = []
        for i in range(count):
            batch_columns = {name: parts[i] for name, parts in column_parts.items()}
            batches.append(GatheredBatch(batch_columns, samples[i], epochs[i]))
        return batches

    def _columns(self) -> dict[str, Tensor]:
        source = self.position.plan.source
        assert isinstance(source, ColumnSource)
        return source.tensors

    def _tables_of_random_numbers(self) -> tuple[Tensor, ...]:
        """The tables that seed random transforms, where the data has any."""
        if self.position.plan.has_random_transforms:
            return (self._samples, self._epochs)
        return ()

    def _transform(self, batch: GatheredBatch) -> Batch:
        columns = batch.columns
        for transform in self.position.plan.maps:
            columns = transform(columns, batch.epochs, batch.samples)
        return columns


class StagedInputs:
    """Batches from anywhere, each copied into tensors that stay: one set for each shape."""

    def __init__(self, feed: Feed, records: RecordBuffer) -> None:
        self.feed = feed
        self.records = records
        self.batch_size = 0  # of the current batch
        self._row = 0  # of the next batch's record
        self._source: Iterator[Args] | None = None
        self._static_tensors: dict[Hashable, list[Tensor]] = {}  # never freed: graphs read them
        self._current: Args = ()

    def start(self) -> None:
        """Begins a pass at the feed's position."""
        self._source = self.feed.start()
        self._row = 0
        self.records.reset()

    def next(self) -> Hashable | None:
        """Moves to the next batch. Returns the key of its shape; None at the end of the pass."""
        assert self._source is not None
        args = next(self._source, None)
        if args is None:
            return None
        if self.needs_refill():
            self._row = 0
            self.records.reset()
        self.batch_size = batch_size(args)
        self._row += 1
        return self._stage(args)

    def batch(self) -> Args:
        """The current batch."""
        return self._current

    def batches(self, count: int) -> Iterator[Args]:
        """The current batch: only one is staged at a time."""
        assert count == 1
        yield self._current

    def count_same_shape(self, limit: int) -> int:
        """1: the next batch is not there yet."""
        return 1

    def skip(self, batch_count: int) -> None:
        """Nothing to skip: batches run one by one."""
        assert batch_count == 0

    def needs_refill(self) -> bool:
        """Whether all rows of the record buffer are used."""
        return self._row == self.records.capacity

    def switch_feed(self, feed: Feed) -> bool:
        """Goes on with another feed; False if its data lies on the device."""
        if resident_dataset(feed, self.records.device) is not None:
            return False
        self.feed = feed
        return True

    def _stage(self, args: Args) -> Hashable:
        """Copies the tensors of a batch into static ones of the same shapes. Returns its key.

        Values that are no tensors become part of the graph as they are, so they are in the key.
        """
        # Most batches are a tuple of tensors: flattening a tree takes longer than the rest of this.
        if all(isinstance(arg, Tensor) for arg in args):
            leaves: list[Any] = list(args)
            spec = None
        else:
            leaves, spec = tree_flatten(args)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        values = [leaf for leaf in leaves if not isinstance(leaf, Tensor)]
        shapes = tuple([(tuple(t.shape), t.dtype, t.stride()) for t in tensors])

        is_new = shapes not in self._static_tensors
        has_capacity = not is_new or len(self._static_tensors) < MAX_GRAPHS
        if not has_capacity or not all(type(value) in PLAIN_TYPES for value in values):
            self._current = args
            return UNCAPTURABLE

        if is_new:
            device = self.records.device
            self._static_tensors[shapes] = [torch.empty_like(t, device=device) for t in tensors]
        static_tensors = self._static_tensors[shapes]
        for static, tensor in zip(static_tensors, tensors, strict=True):
            self._copy(static, tensor)

        remaining = iter(static_tensors)
        staged = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if spec is None:
            self._current = tuple(staged)
        else:
            self._current = tree_unflatten(staged, spec)

        # The repr tells 0.0 from -0.0, which compare equal; the type tells 1 from True.
        value_keys = tuple([(type(value), repr(value)) for value in values])
        return (str(spec), shapes, value_keys)

    def _copy(self, target: Tensor, source: Tensor) -> None:
        # Only from pinned memory does a copy to the device not wait.
        to_device = self.records.device.type == "cuda" and source.device.type == "cpu"
        if to_device and not source.is_pinned():
            source = source.pin_memory()
        target.copy_(source, non_blocking=True)


def make_inputs(feed: Feed, records: RecordBuffer) -> ResidentInputs | StagedInputs:
    """The inputs for a feed: gathered where its data lies on the device, else staged."""
    data = resident_dataset(feed, records.device)
    if data is None:
        return StagedInputs(feed, records)
    return ResidentInputs(feed, records, data)


def resident_dataset(feed: Feed, device: torch.device) -> Dataset | None:
    """The feed's data set, if its batches can be gathered on the device by numbers alone."""
    data = feed.data
    if not isinstance(data, Dataset):
        return None
    if not data.plan.runs_no_user_code or data.plan.source.device != device:
        return None
    return data
