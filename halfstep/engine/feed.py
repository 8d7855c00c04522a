"""Batches for a step, pass after pass, from whatever the user has.

The position of a feed is that of the steps done, not of the batches fetched.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torch.utils.data import Dataset as TorchDataset

from halfstep.data import Dataset, Loader
from halfstep.data.pipeline.loader_states import DRAWS_LATER, WORKERS, WORKERS_RUNNING
from halfstep.data.pipeline.position import load_position
from halfstep.engine.limits import BatchLimit
from halfstep.errors import Notice
from halfstep.utils import rng
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.saved_state import SavedValue

Args = tuple[Any, ...]  # a batch as the arguments of a step


class Feed:
    """One pass for each `start()`. `advance(n)` says that n more batches were trained on."""

    def __init__(
        self, data: Any, *, named: bool = False, device: torch.device | None = None
    ) -> None:
        self.data = as_batches(data)
        self.named = named  # a batch is one dict by column names
        self.limit = BatchLimit()  # batches of a pass beyond it are left out
        if device is not None and device.type == "cuda" and isinstance(self.data, Dataset):
            self.data = self.data.to_device_if_unplaced(device)
        self.pass_number = 0
        self.step = 0
        self._pass_start = self.data.state_dict()

    @property
    def size(self) -> int | None:
        """Batches in the current pass, up to the limit; None when nobody knows."""
        return self.limit.apply(self._full_size)

    @property
    def _full_size(self) -> int | None:
        return self.data.pass_size if isinstance(self.data, Dataset) else self.data.size

    @property
    def pass_is_over(self) -> bool:
        """Whether all batches of the pass were trained on, as far as one can know before asking."""
        size = self.size
        return size is not None and self.step >= size

    @property
    def samples(self) -> int | None:
        """Samples in a pass, where the batches are all of one size but the last; else None.

        They are so for a Dataset whose batches no stage reorders or repeats, and for a DataLoader
        that batches the samples of its own sampler.
        """
        if not isinstance(self.data, Dataset):
            return self._count_loader_samples(self.data.batches)
        plan = self.data.plan
        if plan.batch_stages:
            return None
        samples = min(plan.sample_count, plan.batch_count * plan.batch_size)
        batches = self.limit.apply(plan.batch_count)
        assert batches is not None
        return min(samples, batches * plan.batch_size)

    def _count_loader_samples(self, loader: Any) -> int | None:
        if type(loader) is not DataLoader or type(loader.batch_sampler) is not BatchSampler:
            return None
        sampler: Any = loader.sampler
        batches = self.size
        if batches is None or not hasattr(sampler, "__len__"):
            return None
        assert loader.batch_size is not None
        return min(len(sampler), batches * loader.batch_size)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns, where the data has some."""
        return self.data.columns if isinstance(self.data, Dataset) else ()

    def start(self) -> Iterator[Args]:
        """The batches of the current pass from its position on, as the arguments of a step."""
        self._pass_start = self.data.state_dict()
        items: Any = self.data
        if self.named and isinstance(self.data, Dataset):
            items = self.data.dicts()
        batches = (_as_arguments(item) for item in items)
        return batches if self.limit.value is None else islice(batches, self.batches_left())

    def batches_left(self) -> int | None:
        """Batches of the pass that are to come; None when nobody knows.

        At least one: where the limit was made smaller, a pass that is beyond it ends with its next
        step.
        """
        size = self.size
        return None if size is None else max(size - self.step, 1)

    def arguments(self, columns: dict[str, Any]) -> Args:
        """A batch by column names, as the arguments of a step."""
        return (columns,) if self.named else tuple(columns.values())

    def advance(self, steps: int) -> None:
        """Counts steps that were done."""
        self.step += steps

    def end_pass(self) -> None:
        """Moves on to the start of the next pass."""
        if self.limit.value is not None:
            self.go_to_pass(self.pass_number + 1)  # the data does not know that its pass is over
            return
        self._rewind(self.pass_number + 1)

    def go_to_pass(self, pass_number: int) -> None:
        """Moves to the start of that pass."""
        if isinstance(self.data, Dataset):
            self.data.seek(pass_number)
        self._rewind(pass_number)

    def _rewind(self, pass_number: int) -> None:
        # A loader does not know that its last batch was the last: nobody asked for another.
        if isinstance(self.data, Loader):
            self.data.epoch = pass_number
            self.data.step = 0
        self.pass_number = pass_number
        self.step = 0
        self._pass_start = self.data.state_dict()

    def state_dict(self) -> dict[str, Any]:
        """The position, as the data saves it."""
        if isinstance(self.data, Dataset):
            saved = self._pass_start
        else:
            saved = self.data.state_dict(self.step)
        return {**saved, "epoch": self.pass_number, "step": self.step}

    def check_state(self, saved: SavedValue) -> None:
        """ValueError for a position that `load_state_dict` cannot take. Changes nothing."""
        if isinstance(self.data, Dataset):
            for name in ("epoch", "step", "shards", "start", "start_epoch"):
                saved.field(name).whole_number(minimum=1 if name == "shards" else 0)
            saved.field("pipeline").texts()
            try:
                load_position(self.data.plan, saved.value)
            except ValueError as error:
                raise ValueError(f"{saved.where}: {error}") from error
            return
        _check_loader_state(self.data, saved)

    def undo_function(self) -> Callable[[], None]:
        """A function that takes back what `load_state_dict` does to the data of the user."""
        if isinstance(self.data, Dataset):  # a copy of the user's
            return lambda: None
        loader = self.data
        attributes = dict(vars(loader))
        generators = loader.save_generators()

        def undo() -> None:
            vars(loader).clear()
            vars(loader).update(attributes)
            loader.load_generators(generators)

        return undo

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a saved position."""
        self.data.load_state_dict(state)
        self._pass_start = self.data.state_dict()
        # After a change of shards these are other numbers than the saved ones.
        self.pass_number = self._pass_start["epoch"]
        self.step = self._pass_start["step"]

    def save_generators(self) -> dict[str, Any]:
        """The states of random generators that the data keeps and its position does not decide."""
        return self.data.save_generators() if isinstance(self.data, Loader) else {}

    def load_generators(self, states: dict[str, Any]) -> None:
        """Sets what `save_generators` returned."""
        if isinstance(self.data, Loader):
            self.data.load_generators(states)

    def check_generators(self, saved: SavedValue) -> None:
        """ValueError for states that `load_generators` cannot set. Changes nothing."""
        saved.entries()
        if isinstance(self.data, Loader):
            _check_generators(self.data, saved)

    def announce_resume_limits(self, argument: str) -> None:
        """Warns of what a run that is stopped and resumed cannot repeat with this data.

        `argument` is the data's name in `fit`.
        """
        for limit in self.data.resume_limits():
            warnings.warn(f"fit: {argument}: {limit}", Notice, stacklevel=user_stacklevel())

    def describe(self) -> list[str]:
        """What it is, in lines that can be compared with those of a saved run."""
        if isinstance(self.data, Dataset):
            return list(self.data.plan.describe())
        return [f"{type(self.data.batches).__name__} of {self._full_size} batches"]


def _check_loader_state(loader: Loader, saved: SavedValue) -> None:
    """Refuses what Loader.load_state_dict, or the first batch after it, would stumble over."""
    saved.field("version").whole_number()
    step = saved.field("step").whole_number()
    saved.field("epoch").whole_number()
    saved.field("began_epoch").whole_number()
    if loader.size is not None and step > loader.size:
        saved.field("step").refuse(f"a whole number, 0 to {loader.size}")
    own = saved.field("own")
    if own.value is not None and not hasattr(loader.batches, "load_state_dict"):
        own.refuse(f"None, as {type(loader.batches).__name__} has no load_state_dict")

    generators = saved.optional_field("generators")
    if generators is not None:
        _check_generators(loader, generators)
    for name in ("began", "now"):
        states = saved.field(name)
        entries = states.entries()
        if entries:
            rng.check_host_states(states)
        if WORKERS in entries:
            entries[WORKERS].whole_number()
        for flag in (WORKERS_RUNNING, DRAWS_LATER):
            if flag in entries:
                entries[flag].flag()
        _check_generators(loader, states)
    generators = saved.optional_field("generators")
    if generators is not None:
        _check_generators(loader, generators)


def _check_generators(loader: Loader, saved: SavedValue) -> None:
    """Refuses states that the loader's generators do not take, by setting them for a moment."""
    states = saved.entries()
    before = loader.save_generators()
    for name in before.keys() & states.keys():
        try:
            loader.load_generators({name: states[name].value})
        except Exception:
            states[name].refuse("the state of a random generator")
        finally:
            loader.load_generators(before)


def columns_dataset(columns: Any, *, seed: int = 0) -> Dataset:
    """A data set of whole tensors or arrays, or of a torch Dataset's samples."""
    return Dataset(columns, seed=seed)


def is_data_set(value: Any) -> bool:
    """Whether it is a whole data set or loader, and so no batch."""
    return isinstance(value, Dataset | Loader | DataLoader | TorchDataset)


def as_batches(data: Any) -> Dataset | Loader:
    """A Dataset or a Loader of batches.

    From one of these, a DataLoader, or any iterable of batches that can be iterated again.
    """
    if isinstance(data, Dataset):
        if not data.plan.batch_size:
            raise ValueError(f"expected batches, got single samples: {data!r}. Add .batch(64).")
        return data.fresh()
    if isinstance(data, Loader):
        return data
    if isinstance(data, DataLoader):
        return Loader(data)

    is_tuple_of_tensors = isinstance(data, tuple) and all(isinstance(x, Tensor) for x in data)
    if isinstance(data, Tensor) or is_tuple_of_tensors:
        raise TypeError(
            "expected batches, got whole tensors. "
            "Make them a data set: hs.data.Dataset((x, y)).batch(64)"
        )
    is_map_style = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if is_map_style and not isinstance(data, list | IterableDataset):
        raise TypeError(
            f"expected batches, got {type(data).__name__}. "
            "Say how they are made: hs.data.Dataset(data).batch(64)"
        )
    return Loader(data)


def _as_arguments(item: Any) -> Args:
    if isinstance(item, tuple | list) and not hasattr(item, "_fields"):
        return tuple(item)
    if isinstance(item, Mapping):
        return (dict(item),)
    return (item,)


def refuse_sharded_data(feed: Feed) -> None:
    """Refuses data that hands each rank other samples: halfstep divides every batch by itself."""
    sampler = None
    if isinstance(feed.data, Loader):
        sampler = getattr(feed.data.batches, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        raise ValueError(
            "expected the same batches on every rank, received a DataLoader with a "
            "DistributedSampler; leave the sampler out (shuffle=True instead), and give the batch "
            "size of all ranks together: halfstep divides each batch over them"
        )
