"""What a resumed run cannot repeat with a loader of the user's, in words; and how it is noticed."""

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from halfstep.data.pipeline.loader_states import DRAWS_LATER, WORKERS, has_exact_state
from halfstep.utils import rng

# They draw the order of a pass with its first batch.
_KNOWN_SAMPLERS = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)

OWN_GENERATOR_ADVICE = (
    "Let the sampler or the data set draw from a generator of its own, which it keeps as an "
    "attribute, or use hs.data.Dataset."
)


def known_limits(batches: Any) -> list[str]:
    """What is known before the first batch."""
    limits: list[str] = []
    if not isinstance(batches, DataLoader) or batches.num_workers == 0:
        return limits
    if batches.persistent_workers:
        limits.append(
            "DataLoader(persistent_workers=True): no checkpoint holds the random states of its "
            "workers. A run that is resumed after the first pass gets the same samples in the same "
            "order, but what the workers draw at random, such as augmentations, is other than "
            "without the stop. If they draw: persistent_workers=False, or "
            f"hs.data.Dataset(…).workers({batches.num_workers})."
        )
    if not getattr(batches, "in_order", True) and batches.num_workers > 1:
        limits.append(
            "DataLoader(in_order=False): batches come in the order in which workers finish, so a "
            "run that is resumed in the middle of a pass may repeat or miss samples. Leave "
            "in_order=False out."
        )
    return limits


def describe_changes(batches: Any, state: dict[str, Any]) -> Iterator[str]:
    """What will not be as it was when a state is loaded, in words."""
    name = type(batches).__name__
    if state["step"] and state["own"] is None and state["began"].get(DRAWS_LATER):
        yield (
            f"{name}: the saved pass drew from the random generators of the process while it went "
            "on, in turns with the training, which cannot be repeated: the rest of the pass may "
            f"repeat or miss samples. {OWN_GENERATOR_ADVICE}"
        )
    pass_states = state["began"] if state["step"] else state["now"]
    saved_count = pass_states.get(WORKERS)
    count = getattr(batches, "num_workers", saved_count)
    if saved_count is not None and count != saved_count:
        effect = "what is drawn at random while samples are fetched is other from here on"
        if isinstance(batches.dataset, IterableDataset) and state["step"]:
            effect = "the rest of the pass may repeat or miss samples"
        yield (
            f"{name} had num_workers={saved_count} and has {count}: {effect}. "
            f"Use num_workers={saved_count}, or hs.data.Dataset, where this changes nothing."
        )


def what_to_watch(batches: Any) -> str:
    """Which draws of a pass under way would decide its order: a sampler's, all, or none ("").

    Draws of a map-style data set change what samples look like, and not which ones come later.
    """
    if type(batches) in (list, tuple) or has_exact_state(batches):
        return ""
    if not isinstance(batches, DataLoader):
        return "batches"
    if isinstance(batches.dataset, IterableDataset):
        return "" if batches.num_workers else "batches"  # workers have generators of their own
    sampler: Any = batches.sampler
    if batches.batch_sampler is not None:
        sampler = batches.batch_sampler
        if type(sampler) is BatchSampler:
            sampler = sampler.sampler
    return "" if type(sampler) in _KNOWN_SAMPLERS else "order"


def watch_draws(items: Iterator[Any], *, skip: bool, on_draw: Callable[[], None]) -> Iterator[Any]:
    """The same items; `on_draw` is called after one that drew from the process's generators.

    `skip`: not after the first, which is drawn when the pass begins.
    """
    end = object()
    if skip:
        first = next(items, end)
        if first is end:
            return
        yield first
    while True:
        before = rng.host_states()
        item = next(items, end)
        if item is end:
            return
        if not rng.equal_host_states(before, rng.host_states()):
            on_draw()
        yield item
