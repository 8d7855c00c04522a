"""What decides the order of a DataLoader: generators attached to it, and those of the process."""

from typing import Any

import torch
from torch.utils.data import DataLoader

from halfstep.data.pipeline.own_generators import (
    Generator,
    find_generators,
    generator_state,
    set_generator_state,
)
from halfstep.utils import rng

# What of Hugging Face's streams forgets its samples when it saves its state, by name.
_FORGETFUL_BUFFER = "BufferShuffledExamplesIterable"

# Beside random states, what is saved of the start of a pass.
WORKERS = "num_workers"
WORKERS_RUNNING = "workers_running"  # persistent ones, from an earlier pass
DRAWS_LATER = "draws_later"  # the order is drawn while the pass goes on


def has_exact_state(batches: Any) -> bool:
    """Whether the loader's own state leads to the very next batch.

    That of a Hugging Face stream with a shuffle buffer does not: the samples in the buffer are
    left out after a resume. Such a stream repeats its order, so that it can be replayed.
    """
    if not hasattr(batches, "state_dict"):
        return False
    parts = [batches, getattr(batches, "dataset", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__ == _FORGETFUL_BUFFER:
            return False
        for name in ("_ex_iterable", "ex_iterable"):
            parts += [getattr(part, name)] if hasattr(part, name) else []
        parts += getattr(part, "ex_iterables", ())
    return True


def save_random_states(batches: Any) -> dict[str, Any]:
    """The states of all generators, and the workers that there are."""
    states = {**rng.pack_host_states(rng.host_states()), **save_own_states(batches)}
    if isinstance(batches, DataLoader):
        states[WORKERS] = batches.num_workers
        if batches.persistent_workers:
            states[WORKERS_RUNNING] = batches._iterator is not None
    return states


def load_random_states(batches: Any, states: dict[str, Any]) -> None:
    """Sets the states; a generator that the saved loader did not have is left alone."""
    rng.set_host_states(rng.unpack_host_states(states))
    load_own_states(batches, states)


def save_own_states(batches: Any) -> dict[str, Any]:
    """The states of the loader's own generators."""
    generators = _attached_generators(batches)
    return {name: generator_state(generator) for name, generator in generators.items()}


def load_own_states(batches: Any, states: dict[str, Any]) -> None:
    for name, generator in _attached_generators(batches).items():
        if name in states:
            set_generator_state(generator, states[name])


def _attached_generators(batches: Any) -> dict[str, Generator]:
    """By the part of the loader that has it as `generator`; others by their path of attributes."""
    generators: dict[str, Generator] = {}
    parts = _loader_parts(batches)
    for name, part in parts.items():
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generators[name] = generator
    known_ids = {id(generator) for generator in generators.values()}
    for path, generator in find_generators(parts).items():
        if id(generator) not in known_ids:
            generators[path] = generator
    return generators


def match_workers(batches: Any, states: dict[str, Any]) -> None:
    """Starts persistent workers, or ends them, as they were when the states were saved.

    torch draws their base seed when they start, and not with the passes that follow.
    """
    if not getattr(batches, "persistent_workers", False) or WORKERS_RUNNING not in states:
        return
    if not states[WORKERS_RUNNING]:
        batches._iterator = None
    elif batches._iterator is None:
        own_states = save_own_states(batches)
        with rng.preserved_states(cuda=False):
            iter(batches)
        load_own_states(batches, own_states)


def set_epoch(batches: Any, epoch: int) -> None:
    """Calls `set_epoch` of each part that has it, such as torch's DistributedSampler."""
    updated_ids: set[int] = set()
    for part in _loader_parts(batches).values():
        if callable(getattr(part, "set_epoch", None)) and id(part) not in updated_ids:
            part.set_epoch(epoch)
            updated_ids.add(id(part))


def _loader_parts(batches: Any) -> dict[str, Any]:
    """The parts of a DataLoader that may decide its order. The names are keys of saved states."""
    batch_sampler = getattr(batches, "batch_sampler", None)
    return {
        "loader": batches,
        "sampler": getattr(batches, "sampler", None),
        "batch_sampler": batch_sampler,
        "inner_sampler": getattr(batch_sampler, "sampler", None),
        "dataset": getattr(batches, "dataset", None),
    }
