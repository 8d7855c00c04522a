"""What decides the order of somebody else's DataLoader: the generators that hang on it, and the process's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from halfstep.data.pipeline.seeding import packed, put_back, states, unpacked


def save(batches: Any) -> dict[str, Any]:
    """All their states, as tensors, numbers and strings."""
    return {
        **packed(states()),
        **{name: found.get_state() for name, found in _hanging(batches).items()},
    }


def load(batches: Any, saved: dict[str, Any]) -> None:
    """Set them; a generator that the saved loader did not have is left alone."""
    put_back(unpacked(saved))
    for name, generator in _hanging(batches).items():
        if name in saved:
            generator.set_state(saved[name])


@contextmanager
def kept() -> Iterator[None]:
    """The process's own are afterwards as they were."""
    before = states()
    try:
        yield
    finally:
        put_back(before)


def set_epoch(batches: Any, epoch: int) -> None:
    """Tell the epoch to whoever shuffles by it, as torch's DistributedSampler does."""
    told: list[Any] = []
    for place in _places(batches).values():
        if callable(getattr(place, "set_epoch", None)) and not any(place is each for each in told):
            place.set_epoch(epoch)
            told.append(place)


def _hanging(batches: Any) -> dict[str, torch.Generator]:
    """By where they hang; one that hangs in two places is set twice, to the same state."""
    found = {name: getattr(place, "generator", None) for name, place in _places(batches).items()}
    return {name: each for name, each in found.items() if isinstance(each, torch.Generator)}


def _places(batches: Any) -> dict[str, Any]:
    outer = getattr(batches, "batch_sampler", None)
    return {
        "loader": batches, "sampler": getattr(batches, "sampler", None), "batch_sampler": outer,
        "inner_sampler": getattr(outer, "sampler", None), "dataset": getattr(batches, "dataset", None),
    }  # fmt: skip
