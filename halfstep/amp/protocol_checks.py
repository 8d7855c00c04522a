"""What must hold before a scaler touches gradients.

Each error here would otherwise be a wrong update that nobody notices.
"""

from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer


def params_with_grads(optimizer: Optimizer) -> Iterator[Tensor]:
    """The optimizer's parameters that have a gradient."""
    return (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def has_grads(optimizer: Optimizer) -> bool:
    """Whether a parameter of the optimizer has a gradient."""
    return any(True for _ in params_with_grads(optimizer))


def check_not_unscaled_by_list(optimizer: Optimizer, unscaled_ids: Container[int]) -> None:
    """torch's step() after MegEngine's unscale() would divide by the scale twice."""
    if unscaled_ids and any(id(p) in unscaled_ids for p in params_with_grads(optimizer)):
        raise RuntimeError(
            "expected gradients that are still scaled, "
            "received those that unscale() or backward() has unscaled, "
            "do optimizer.step() after them instead of scaler.step(optimizer)"
        )


def check_not_unscaled_by_optimizer(
    tensor_ids: Container[int],
    optimizers: Iterable[Optimizer],
    states: Mapping[int, Mapping[str, Any]],
) -> None:
    """MegEngine's unscale() after torch's unscale_() would divide by the scale twice."""
    for optimizer in optimizers:
        is_unscaled = states[id(optimizer)]["stage"] is OptState.UNSCALED
        if is_unscaled and any(id(p) in tensor_ids for p in params_with_grads(optimizer)):
            raise RuntimeError(
                "expected gradients that are still scaled, "
                "received those that unscale_() has unscaled, "
                "do scaler.step(optimizer) after it instead of scaler.unscale(tensors)"
            )


def check_ready_to_step(state: Mapping[str, Any], *, skips_together: bool) -> None:
    """All gradients have been looked at, and with skip="all" those of the other optimizers too."""
    if skips_together and state["stage"] is OptState.READY:
        raise RuntimeError(
            "skip='all': expected every optimizer unscaled before the first step, "
            "received step() on one that is not, "
            "do scaler.unscale_(optimizer) for each of them first"
        )
    if state["stage"] is OptState.UNSCALED and not state["found_inf_per_device"]:
        raise RuntimeError(
            "expected gradients to be there at unscale_(), received some that came after it, "
            "do call scaler.unscale_(optimizer) after the last backward"
        )


def check_none_stepped(states: Mapping[int, Mapping[str, Any]]) -> None:
    """With skip="all", an optimizer that has stepped could not skip any more."""
    if any(state["stage"] is OptState.STEPPED for state in states.values()):
        raise RuntimeError(
            "skip='all': expected every optimizer unscaled before the first step, "
            "received unscale_() after one, "
            "do call scaler.unscale_(optimizer) for each of them first"
        )


def would_skip_uninitialized(optimizer: Optimizer) -> bool:
    """Whether a skipped step would leave momentum buffers with arbitrary values.

    Fused SGD makes its buffers with empty_like, and does not write them in a step that it skips.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    for group in optimizer.param_groups:
        if not group["fused"] or not group["momentum"]:
            continue
        for p in group["params"]:
            has_buffer = optimizer.state.get(p, {}).get("momentum_buffer") is not None
            if p.grad is not None and not has_buffer:
                return True
    return False
