"""The fluent pipeline: `Dataset(...).map(...).shuffle().batch(64).repeat(2)`, exact and seekable."""

import warnings
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NoReturn

import torch

from halfstep.data import hashing
from halfstep.data.pipeline.iterate import Mark, Pass, Workers
from halfstep.data.pipeline.maps import Select, is_transform, listed, mapped
from halfstep.data.pipeline.maps__parts import Batch
from halfstep.data.pipeline.plan import Plan
from halfstep.data.pipeline.plan__position import Position, load
from halfstep.data.pipeline.residency import Placed, found, place
from halfstep.data.pipeline.residency__load import loaded
from halfstep.data.pipeline.source__given import source_of
from halfstep.data.pipeline.stages import Part, Repeat, Shard, Shuffle, Stage, Window
from halfstep.errors import Notice
from halfstep.utils.checks import whole_number

Budget = int | float | str | None


class Dataset:
    """Samples by column name, in an order that is a function of (seed, epoch, position).

    Every method gives a new Dataset and leaves this one alone. Each `for` over it is one pass and the next `for` the
    next pass, shuffled anew, whether or not the last one was gone through. `state_dict()` says where the newest pass
    stands; after `load_state_dict` the next `for` goes on exactly there. Tensors and arrays are not copied.
    """

    def __init__(
        self,
        data: Any,
        columns: str | Sequence[str] | None = None,
        *,
        seed: int = 0,
        classes: Sequence[str] = (),
    ) -> None:
        self.plan = Plan(source_of(data, columns), whole_number("seed", seed, type_error=TypeError))
        known = getattr(data, "classes", ())  # as torchvision's data sets and ImageFolder have them
        self.classes = tuple(classes or (known if isinstance(known, list | tuple) else ()))
        self.placement = found(self.plan)
        self._budget: Budget = None
        self._workers: tuple[int, int] | Workers | None = None
        self._next = Position(self.plan)
        self._mark: Mark | None = None

    # stages

    def map(
        self, operations: Any, columns: str | Sequence[str] | None = None, *, output: Any = None
    ) -> "Dataset":
        """Change columns: a transform of hs.data, or a function (of one sample before `batch`, of the batch after it)
        that takes the columns in order and returns the new ones. `output` names them where the names change."""
        if columns is None and len(self.columns) > 1 and any(map(is_transform, listed(operations))):
            raise ValueError(
                f"map: expected the columns that the transform is for, out of {list(self.columns)}"
            )
        inputs = self._known(self.columns if columns is None else columns)
        names = (
            inputs if output is None else (output,) if isinstance(output, str) else tuple(output)
        )
        if len(set(names)) < len(names):
            raise ValueError(f"map: expected different names in output=, got {list(names)}")
        return self._with(
            self.plan.mapped(mapped(operations, inputs, names, per_sample=not self.plan.batch))
        )

    def select(self, *columns: str | Sequence[str]) -> "Dataset":
        """Only these columns, in this order."""
        names = columns[0] if len(columns) == 1 else columns
        return self._with(self.plan.mapped([Select(self._known(names))]))  # type: ignore[arg-type]

    def shuffle(self, buffer_size: int | None = None, *, seed: int | None = None) -> "Dataset":
        """A full shuffle, without a table and free to seek; with `buffer_size`, the sliding window of that size."""
        count = len(self.plan.stages) + len(self.plan.batch_stages)
        key = (
            hashing.key(self.plan.seed, count)
            if seed is None
            else whole_number("shuffle: seed", seed, type_error=TypeError)
        )
        if buffer_size is None:
            return self._staged(Shuffle(self.size, key))
        if (buffer := whole_number("shuffle", buffer_size, type_error=TypeError)) < 2:
            raise ValueError(
                f"shuffle: expected a buffer of at least 2 items, got {buffer}. None shuffles fully."
            )
        return self._staged(Window(self.size, buffer, key))

    def batch(self, size: int, drop_remainder: bool = False) -> "Dataset":
        """Items of `size` samples, stacked; the last of a pass may be shorter unless it is dropped."""
        if self.plan.batch:
            raise ValueError(
                f"batch: expected samples, got batches of {self.plan.batch}. Call batch once."
            )
        if (count := whole_number("batch", size, type_error=TypeError)) < 1 or (
            drop_remainder and count > self.size
        ):
            raise ValueError(f"batch: expected 1 to {self.size} samples, got {count}")
        return self._with(replace(self.plan, batch=count, drop_remainder=bool(drop_remainder)))

    def repeat(self, times: int) -> "Dataset":
        """`times` passes as one, each shuffled and augmented anew; before `batch`, batches reach across."""
        if (count := whole_number("repeat", times, type_error=TypeError)) < 1:
            raise ValueError(
                f"repeat: expected 1 or more passes, got {count}. Loop over epochs to go on for ever."
            )
        return self._staged(Repeat(self.size, count))

    def take(self, count: int) -> "Dataset":
        """The first `count` items, all of them when there are fewer."""
        if (first := whole_number("take", count, type_error=TypeError)) < 1:
            raise ValueError(f"take: expected at least 1 item, got {first}")
        return self._staged(Part(min(first, self.size), 0))

    def skip(self, count: int) -> "Dataset":
        """All but the first `count` items."""
        if not 0 <= (first := whole_number("skip", count, type_error=TypeError)) < self.size:
            raise ValueError(
                f"skip: expected 0 to {self.size - 1} of {self.size} items, got {first}"
            )
        return self._staged(Part(self.size - first, first))

    def shard(self, count: int, index: int, *, uneven: str = "keep") -> "Dataset":
        """Every `count`-th item from `index` on: one rank's part. `uneven`: "keep" visits each item once, so parts may
        differ by one; "drop" leaves the remainder out; "pad" repeats items from the start."""
        count, index = (
            whole_number("shard: count", count, type_error=TypeError),
            whole_number("shard: index", index, type_error=TypeError),
        )
        if not 0 <= index < count <= self.size:
            raise ValueError(
                f"shard: expected 0 <= index < count <= {self.size}, got index {index}, count {count}"
            )
        if uneven not in ("keep", "drop", "pad"):
            raise ValueError(f"shard: expected uneven='keep', 'drop' or 'pad', got {uneven!r}")
        return self._staged(Shard(self.size, count, index, uneven))

    # where it runs: the position stays

    def workers(self, count: int, *, ahead: int = 2) -> "Dataset":
        """Fetch in `count` processes of torch's DataLoader, each `ahead` batches ahead; the stream stays the same."""
        count, ahead = (
            whole_number("workers", count, type_error=TypeError),
            whole_number("workers: ahead", ahead, type_error=TypeError),
        )
        if count < 0 or ahead < 1:
            raise ValueError(
                f"workers: expected count >= 0 and ahead >= 1, got {count} and {ahead}"
            )
        if count and self.plan.source.device.type != "cpu":
            raise ValueError(
                f"workers: expected data on the host, got it {self.placement}. It needs no workers there."
            )
        new = self._moved(self.plan)
        new._workers = (count, ahead) if count else None
        return new

    def to_device(self, device: torch.device | str = "cuda", *, budget: Budget = None) -> "Dataset":
        """Keep the data on the device as it was read and gather batches there, or, when it does not fit the budget or
        cannot be gathered, stream batches through pinned memory; `placement` says which and why."""
        placed = place(self.plan, torch.device(device), budget)
        if not placed.honoured:
            warnings.warn(
                f"to_device: streaming to {device}, not resident: {placed.placement.reason}",
                Notice,
                2,
            )
        return self._placed(placed, budget)

    def near(self, device: torch.device) -> "Dataset":
        """to_device for data that nobody has placed yet, without remarks: what an engine does by itself."""
        there = self.placement.kind != "host" or self.placement.device == device
        return self if there else self._placed(place(self.plan, device, None), None)

    def load(self) -> "Dataset":
        """Read every sample into memory once, so that it can be gathered or kept on a device. Transforms without random
        numbers that come first on a column are applied where that makes its samples equal or smaller."""
        new = self._moved(loaded(self.plan))
        if self.placement.kind == "stream" and new.plan is not self.plan:
            return new.to_device(self.placement.device, budget=self._budget)
        return new

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
        return (self._next if self._mark is None or self._mark.done else self._mark).plan.size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(
            "a Dataset has an order and no index: iterate over it, or take item n by next(iter(data.skip(n))). "
            "It needs no DataLoader: .shuffle(), .batch(64) and .workers(4) do the same."
        )

    def __iter__(self) -> Pass:
        return self._begin(lambda item: tuple(item.values()))

    def dicts(self) -> Pass:
        """The next pass, or the rest of the one loaded, as a dict per item."""
        return self._begin(lambda item: item)

    def seek(self, epoch: int, step: int = 0) -> None:
        """Let the next `for` begin at item `step` of pass `epoch`, at no cost."""
        epoch, step = (
            whole_number("seek: epoch", epoch, type_error=TypeError),
            whole_number("seek: step", step, type_error=TypeError),
        )
        if epoch < 0 or not 0 <= step <= self.size:
            raise ValueError(
                f"seek: expected an epoch from 0 and a step of 0 to {self.size}, got {epoch} and {step}"
            )
        self._next, self._mark = Position(self.plan, epoch, step), None

    def state_dict(self) -> dict[str, Any]:
        """Where the newest pass stands: what was delivered, not what was fetched ahead. Integers and strings only.
        Of several passes at once, each iterator has a `state_dict()` of its own."""
        return (self._next if self._mark is None else self._mark.position).state()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next `for` go on there; a position of m shards loads into n, and each item still comes once."""
        self._next, self._mark = load(self.plan, state), None

    def __repr__(self) -> str:
        return f"Dataset({'; '.join(self.plan.describe())}; {self.placement})"

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no pass under way, and workers of its own."""
        workers = (
            (self._workers.count, self._workers.ahead)
            if isinstance(self._workers, Workers)
            else self._workers
        )
        return {**self.__dict__, "_mark": None, "_workers": workers}

    def begin(self) -> Mark:
        """The next pass as its place alone, for an engine that gathers the samples itself."""
        here = self._next
        self._mark, self._next = Mark(here.plan, here.epoch, here.step), here.next()
        return self._mark

    def take_pass(self) -> dict[str, Any]:
        """The state of the next pass, which somebody else goes through: the one after it is next here."""
        state = self._next.state()
        self.begin()
        return state

    def _begin(self, form: Callable[[Batch], Any]) -> Pass:
        mark = self.begin()
        if isinstance(self._workers, tuple):
            self._workers = Workers(
                self.plan, *self._workers, pin=self.placement.device.type == "cuda"
            )
        return Pass(mark, self.placement, self._workers, form)

    def _known(self, columns: str | Sequence[str]) -> tuple[str, ...]:
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        if not names or set(names) - set(self.columns) or len(set(names)) < len(names):
            raise ValueError(
                f"expected columns out of {list(self.columns)}, each once, got {list(names)}"
            )
        return names

    def _placed(self, placed: Placed, budget: Budget) -> "Dataset":
        new = self._moved(placed.plan)
        new.placement, new._budget = placed.placement, budget
        if placed.plan.source.device.type != "cpu":
            new._workers = None  # other processes could not gather there
        return new

    def _staged(self, stage: Stage) -> "Dataset":
        return self._with(self.plan.staged(stage))

    def _with(self, plan: Plan) -> "Dataset":
        new = copy(self)
        new.plan, new._next = plan, Position(plan)
        return new

    def _moved(self, plan: Plan) -> "Dataset":
        """The same items from elsewhere: the position stays."""
        new, here = self._with(plan), self._next
        new._next = replace(here, plan=here.plan.with_source(plan.source, plan.maps))
        return new
