"""How the programs of the fused update's kernels share the gradients.

A program works on a share of one gradient, of one or four blocks. A launch takes up to 128
gradients. Part of fast/fused_update.py, which says what it buys and how to switch it off.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK_ELEMENTS = 4096  # that a program works on at a time
LARGE_ELEMENTS = 1 << 21  # in all: from here on a program takes four blocks,
LARGE_BLOCKS = 4  # because finding its gradient costs it once
GRADS_PER_LAUNCH = (8, 32, 128)  # the numbers that the kernels are compiled for
MAX_GRADS_PER_LAUNCH = GRADS_PER_LAUNCH[-1]


class LaunchPlan(NamedTuple):
    """How the programs of the kernels share the gradients."""

    shares: Tensor  # for each program: gradient of its launch, first element, end
    first_programs: Tensor  # for each parameter: its first program; one more for the end
    launch_starts: list[int]  # the first program of each launch; one more for the end
    blocks_per_program: int
    longest: int  # the most programs that one parameter has


def make_launch_plan(params: Sequence[Tensor], grad_indices: Sequence[int]) -> LaunchPlan:
    """Shares the gradients out to programs. A parameter without a gradient has no program."""
    device = params[0].device
    grad_order = {param: order for order, param in enumerate(grad_indices)}
    blocks_per_program = _blocks_per_program(params, grad_indices)
    share_elements = BLOCK_ELEMENTS * blocks_per_program

    shares: list[tuple[int, int, int]] = []
    first_programs = [0]
    launch_starts = []
    for i, p in enumerate(params):
        if i in grad_order:
            grad_of_launch = grad_order[i] % MAX_GRADS_PER_LAUNCH
            if grad_of_launch == 0:
                launch_starts.append(len(shares))
            for start in range(0, p.numel(), share_elements):
                shares.append((grad_of_launch, start, min(start + share_elements, p.numel())))
        first_programs.append(len(shares))

    return LaunchPlan(
        shares=_send_to(device, shares or [(0, 0, 0)], torch.int64),
        first_programs=_send_to(device, first_programs, torch.int32),
        launch_starts=[*launch_starts, len(shares)],
        blocks_per_program=blocks_per_program,
        longest=max(end - start for start, end in pairwise(first_programs)),
    )


def make_idle_plan(params: Sequence[Tensor], grad_indices: Sequence[int]) -> LaunchPlan:
    """As many launches, each of one program with nothing to do: to load the kernels."""
    device = params[0].device
    launches = -(-len(grad_indices) // MAX_GRADS_PER_LAUNCH)
    return LaunchPlan(
        shares=torch.zeros(launches, 3, dtype=torch.int64, device=device),
        first_programs=torch.zeros(len(params) + 1, dtype=torch.int32, device=device),
        launch_starts=list(range(launches + 1)),
        blocks_per_program=_blocks_per_program(params, grad_indices),
        longest=0,
    )


def split_launches(
    plan: LaunchPlan, grads: Sequence[Tensor]
) -> Iterator[tuple[int, int, tuple[Tensor, ...]]]:
    """For each launch: its first program, how many it has, and its gradients.

    The last gradient is repeated until their number is one that the kernels are compiled for.
    """
    for launch_index, (start, end) in enumerate(pairwise(plan.launch_starts)):
        first_grad = launch_index * MAX_GRADS_PER_LAUNCH
        launch_grads = tuple(grads[first_grad : first_grad + MAX_GRADS_PER_LAUNCH])
        count = next(n for n in GRADS_PER_LAUNCH if n >= len(launch_grads))
        repeats = count - len(launch_grads)
        if end > start:
            yield start, end - start, (*launch_grads, *[launch_grads[-1]] * repeats)


def _blocks_per_program(params: Sequence[Tensor], grad_indices: Sequence[int]) -> int:
    elements = sum(params[i].numel() for i in grad_indices)
    return LARGE_BLOCKS if elements >= LARGE_ELEMENTS else 1


def _send_to(device: torch.device, values: Any, dtype: torch.dtype) -> Tensor:
    """To the device without waiting for it."""
    on_host = torch.tensor(values, dtype=dtype)
    if device.type == "cpu":
        return on_host
    return on_host.pin_memory().to(device, non_blocking=True)
