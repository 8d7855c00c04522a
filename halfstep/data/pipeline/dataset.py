"""The fluent pipeline: `Dataset(...).map(...).shuffle().batch(64).repeat(2)`, seekable."""

import warnings
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from halfstep.data import hashing
from halfstep.data.pipeline.collate import Batch
from halfstep.data.pipeline.iterate import Pass, PassPosition, Workers, WorkerSettings
from halfstep.data.pipeline.maps import SelectMap, as_list, build_maps, is_transform
from halfstep.data.pipeline.own_generators import find_generators
from halfstep.data.pipeline.plan import Plan
from halfstep.data.pipeline.position import Position, load_position
from halfstep.data.pipeline.residency import (
    Budget,
    PlacedPlan,
    initial_placement,
    place_on,
    read_into_memory,
)
from halfstep.data.pipeline.source import as_source
from halfstep.data.pipeline.stages import BufferShuffle, Repeat, Shard, Shuffle, Slice, Stage
from halfstep.data.pipeline.torchvision_maps import TorchvisionMap, describe_cost
from halfstep.errors import Notice
from halfstep.utils.checks import whole_number
from halfstep.utils.text import write_line

# Methods of other libraries' data sets → what does it here, and the line to write. {n} is a fifth
# of the items.
FOREIGN_METHODS = {
    **dict.fromkeys(
        ("split", "random_split", "train_test_split"),
        (
            "take and skip do it, before .shuffle(). Sorted data is mixed before: "
            "order = torch.randperm(len(x)), then x[order] and y[order]",
            "valid, train = data.take({n}), data.skip({n})",
        ),
    ),
    "prefetch": ("processes that read ahead do it", "data.workers(2, ahead=2)"),
    "cache": ("load reads every sample into memory", "data.load()"),
}


class Dataset:
    """Samples by column name, in an order that is a function of (seed, epoch, position).

    Every method returns a new Dataset and leaves this one alone. Each `for` over it is one pass
    and the next `for` the next pass, shuffled anew, whether or not the last one was finished.
    `state_dict()` says where the newest pass stands; after `load_state_dict` the next `for` goes
    on exactly there. Tensors and arrays are not copied.
    """

    def __init__(
        self,
        data: Any,
        columns: str | Sequence[str] | None = None,
        *,
        seed: int = 0,
        classes: Sequence[str] = (),
    ) -> None:
        source = as_source(data, columns)
        self.plan = Plan(source, whole_number("seed", seed, type_error=TypeError))
        self.placement = initial_placement(self.plan)
        self._budget: Budget = None

        # Class names: as passed, or as torchvision's data sets and ImageFolder have them.
        if not classes:
            known_classes = getattr(data, "classes", ())
            if isinstance(known_classes, list | tuple):
                classes = known_classes
        self.classes: tuple[str, ...] = tuple(classes)

        # Processes start with the first pass.
        self._worker_settings: WorkerSettings | None = None
        self._workers: Workers | None = None

        # The next `for` begins here; the newest pass is there.
        self._next_position = Position(self.plan)
        self._newest_pass: PassPosition | None = None

    # Stages and maps

    def map(
        self, operations: Any, columns: str | Sequence[str] | None = None, *, output: Any = None
    ) -> "Dataset":
        """Changes columns by a transform of hs.data, or by a function.

        A function takes the columns in order and returns the new ones: of one sample before
        `batch`, of the batch after it. `output` names them where the names change.
        """
        if (
            columns is None
            and len(self.columns) > 1
            and any(map(is_transform, as_list(operations)))
        ):
            raise ValueError(
                f"map: expected the columns that the transform is for, out of {list(self.columns)}"
            )
        inputs = self._check_columns(self.columns if columns is None else columns)
        if output is None:
            outputs = inputs
        elif isinstance(output, str):
            outputs = (output,)
        else:
            outputs = tuple(output)
        if len(set(outputs)) < len(outputs):
            raise ValueError(f"map: expected different names in output=, got {list(outputs)}")
        maps = build_maps(operations, inputs, outputs, per_sample=not self.plan.batch_size)
        for operation in maps:
            if isinstance(operation, TorchvisionMap):
                warnings.warn(describe_cost(operation.function), Notice, stacklevel=2)
        return self._with_plan(self.plan.with_maps(maps))

    def select(self, *columns: str | Sequence[str]) -> "Dataset":
        """Only these columns, in this order."""
        names: Any = columns[0] if len(columns) == 1 else columns
        return self._with_plan(self.plan.with_maps([SelectMap(self._check_columns(names))]))

    def shuffle(self, buffer_size: int | None = None, *, seed: int | None = None) -> "Dataset":
        """A full shuffle, without a table and free to seek.

        With `buffer_size`, a shuffle by a sliding buffer of that size.
        """
        if seed is None:
            stage_count = len(self.plan.stages) + len(self.plan.batch_stages)
            stage_seed = hashing.key(self.plan.seed, stage_count)
        else:
            stage_seed = whole_number("shuffle: seed", seed, type_error=TypeError)
        if buffer_size is None:
            return self._with_stage(Shuffle(self.size, stage_seed))
        buffer_size = whole_number("shuffle", buffer_size, type_error=TypeError)
        if buffer_size < 2:
            raise ValueError(
                f"shuffle: expected a buffer of at least 2 items, got {buffer_size}. "
                "None shuffles fully."
            )
        return self._with_stage(BufferShuffle(self.size, buffer_size, stage_seed))

    def batch(self, size: int, drop_remainder: bool = False) -> "Dataset":
        """Items of `size` samples, stacked; the last of a pass may be shorter, or is dropped."""
        if self.plan.batch_size:
            raise ValueError(
                f"batch: expected samples, got batches of {self.plan.batch_size}. Call batch once."
            )
        batch_size = whole_number("batch", size, type_error=TypeError)
        if batch_size < 1 or (drop_remainder and batch_size > self.size):
            raise ValueError(f"batch: expected 1 to {self.size} samples, got {batch_size}")
        plan = replace(self.plan, batch_size=batch_size, drop_remainder=bool(drop_remainder))
        return self._with_plan(plan)

    def repeat(self, times: int) -> "Dataset":
        """`times` passes as one, each shuffled and augmented anew.

        Before `batch`, a batch may reach from one into the next.
        """
        times = whole_number("repeat", times, type_error=TypeError)
        if times < 1:
            raise ValueError(
                f"repeat: expected 1 or more passes, got {times}. "
                "Loop over epochs to go on for ever."
            )
        return self._with_stage(Repeat(self.size, times))

    def take(self, count: int) -> "Dataset":
        """The first `count` items, all of them when there are fewer."""
        count = whole_number("take", count, minimum=1, of_what="items", type_error=TypeError)
        return self._with_stage(Slice(min(count, self.size), 0))

    def skip(self, count: int) -> "Dataset":
        """All but the first `count` items."""
        count = whole_number("skip", count, type_error=TypeError)
        if not 0 <= count < self.size:
            raise ValueError(
                f"skip: expected 0 to {self.size - 1} of {self.size} items, got {count}"
            )
        return self._with_stage(Slice(self.size - count, count))

    def shard(self, count: int, index: int, *, uneven: str = "keep") -> "Dataset":
        """Every `count`-th item from `index` on: the part of one rank.

        `uneven`: "keep" visits each item once, so parts may differ by one; "drop" leaves the
        remainder out; "pad" repeats items from the start.
        """
        count = whole_number("shard: count", count, type_error=TypeError)
        index = whole_number("shard: index", index, type_error=TypeError)
        if not 0 <= index < count <= self.size:
            raise ValueError(
                f"shard: expected 0 <= index < count <= {self.size}, "
                f"got index {index}, count {count}"
            )
        if uneven not in ("keep", "drop", "pad"):
            raise ValueError(f"shard: expected uneven='keep', 'drop' or 'pad', got {uneven!r}")
        return self._with_stage(Shard(self.size, count, index, uneven))

    # Where it runs: these keep the position

    def workers(self, count: int, *, ahead: int = 2) -> "Dataset":
        """Fetches in `count` processes of torch's DataLoader, each `ahead` batches ahead.

        The stream of items stays the same.
        """
        count = whole_number("workers: count", count, minimum=0, type_error=TypeError)
        ahead = whole_number("workers: ahead", ahead, minimum=1, type_error=TypeError)
        if count and self.plan.source.device.type != "cpu":
            raise ValueError(
                f"workers: expected data on the host, got it {self.placement}. "
                "It needs no workers there."
            )
        dataset = self._with_moved_plan(self.plan)
        dataset._worker_settings = WorkerSettings(count, ahead) if count else None
        return dataset

    def to_device(self, device: torch.device | str = "cuda", *, budget: Budget = None) -> "Dataset":
        """Keeps the data on the device as it was read, and gathers batches there.

        Where it does not fit the budget or cannot be gathered, batches are streamed through pinned
        memory instead; `placement` says which, and why.
        """
        placed = place_on(self.plan, torch.device(device), budget)
        if not placed.is_resident:
            warnings.warn(
                f"to_device: streaming to {device}, not resident: {placed.placement.reason}",
                Notice,
                stacklevel=2,
            )
        return self._with_placement(placed, budget)

    def to_device_if_unplaced(self, device: torch.device) -> "Dataset":
        """to_device, without its notice, for data that nobody has placed yet. For an engine."""
        if self.placement.kind != "host" or self.placement.device == device:
            return self
        return self._with_placement(place_on(self.plan, device, None), None)

    def load(self) -> "Dataset":
        """Reads every sample into memory once, so that it can be gathered or kept on a device.

        Transforms without random numbers that come first on a column are applied where that makes
        its samples equal or smaller.
        """
        dataset = self._with_moved_plan(read_into_memory(self.plan))
        if self.placement.kind == "stream" and dataset.plan is not self.plan:
            return dataset.to_device(self.placement.device, budget=self._budget)
        return dataset

    def fresh(self) -> "Dataset":
        """The same pipeline with a position of its own, at the start."""
        return self._with_plan(self.plan)

    # Iteration

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
        """Items in the pass under way, or in the next one where none is.

        Fewer than `size` in a pass that other shards began.
        """
        newest = self._newest_pass
        if newest is None or newest.is_done:
            return self._next_position.plan.size
        return newest.size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(
            "a Dataset has an order and no index: iterate over it, or take item n by "
            "next(iter(data.skip(n))). It needs no DataLoader: .shuffle(), .batch(64) and "
            ".workers(4) do the same."
        )

    def __iter__(self) -> Pass:
        return self._iterate(lambda item: tuple(item.values()))

    def dicts(self) -> Pass:
        """The next pass, or what is left of the one loaded, with a dict for each item."""
        return self._iterate(lambda item: item)

    def seek(self, epoch: int, step: int = 0) -> None:
        """Lets the next `for` begin at item `step` of pass `epoch`, at no cost."""
        epoch = whole_number("seek: epoch", epoch, minimum=0, type_error=TypeError)
        step = whole_number("seek: step", step, type_error=TypeError)
        if not 0 <= step <= self.size:
            raise ValueError(f"seek: expected a step of 0 to {self.size}, got {step}")
        self._next_position = Position(self.plan, epoch, step)
        self._newest_pass = None

    def state_dict(self) -> dict[str, Any]:
        """Where the newest pass stands, as integers and strings.

        It counts what was delivered, not what was fetched ahead. Of several passes at once, each
        iterator has a `state_dict()` of its own.
        """
        if self._newest_pass is None:
            return self._next_position.state_dict()
        return self._newest_pass.resume_position.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Lets the next `for` go on there.

        A position of m shards can be loaded into n, and each item still comes once.
        """
        self._next_position = load_position(self.plan, state)
        self._newest_pass = None

    def resume_limits(self) -> list[str]:
        """What a resumed run cannot repeat with this data, in words."""
        paths = find_generators(self.plan.user_code())
        return [
            f"{path} is a random generator that code of yours keeps. What it draws while batches "
            "are fetched depends on all that it drew before, so a resumed run, or one with other "
            "workers, draws other numbers. Draw from torch, numpy.random or random instead: they "
            "are seeded for each batch."
            for path in paths
        ]

    def __repr__(self) -> str:
        return f"Dataset({'; '.join(self.plan.describe())}; {self.placement})"

    # Hidden from type checkers, which know that a Dataset has none of it.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in FOREIGN_METHODS:
                problem, line = FOREIGN_METHODS[name]
                count = max(self.size // 5, 1)
                message = write_line(f"Dataset.{name}: {problem}", line.format(n=count))
            raise AttributeError(message)

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no pass under way, and starts workers of its own."""
        return {**self.__dict__, "_newest_pass": None, "_workers": None}

    def begin_pass(self) -> PassPosition:
        """Begins the next pass and returns its position, for an engine that gathers samples itself.

        The engine moves the position's `step`.
        """
        start = self._next_position
        self._newest_pass = PassPosition(start.plan, start.epoch, start.step)
        self._next_position = start.next_pass()
        return self._newest_pass

    def take_pass(self) -> dict[str, Any]:
        """The state of the next pass, which another object iterates; the pass after it is next."""
        state = self._next_position.state_dict()
        self.begin_pass()
        return state

    def _iterate(self, format_item: Callable[[Batch], Any]) -> Pass:
        position = self.begin_pass()
        if self._workers is None and self._worker_settings is not None:
            pin_memory = self.placement.device.type == "cuda"
            self._workers = Workers(self.plan, self._worker_settings, pin_memory)
        return Pass(position, self.placement, self._workers, format_item)

    def _check_columns(self, columns: str | Sequence[str]) -> tuple[str, ...]:
        """The names as a tuple. Raises a ValueError for an unknown or repeated one."""
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        if not names or set(names) - set(self.columns) or len(set(names)) < len(names):
            raise ValueError(
                f"expected columns out of {list(self.columns)}, each once, got {list(names)}"
            )
        return names

    # Copies with another plan

    def _with_plan(self, plan: Plan) -> "Dataset":
        """Another pipeline, at its start."""
        dataset = copy(self)
        dataset.plan = plan
        dataset._next_position = Position(plan)
        return dataset

    def _with_stage(self, stage: Stage) -> "Dataset":
        return self._with_plan(self.plan.with_stage(stage))

    def _with_moved_plan(self, plan: Plan) -> "Dataset":
        """The same items from another source: the position stays."""
        dataset = self._with_plan(plan)
        position = self._next_position
        moved_plan = position.plan.with_source(plan.source, plan.maps)
        dataset._next_position = replace(position, plan=moved_plan)
        return dataset

    def _with_placement(self, placed: PlacedPlan, budget: Budget) -> "Dataset":
        dataset = self._with_moved_plan(placed.plan)
        dataset.placement = placed.placement
        dataset._budget = budget
        if placed.plan.source.device.type != "cpu":
            dataset._worker_settings = None  # other processes could not gather there
        return dataset
