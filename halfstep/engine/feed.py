"""Batches for a step, pass after pass, from whatever the user has; its position is that of the steps done."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from halfstep.data import Dataset, Loader

Args = tuple[Any, ...]


class Feed:
    """One pass per `start()`. `done(n)`: n more were trained on; that, not what was fetched, is the position."""

    def __init__(
        self, data: Any, *, named: bool = False, device: torch.device | None = None
    ) -> None:
        self.data, self.named = as_data(data), named
        if device is not None and device.type == "cuda" and isinstance(self.data, Dataset):
            self.data = self.data.near(device)
        self.passes, self.step = 0, 0
        self._base = self.data.state_dict()

    @property
    def size(self) -> int | None:
        """Batches in the pass under way; None when nobody knows."""
        return self.data.pass_size if isinstance(self.data, Dataset) else self.data.size

    @property
    def samples(self) -> int | None:
        """Samples in a pass, where the data is a Dataset whose batches no stage reorders or repeats."""
        plan = self.data.plan if isinstance(self.data, Dataset) else None
        if plan is None or plan.batch_stages:
            return None
        return min(plan.samples, plan.batches * plan.batch)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the columns, where the data has names for them."""
        return self.data.columns if isinstance(self.data, Dataset) else ()

    def start(self) -> Iterator[Args]:
        """The batches of the pass under way from its position on, as the arguments of a step."""
        self._base = self.data.state_dict()
        named = self.named and isinstance(self.data, Dataset)
        items = self.data.dicts() if named and isinstance(self.data, Dataset) else self.data
        return (_arguments(item) for item in items)

    def arguments(self, columns: dict[str, Any]) -> Args:
        """A batch by column names, as the arguments of a step."""
        return (columns,) if self.named else tuple(columns.values())

    def done(self, steps: int) -> None:
        self.step += steps

    def ended(self) -> None:
        """The pass is over."""
        self._stand(self.passes + 1)

    def state_dict(self) -> dict[str, Any]:
        base = self._base if isinstance(self.data, Dataset) else self.data.state_dict()
        return {**base, "epoch": self.passes, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.data.load_state_dict(state)
        self._base = self.data.state_dict()
        self.passes, self.step = (
            self._base["epoch"],
            self._base["step"],
        )  # other numbers after a change of shards

    def next_pass(self, passes: int) -> None:
        """Go on with pass number `passes`, from its start."""
        if isinstance(self.data, Dataset):
            self.data.seek(passes)
        self._stand(passes)

    def _stand(self, passes: int) -> None:
        """At the start of a pass. A loader does not know that its last batch was the last: nobody asked for another."""
        if isinstance(self.data, Loader):
            self.data.epoch, self.data.step = passes, 0
        self.passes, self.step, self._base = passes, 0, self.data.state_dict()

    def describe(self) -> list[str]:
        """What it is, a line each, to compare with that of a saved run."""
        if isinstance(self.data, Dataset):
            return list(self.data.plan.describe())
        return [f"{type(self.data.batches).__name__} of {self.size} batches"]


def as_data(data: Any) -> Dataset | Loader:
    """Batches from a Dataset, a Loader, a DataLoader or any iterable of batches that can be gone through again."""
    if isinstance(data, Dataset):
        if not data.plan.batch:
            raise ValueError(f"expected batches, got single samples: {data!r}. Add .batch(64).")
        return data.fresh()
    if isinstance(data, Loader):
        return data
    if isinstance(data, DataLoader):
        return Loader(data)
    if isinstance(data, Tensor) or (
        isinstance(data, tuple) and all(isinstance(part, Tensor) for part in data)
    ):
        raise TypeError(
            "expected batches, got whole tensors. Make them a data set: hs.data.Dataset((x, y)).batch(64)"
        )
    if (
        hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not isinstance(data, list | IterableDataset)
    ):
        name = type(data).__name__
        raise TypeError(
            f"expected batches, got {name}. Say how they are made: hs.data.Dataset(data).batch(64)"
        )
    return Loader(data)


def _arguments(item: Any) -> Args:
    if isinstance(item, tuple | list) and not hasattr(item, "_fields"):
        return tuple(item)
    return (dict(item),) if isinstance(item, Mapping) else (item,)
