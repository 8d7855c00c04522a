"""The user's own random functions made repeatable: Python's, numpy's and torch's generators seeded for one batch."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from halfstep.data import hashing


@contextmanager
def seeded(*parts: int) -> Iterator[None]:
    """Seed the three host generators from `parts`, and put their states back afterwards."""
    seed = hashing.key(*parts)
    python, numpy, own = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - the users' one
    random.seed(seed)
    np.random.seed(seed & hashing.WORD)  # noqa: NPY002
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        torch.set_rng_state(own)
