"""What must hold before a scaler touches gradients: each refusal here would otherwise be a silently wrong update."""

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer


def with_grads(optimizer: Optimizer) -> Iterator[Tensor]:
    """The optimizer's parameters that have a gradient."""
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def has_grads(optimizer: Optimizer) -> bool:
    return any(True for _ in with_grads(optimizer))


def not_by_hand(optimizer: Optimizer, by_hand: Container[int]) -> None:
    """torch's step() after MegEngine's unscale() would divide by the scale twice."""
    if by_hand and any(id(p) in by_hand for p in with_grads(optimizer)):
        raise RuntimeError(
            "expected gradients that are still scaled, received those that unscale() or backward() has unscaled, "
            "do optimizer.step() after them instead of scaler.step(optimizer)"
        )


def not_unscaled(
    held: Container[int], optimizers: Iterable[Optimizer], states: Mapping[int, Mapping[str, Any]]
) -> None:
    """MegEngine's unscale() after torch's unscale_() would divide by the scale twice."""
    for optimizer in optimizers:
        if states[id(optimizer)]["stage"] is OptState.UNSCALED and any(
            id(p) in held for p in with_grads(optimizer)
        ):
            raise RuntimeError(
                "expected gradients that are still scaled, received those that unscale_() has unscaled, "
                "do scaler.step(optimizer) after it instead of scaler.unscale(tensors)"
            )


def is_checked(state: Mapping[str, Any], *, together: bool) -> None:
    """Gradients that appeared after unscale_() are unchecked; with skip="all" a verdict needs all of them first."""
    if together and state["stage"] is OptState.READY:
        raise RuntimeError(
            "skip='all': expected every optimizer unscaled before the first step, received step() on one that is not, "
            "do scaler.unscale_(optimizer) for each of them first"
        )
    if state["stage"] is OptState.UNSCALED and not state["found_inf_per_device"]:
        raise RuntimeError(
            "expected gradients to be there at unscale_(), received some that came after it, "
            "do call scaler.unscale_(optimizer) after the last backward"
        )


def none_stepped(states: Mapping[int, Mapping[str, Any]]) -> None:
    """With skip="all" an optimizer that stepped cannot be called back."""
    if any(state["stage"] is OptState.STEPPED for state in states.values()):
        raise RuntimeError(
            "skip='all': expected every optimizer unscaled before the first step, received unscale_() after one, "
            "do call scaler.unscale_(optimizer) for each of them first"
        )


def lacks_momentum(optimizer: Optimizer) -> bool:
    """Fused SGD makes its buffers with empty_like: a skipped first step would leave what was in memory."""
    return isinstance(optimizer, torch.optim.SGD) and any(
        group["fused"]
        and group["momentum"]
        and any(_no_buffer(optimizer, p) for p in group["params"])
        for group in optimizer.param_groups
    )


def _no_buffer(optimizer: Optimizer, p: Tensor) -> bool:
    return p.grad is not None and optimizer.state.get(p, {}).get("momentum_buffer") is None
