"""A pipeline as a value: a source, stages that order its items, maps that change them.

    source → stages on samples → maps on samples → batch → stages on batches → maps on batches

It knows no position; see position.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from halfstep.data.pipeline.collate import Batch, stack_or_raise
from halfstep.data.pipeline.function_map import FunctionMap, describe_callable
from halfstep.data.pipeline.maps import (
    Map,
    MixMap,
    TransformMap,
    join_chains,
)
from halfstep.data.pipeline.seeding import seeded_generators
from halfstep.data.pipeline.source import ColumnSource, Source, only_sample
from halfstep.data.pipeline.stages import BufferShuffle, Shard, Stage
from halfstep.data.transforms import mixed_specs, spec

_CPU = torch.device("cpu")

# Pass and number of a batch's first sample, on the host: the seed of the user's random code.
SeedKey = tuple[int, int]


@dataclass(frozen=True)
class SampleIndices:
    """Which samples of which pass make up some batches.

    Both tensors are int64 [batches, batch size]; the tail of a short batch repeats a sample.
    """

    samples: Tensor
    epochs: Tensor
    lengths: tuple[int, ...]
    seed_keys: tuple[SeedKey, ...] = ()  # only where code of the user's runs

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        """Samples and passes of batch i, without the tail."""
        length = self.lengths[i]
        return self.samples[i, :length], self.epochs[i, :length]


@dataclass(frozen=True)
class Plan:
    """The chain of a pipeline, and what follows from it: sizes, sample indices, fetched batches.

    Sizes are computed when they are requested, not stored: a data set of the user's may grow
    between passes. A pass computes its size once, when it begins.
    """

    source: Source
    seed: int = 0
    stages: tuple[Stage, ...] = ()
    maps: tuple[Map, ...] = ()
    batch_size: int = 0  # samples in a batch; 0: not batched
    drop_remainder: bool = False
    batch_stages: tuple[Stage, ...] = ()

    # Sizes

    @property
    def sample_count(self) -> int:
        """Samples in one pass, before batching."""
        return self.stages[-1].size if self.stages else self.source.size

    @property
    def batch_count(self) -> int:
        """Batches in one pass of the samples, before any stage on batches."""
        if self.drop_remainder:
            return self.sample_count // self.samples_per_item
        return -(-self.sample_count // self.samples_per_item)

    @property
    def size(self) -> int:
        """Items in one pass: batches, or samples where nothing is batched."""
        return self.batch_stages[-1].size if self.batch_stages else self.batch_count

    @property
    def samples_per_item(self) -> int:
        """Samples in a full batch; 1 where nothing is batched."""
        return self.batch_size or 1

    # What the parts allow

    @cached_property
    def is_indexable(self) -> bool:
        """Whether the order is arithmetic that runs on any device.

        A shuffle by a buffer is not: it is a walk through the pass, on the host.
        """
        stages = (*self.stages, *self.batch_stages)
        return not any(isinstance(stage, BufferShuffle) for stage in stages)

    @cached_property
    def runs_no_user_code(self) -> bool:
        """Whether a fetch runs no code of the user's."""
        calls_function = any(isinstance(operation, FunctionMap) for operation in self.maps)
        return isinstance(self.source, ColumnSource) and not calls_function

    def user_code(self) -> dict[str, Any]:
        """The user's objects that a fetch calls, by name: the data set, and each function."""
        objects: dict[str, Any] = {}
        if not isinstance(self.source, ColumnSource):
            objects["the data set"] = getattr(self.source, "dataset", self.source)
        for operation in self.maps:
            if isinstance(operation, FunctionMap):
                objects[f"map({describe_callable(operation.function)})"] = operation.function
        return objects

    @property
    def has_random_transforms(self) -> bool:
        """Whether a transform draws random numbers, so that a fetch depends on the pass."""
        if any(isinstance(operation, MixMap) for operation in self.maps):
            return True
        chains = [operation for operation in self.maps if isinstance(operation, TransformMap)]
        return any(transform.draws for chain in chains for transform in chain.transforms)

    @property
    def sample_function(self) -> FunctionMap | None:
        """The first function that must see single samples on the host, if any."""
        for operation in self.maps:
            if isinstance(operation, FunctionMap) and operation.per_sample:
                return operation
        return None

    @property
    def column_versions(self) -> list[int]:
        """How often each column in memory has been written to."""
        if not isinstance(self.source, ColumnSource):
            return []
        return [column._version for column in self.source.tensors.values()]

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of what a fetched batch holds, in order."""
        names = self.source.names
        for operation in self.maps:
            names = operation.output_names(names)
        return names

    def column_specs(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape (after the batch dimension) and dtype of columns that no function has changed."""
        specs: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if isinstance(self.source, ColumnSource):
            for name, column in self.source.tensors.items():
                specs[name] = (tuple(column.shape[1:]), column.dtype)

        for operation in self.maps:
            if isinstance(operation, FunctionMap):
                for name in (*operation.columns, *operation.output):
                    specs.pop(name, None)
            elif isinstance(operation, MixMap):
                self._mix_specs(operation, specs)
            elif isinstance(operation, TransformMap):
                for name in specs.keys() & set(operation.columns):
                    sample_shape, dtype = specs[name]
                    shape, dtype = spec(operation.transforms, (2, *sample_shape), dtype)
                    specs[name] = (shape[1:], dtype)
        return specs

    def _mix_specs(
        self, operation: MixMap, specs: dict[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> None:
        """Changes the specs of images and labels, where both are known."""
        if not all(name in specs for name in operation.columns):
            for name in operation.columns:
                specs.pop(name, None)
            return
        images, labels = [((2, *specs[name][0]), specs[name][1]) for name in operation.columns]
        mixed = mixed_specs(operation.mixer, images, labels)
        for name, (shape, dtype) in zip(operation.columns, mixed, strict=True):
            specs[name] = (shape[1:], dtype)

    # New plans from this one

    def with_stage(self, stage: Stage) -> "Plan":
        """With one more stage, on batches where there are batches."""
        if self.batch_size:
            return replace(self, batch_stages=(*self.batch_stages, stage))
        return replace(self, stages=(*self.stages, stage))

    def with_maps(self, maps: Sequence[Map]) -> "Plan":
        """With more maps at the end."""
        plan = replace(self, maps=join_chains((*self.maps, *maps), self.seed))
        plan.column_specs()  # a chain that does not fit its column fails now, not in a batch
        return plan

    def with_source(self, source: Source, maps: tuple[Map, ...] | None = None) -> "Plan":
        """The same pipeline over another source, and with other maps where they are named."""
        return replace(self, source=source, maps=self.maps if maps is None else maps)

    # Order

    def sample_indices(
        self, epoch: int, start: int, count: int, device: torch.device | str = "cpu"
    ) -> SampleIndices:
        """The samples of items start..start+count−1 of a pass.

        Takes a fixed number of kernels and no host sync.
        """
        width = min(
            self.samples_per_item, self.sample_count
        )  # a batch larger than the set is the set
        samples, epochs = self._batch_samples(epoch, start, count, width, torch.device(device))
        seed_keys: tuple[SeedKey, ...] = ()
        if not self.runs_no_user_code:
            firsts, passes = self._batch_samples(epoch, start, count, 1, _CPU)
            pairs = zip(passes.flatten().tolist(), firsts.flatten().tolist(), strict=True)
            seed_keys = tuple(pairs)
        return SampleIndices(samples, epochs, self._lengths(epoch, start, count), seed_keys)

    def _batch_samples(
        self, epoch: int, start: int, count: int, width: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The first `width` samples of each batch, and the pass of each, as [count, width]."""
        compute_device = device if self.is_indexable else _CPU
        epochs, batches = self._batch_numbers(epoch, start, count, compute_device)

        # Positions of the samples in their pass. The last batch may be short: its tail repeats the
        # last sample.
        offsets = torch.arange(width, device=compute_device)
        positions = batches * self.samples_per_item + offsets
        if self.sample_count % self.samples_per_item:
            positions = positions.clamp(max=self.sample_count - 1)

        # Back through the stages, to the numbers of the source.
        for stage in reversed(self.stages):
            epochs, positions = stage.to_input_index(epochs, positions)
        return positions.to(device), epochs.expand_as(positions).to(device)

    def _batch_numbers(
        self, epoch: int, start: int, count: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """The pass and the batch of each item, before the stages on batches, as [count, 1]."""
        batches = torch.arange(start, start + count, device=device).unsqueeze(1)
        epochs = torch.full_like(batches, epoch)
        for stage in reversed(self.batch_stages):
            epochs, batches = stage.to_input_index(epochs, batches)
        return epochs, batches

    def _lengths(self, epoch: int, start: int, count: int) -> tuple[int, ...]:
        """Samples in each batch."""
        full_length = self.samples_per_item
        last_length = self.sample_count % full_length
        if last_length == 0 or self.drop_remainder:
            return (full_length,) * count
        # On the host: shapes must be known there.
        _, batches = self._batch_numbers(epoch, start, count, _CPU)
        last_batch = self.batch_count - 1
        return tuple(
            last_length if batch == last_batch else full_length
            for batch in batches.flatten().tolist()
        )

    # Fetching

    def fetch(self, samples: Tensor, epochs: Tensor, seed_key: SeedKey | None = None) -> Batch:
        """Columns with all maps applied.

        With columns on a device and transforms only there is no host sync. Code of the user's runs
        with the host's generators seeded for this batch, so that it repeats in any process.
        """
        if self.runs_no_user_code:
            return self._fetch(samples, epochs)
        if seed_key is None:
            seed_key = (int(epochs[0]), int(samples[0]))
        with seeded_generators(self.seed, *seed_key):
            return self._fetch(samples, epochs)

    def _fetch(self, samples: Tensor, epochs: Tensor) -> Batch:
        batch = self.source.fetch(samples)
        for operation in self.maps:
            batch = operation(batch, epochs, samples)
        if not self.batch_size:
            return batch
        return {name: stack_or_raise(name, column) for name, column in batch.items()}

    def item(self, samples: Tensor, epochs: Tensor, seed_key: SeedKey | None = None) -> Batch:
        """What is delivered: a batch, or where nothing is batched the sample itself."""
        columns = self.fetch(samples, epochs, seed_key)
        return columns if self.batch_size else only_sample(columns)

    # Text, and the shard that a resume may change

    def describe(self) -> tuple[str, ...]:
        """A line for each part that decides what is delivered, to compare pipelines by.

        Count and index of the last shard are left open, because they may change on a resume.
        """
        last_shard = self.last_shard()

        def describe_stage(stage: Stage) -> str:
            return stage.open_text if stage is last_shard else str(stage)

        lines = [str(self.source)]
        lines += [describe_stage(stage) for stage in self.stages]
        if self.batch_size:
            lines.append(f"batch({self.batch_size}, drop_remainder={self.drop_remainder})")
        lines += [describe_stage(stage) for stage in self.batch_stages]
        lines += [str(operation) for operation in self.maps]
        lines.append(f"seed {self.seed}")
        return tuple(lines)

    def last_shard(self) -> Shard | None:
        for stage in reversed((*self.stages, *self.batch_stages)):
            if isinstance(stage, Shard):
                return stage
        return None
