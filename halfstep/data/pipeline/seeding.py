"""Random code of the user's, made repeatable: the host's generators seeded for one batch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
import torch
from torch.utils.data import get_worker_info

from halfstep.data import hashing
from halfstep.utils import rng


@contextmanager
def seeded_generators(*key_parts: int) -> Iterator[None]:
    """Seeds Python's, numpy's and torch's generators from the integers; restores them on leaving.

    Most of its cost is numpy's copy of its state.
    """
    seed = hashing.key(*key_parts)

    # A worker process need not restore anything: every fetch there is seeded anew.
    if get_worker_info() is not None:
        seed_host_generators(seed)
        yield
        return

    # numpy draws from a bit generator of ours meanwhile. Setting the user's state back instead
    # would copy it once more.
    states = rng.host_states()
    users_bit_generator = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(_spare_bit_generator())  # type: ignore[attr-defined]
    seed_host_generators(seed)
    try:
        yield
    finally:
        np.random.set_bit_generator(users_bit_generator)  # type: ignore[attr-defined]
        # Normal numbers come in pairs, and numpy keeps the second one outside the bit generator:
        # where one was waiting, the whole state has to be set.
        has_cached_normal = bool(states["numpy"][3])
        rng.set_host_states(states, numpy=has_cached_normal)


def seed_host_generators(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators of the host."""
    random.seed(seed)
    np.random.seed(seed & hashing.WORD_MASK)  # noqa: NPY002 - the generator that users draw from
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device


@cache
def _spare_bit_generator() -> np.random.MT19937:
    return np.random.MT19937(0)
