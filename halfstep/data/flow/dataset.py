"""The fluent pipeline: `Dataset(...).map(...).shuffle().batch(64).repeat(2)`, exact and seekable."""

import warnings
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from halfstep.data import hashing
from halfstep.data.flow.cursor import Cursor, Placement, Workers
from halfstep.data.flow.maps import mapped
from halfstep.data.flow.place import place
from halfstep.data.flow.plan import Plan
from halfstep.data.flow.position import Position, load
from halfstep.data.flow.source import Batch, loaded, source_of
from halfstep.data.flow.stages import Part, Repeat, Shard, Shuffle, Stage, Window
from halfstep.errors import Notice


class Dataset:
    """Samples by column name, in an order that is a function of (seed, epoch, position).

    Every method gives a new Dataset and leaves this one alone. Each `for` over it is one pass and the next `for` the
    next pass, shuffled anew. `state_dict()` says where the newest pass stands; after `load_state_dict` the next `for`
    goes on exactly there.
    """

    def __init__(
        self, data: Any, columns: Sequence[str] | None = None, *, seed: int = 0, classes: Sequence[str] = ()
    ) -> None:
        if not isinstance(seed, int):
            raise TypeError(f"expected an integer seed, got {seed!r}")
        self.plan = Plan(source_of(data, columns), seed)
        self.classes = tuple(classes)  # the names of the labels, where the reader knows them
        self.placement = Placement()
        self._workers: tuple[int, int] | Workers | None = None
        self._next = Position(self.plan)
        self._cursor: Cursor | None = None

    # stages

    def map(self, operations: Any, columns: str | Sequence[str] | None = None, *, output: Any = None) -> "Dataset":
        """Change columns: a transform of hs.data, or a function (of one sample before `batch`, of the batch after it)
        that takes the columns in order and returns the new ones. `output` names them where the names change."""
        inputs = self._known(columns if columns is not None else self.columns)
        names = (output,) if isinstance(output, str) else tuple(output) if output is not None else inputs
        return self._with(self.plan.mapped(mapped(operations, inputs, names, per_sample=not self.plan.batch)))

    def shuffle(self, buffer_size: int | None = None, *, seed: int | None = None) -> "Dataset":
        """A full shuffle, without a table and free to seek; with `buffer_size`, the sliding window of that size."""
        count = len(self.plan.stages) + len(self.plan.batch_stages)
        key = hashing.key(self.plan.seed, count) if seed is None else seed
        if buffer_size is None:
            return self._staged(Shuffle(self.size, key))
        if buffer_size < 2:
            raise ValueError(f"shuffle: expected a buffer of at least 2 items, got {buffer_size}. None shuffles fully.")
        return self._staged(Window(self.size, buffer_size, key))

    def batch(self, size: int, *, drop_remainder: bool = False) -> "Dataset":
        """Items of `size` samples, stacked; the last of a pass may be shorter unless it is dropped."""
        if self.plan.batch:
            raise ValueError(f"batch: expected samples, got batches of {self.plan.batch}. Call batch once.")
        if size < 1 or (drop_remainder and size > self.size):
            raise ValueError(f"batch: expected 1 to {self.size} samples, got {size}")
        return self._with(replace(self.plan, batch=size, drop_remainder=drop_remainder))

    def repeat(self, times: int) -> "Dataset":
        """`times` passes as one, each shuffled and augmented anew; before `batch`, batches reach across."""
        if times < 1:
            raise ValueError(f"repeat: expected 1 or more passes, got {times}. Loop over epochs to go on for ever.")
        return self._staged(Repeat(self.size, times))

    def take(self, count: int) -> "Dataset":
        """The first `count` items, all of them when there are fewer."""
        if count < 1:
            raise ValueError(f"take: expected at least 1 item, got {count}")
        return self._staged(Part(min(count, self.size), 0))

    def skip(self, count: int) -> "Dataset":
        """All but the first `count` items."""
        if not 0 <= count < self.size:
            raise ValueError(f"skip: expected 0 to {self.size - 1} of {self.size} items, got {count}")
        return self._staged(Part(self.size - count, count))

    def shard(self, count: int, index: int, *, uneven: str = "keep") -> "Dataset":
        """Every `count`-th item from `index` on: one rank's part. `uneven`: "keep" visits each item once, so parts may
        differ by one; "drop" leaves the remainder out; "pad" repeats items from the start."""
        if not 0 <= index < count <= self.size:
            raise ValueError(f"shard: expected 0 <= index < count <= {self.size}, got index {index}, count {count}")
        if uneven not in ("keep", "drop", "pad"):
            raise ValueError(f"shard: expected uneven='keep', 'drop' or 'pad', got {uneven!r}")
        return self._staged(Shard(self.size, count, index, uneven))

    def select(self, *columns: str) -> "Dataset":
        """Only these columns, in this order."""
        return self._with(replace(self.plan, names=self._known(columns)))

    # where it runs

    def workers(self, count: int, *, ahead: int = 2) -> "Dataset":
        """Fetch in `count` processes of torch's DataLoader, each `ahead` batches ahead; the stream stays the same."""
        if count < 0 or ahead < 1:
            raise ValueError(f"workers: expected count >= 0 and ahead >= 1, got {count} and {ahead}")
        new = self._with(self.plan)
        new._workers = (count, ahead) if count else None
        return new

    def to_device(self, device: torch.device | str = "cuda", *, budget: int | float | str | None = None) -> "Dataset":
        """Keep the data on the device as it was read and gather batches there, or, when it does not fit the budget or
        cannot be gathered, stream batches through pinned memory; `placement` says which and why."""
        placed = place(self.plan, torch.device(device), budget)
        if not placed.asked:
            warnings.warn(f"to_device: streaming to {device}, not resident: {placed.placement.reason}", Notice, 2)
        new = self._with(placed.plan)
        new.placement = placed.placement
        return new

    def load(self) -> "Dataset":
        """Read every sample into memory once, so that it can be gathered or kept on a device; stages and maps stay."""
        return self._with(self.plan.with_source(loaded(self.plan.source)))

    def fresh(self) -> "Dataset":
        """The same pipeline with a position of its own, at the start."""
        return self._with(self.plan)

    # iteration

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of what an item holds, in order."""
        return self.plan.columns

    @property
    def size(self) -> int:
        """Items in one pass, repeats included: batches, or samples where nothing is batched."""
        return self.plan.size

    @property
    def pass_size(self) -> int:
        """Items in the pass that stands next or under way: fewer than `size` in one that other shards began."""
        return self._position().plan.size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return (tuple(item.values()) for item in self.dicts())

    def dicts(self) -> Iterator[Batch]:
        """The next pass, or the rest of the one loaded, as a dict per item."""
        position = self._next
        self._cursor = Cursor(position.plan, self.placement, position.epoch, position.step, self._started_workers())
        self._next = Position(self.plan, position.epoch + 1)
        return self._cursor if self.plan.batch else map(_single, self._cursor)

    def seek(self, epoch: int, step: int = 0) -> None:
        """Let the next `for` begin at item `step` of pass `epoch`, at no cost."""
        if epoch < 0 or not 0 <= step <= self.size:
            raise ValueError(f"seek: expected an epoch from 0 and a step of 0 to {self.size}, got {epoch} and {step}")
        self._next, self._cursor = Position(self.plan, epoch, step), None

    def state_dict(self) -> dict[str, Any]:
        """Where the newest pass stands: what was delivered, not what was fetched ahead. Integers and strings only."""
        return self._position().state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `for` go on there; a position of m shards loads into n, and each item still comes once."""
        self._next, self._cursor = load(self.plan, state), None

    def __repr__(self) -> str:
        return f"Dataset({'; '.join(self.plan.describe())}; {self.placement})"

    def _position(self) -> Position:
        if self._cursor is None or self._cursor.done:
            return self._next
        return Position(self._cursor.plan, self._cursor.epoch, self._cursor.step)

    def _started_workers(self) -> Workers | None:
        if isinstance(self._workers, tuple):
            self._workers = Workers(self.plan, *self._workers, pin=self.placement.device.type == "cuda")
        return self._workers

    def _known(self, columns: str | Sequence[str]) -> tuple[str, ...]:
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        if not names or set(names) - set(self.columns):
            raise ValueError(f"expected columns out of {list(self.columns)}, got {list(names)}")
        return names

    def _staged(self, stage: Stage) -> "Dataset":
        return self._with(self.plan.staged(stage))

    def _with(self, plan: Plan) -> "Dataset":
        new = copy(self)
        new.plan, new._next, new._cursor = plan, Position(plan), None
        if isinstance(new._workers, Workers):
            new._workers = new._workers.count, new._workers.ahead
        return new


def _single(item: Batch) -> Batch:
    return {name: column[0] for name, column in item.items()}
