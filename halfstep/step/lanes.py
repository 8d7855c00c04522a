"""Lanes: the slices into which every batch is cut, and which of them this rank computes.

A program's batch is the global one, whatever the number of ranks. Ordinarily there is one lane for
each rank. With exact="bits" there is a fixed number of them (`logical=`), shared out over however
many ranks there are: what a lane computes depends on its number alone, never on who computes it.
"""

import hashlib
import random
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from halfstep.distributed import Ranks
from halfstep.errors import Notice
from halfstep.step.objective import Batch, batch_size
from halfstep.utils import rng
from halfstep.utils.keywords import user_stacklevel


@dataclass(frozen=True)
class Lanes:
    """How many lanes there are, and which are this rank's."""

    count: int
    mine: range
    exact: bool  # the sums over lanes have the same bits for any number of ranks

    def split(self, batch: Batch) -> list[Batch]:
        """This rank's slices of a global batch, in the order of its lanes. Some may be empty."""
        rows = batch_size(batch)
        bounds = even_bounds(rows, self.count)
        return [
            self._slice(batch, rows, start, stop)
            for start, stop in bounds[self.mine.start : self.mine.stop]
        ]

    def _slice(self, batch: Batch, rows: int, start: int, stop: int) -> Batch:
        def part(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != rows:
                return leaf
            piece = leaf[start:stop]
            # Kernels of matrix products round by where a matrix begins in memory.
            return piece.clone() if self.exact else piece

        check_can_split(batch, rows)
        slices: Batch = tree_map(part, batch)
        return slices


def plan_lanes(ranks: Ranks | None, *, exact: bool, logical: int) -> Lanes | None:
    """The lanes of a job; None for one process that computes whole batches."""
    rank_count = 1 if ranks is None else ranks.count
    if not exact and rank_count == 1:
        return None
    lane_count = logical if exact else rank_count
    if rank_count > lane_count:
        raise ValueError(
            f"logical={logical}: expected at least as many micro-batches as ranks, of which there "
            f"are {rank_count}; start fewer, or give a larger logical= to all runs that are to be "
            "equal"
        )
    index = 0 if ranks is None else ranks.index
    return Lanes(lane_count, lanes_of_ranks(lane_count, rank_count)[index], exact)


def lanes_of_ranks(lane_count: int, rank_count: int) -> list[range]:
    """The lanes of each rank: ranges that follow each other, as even as can be."""
    return [range(start, stop) for start, stop in even_bounds(lane_count, rank_count)]


def even_bounds(total: int, count: int) -> list[tuple[int, int]]:
    """Start and stop of `count` slices of `total` items, the first ones larger by one."""
    size, larger = divmod(total, count)
    bounds = []
    start = 0
    for i in range(count):
        stop = start + size + (1 if i < larger else 0)
        bounds.append((start, stop))
        start = stop
    return bounds


def check_can_split(batch: Batch, rows: int) -> None:
    """Refuses a batch that is a list of samples: nobody knows how its tensors belong together."""
    for item in batch:
        is_list = isinstance(item, list) and len(item) > 0
        if is_list and all(isinstance(x, Tensor | dict) for x in item):
            raise TypeError(
                "expected a batch of tensors whose first dimension counts the samples, so that it "
                f"can be divided over ranks; received a list of {len(item)} tensors or dicts. Pad "
                "and stack them in collate_fn, or train each rank by itself with strategy='none'"
            )


def use_one_thread() -> None:
    """exact="bits" on a CPU: sums over two threads have other bits than over one."""
    if torch.get_num_threads() == 1:
        return
    warnings.warn(
        f"exact='bits': torch computes with one thread from here on, instead of "
        f"{torch.get_num_threads()}: each number of threads has bits of its own. Start more ranks "
        "to use more cores",
        Notice,
        stacklevel=user_stacklevel(),
    )
    torch.set_num_threads(1)


# Random numbers.


def new_seed(ranks: Ranks | None) -> int:
    """A seed from torch's generator, whose own sequence does not move; rank 0's for all ranks."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    seed = int(torch.randint(0, 1 << 53, (), generator=generator))
    if ranks is None:
        return seed
    return int(ranks.broadcast_object(seed, "the seed of the lanes"))


@contextmanager
def lane_random_numbers(seed: int, step: int, lane: int, device: torch.device) -> Iterator[None]:
    """Inside, all generators start from a seed that depends on (seed, step, lane) alone.

    Afterwards they are where they were: the lanes of other ranks draw nothing here.
    """
    host = rng.host_states()
    device_generator = None
    device_state = None
    lane_seed = _hash(seed, step, lane)
    random.seed(lane_seed)
    np.random.seed(lane_seed % (1 << 32))  # noqa: NPY002 - the generator that users draw from
    torch.default_generator.manual_seed(lane_seed)
    if device.type == "cuda":
        device_generator = torch.cuda.default_generators[device.index or 0]
        device_state = device_generator.get_state()
        device_generator.manual_seed(lane_seed)
    try:
        yield
    finally:
        rng.set_host_states(host)
        if device_generator is not None and device_state is not None:
            device_generator.set_state(device_state)


def _hash(*numbers: int) -> int:
    """A number below 2^63 that depends on all of them."""
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


# Buffers.


def mean_buffers(gathered: Sequence[Tensor]) -> list[Tensor]:
    """Each buffer as it stands after a step of all lanes.

    `gathered` holds the values of all lanes, [lanes, …], of each buffer. Of floating ones (the
    running statistics of a norm) the mean, of others the first lane's.
    """
    means = []
    for values in gathered:
        first = values[0]
        if not (values.is_floating_point() or values.is_complex()):
            means.append(first)
            continue
        wide = torch.promote_types(values.dtype, torch.float64)
        mean = values.to(wide).mean(0).to(values.dtype)
        # The mean of equal numbers may be rounded to another one, and that of ±inf is NaN.
        is_equal = (values == first).all(0)
        means.append(torch.where(is_equal, first, mean))
    return means
