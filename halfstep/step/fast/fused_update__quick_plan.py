"""How the programs of `quick`'s kernels share the gradients, and which gradients they can take."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.kernels.foreach import is_dense
from halfstep.step.state import Cycle

BLOCK, WARPS = 4096, 8  # elements that a program works on at a time
LARGE, TURNS = (
    1 << 21,
    4,
)  # elements in all from which a program takes four blocks: it finds its gradient only once
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # of gradients
COUNTS = (8, 32, 128)  # gradients per launch, as many as the kernels are compiled for


class UpdateSignature(NamedTuple):
    """What plans and kernels depend on, besides what an Update keeps for life."""

    grad_indices: tuple[int, ...]
    loss_dtype: torch.dtype
    has_weight: bool

    @classmethod
    def of(cls, cycle: Cycle, live: list[int]) -> "UpdateSignature":
        assert cycle.loss is not None
        return cls(tuple(live), cycle.loss.dtype, cycle.weight is not None)


class LaunchPlan(NamedTuple):
    """On the device (owner, from, to) for each program and where each parameter's programs begin; where launches do."""

    rows: Tensor
    begins: Tensor
    starts: list[int]
    turns: int
    longest: int


def make_launch_plan(params: Sequence[Tensor], live: Sequence[int]) -> LaunchPlan:
    """A parameter without a gradient has no program."""
    order, device = {i: k for k, i in enumerate(live)}, params[0].device
    turns = _turns(params, live)
    share = BLOCK * turns
    rows: list[tuple[int, int, int]] = []
    begins, starts = [0], []
    for i, p in enumerate(params):
        if i in order:
            owner = order[i] % COUNTS[-1]
            starts += [len(rows)] if owner == 0 else []
            rows += [(owner, at, min(at + share, p.numel())) for at in range(0, p.numel(), share)]
        begins.append(len(rows))
    longest = max(b - a for a, b in pairwise(begins))
    on_device = _send(rows or [(0, 0, 0)], torch.int64, device), _send(begins, torch.int32, device)
    return LaunchPlan(*on_device, [*starts, len(rows)], turns, longest)


def _turns(params: Sequence[Tensor], live: Sequence[int]) -> int:
    return TURNS if sum(params[i].numel() for i in live) >= LARGE else 1


def make_idle_plan(params: Sequence[Tensor], live: Sequence[int]) -> LaunchPlan:
    """As many launches, each of one program with nothing to do: to load the kernels."""
    launches, device = -(-len(live) // COUNTS[-1]), params[0].device
    rows = torch.zeros(launches, 3, dtype=torch.int64, device=device)
    begins = torch.zeros(len(params) + 1, dtype=torch.int32, device=device)
    return LaunchPlan(rows, begins, list(range(launches + 1)), _turns(params, live), 0)


def split_launches(
    made: LaunchPlan, grads: Sequence[Tensor]
) -> Iterator[tuple[int, int, tuple[Tensor, ...]]]:
    """For each launch its first program, how many, and its gradients, the last repeated up to a number in COUNTS."""
    for k, (start, stop) in enumerate(pairwise(made.starts)):
        some = grads[k * COUNTS[-1] : (k + 1) * COUNTS[-1]]
        count = next(n for n in COUNTS if n >= len(some))
        if stop > start:
            yield start, stop - start, (*some, *[some[-1]] * (count - len(some)))


def kernels_can_read(grads: Sequence[Tensor], device: torch.device) -> bool:
    """Whether kernels may walk these in memory order, 16 bytes at a time, each gradient by itself."""
    plain = all(
        type(g) is Tensor and g.layout == torch.strided and g.dtype in DTYPES and g.device == device
        for g in grads
    )
    places = [g.data_ptr() for g in grads if g.numel()] if plain else []
    apart = len(set(places)) == len(places) and all(p % 16 == 0 for p in places)
    return plain and apart and all(is_dense(g) for g in grads)


def _send(values: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """To the device without waiting for it."""
    here = torch.tensor(values, dtype=dtype)
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)
