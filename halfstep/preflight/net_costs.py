"""The memory that training a network takes, part by part."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.precision import Applied
from halfstep.report.number_format import format_bytes

MAX_HOST_TWIN_BYTES = 1 << 28  # parameters for which a twin of the optimizer may step on the host


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of each part; None where it is not known. Without kernels' workspaces."""

    parameters: int
    buffers: int = 0
    low_copies: int = 0
    """Copies of the parameters in the dtype that the network computes in."""
    gradients: int = 0
    optimizer: int | None = None
    averages: int = 0
    """Moving averages (ema=), and what Kahan rounding owes the weights."""
    activations: int | None = None
    """What one forward pass of this batch keeps for the backward pass."""

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) or 0 for part in fields(self))

    def __str__(self) -> str:
        parts = []
        for part in fields(self):
            size = getattr(self, part.name)
            if size:
                parts.append(f"{part.name.replace('_', ' ')} {format_bytes(size)}")
        return ", ".join(parts)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def gradient_bytes(params: Iterable[Tensor], *, summed: bool) -> int:
    """Of one gradient for each parameter; sums over several batches are float32 or wider."""
    total = 0
    for p in params:
        dtype = torch.promote_types(p.dtype, torch.float32) if summed else p.dtype
        total += p.numel() * dtype.itemsize
    return total


def low_copy_bytes(applied: Applied) -> int:
    """Of the copies that a precision makes of parameters: one for each parameter and dtype."""
    sizes = {}
    for slot, dtype in applied._low_parameter_slots():
        param = slot.get()
        sizes[id(param), dtype] = param.numel() * dtype.itemsize
    return sum(sizes.values())


def optimizer_bytes(optimizer: Optimizer) -> int | None:
    """Of the state that the optimizer has, or will have after its first step.

    A twin of it makes one step, over parameters of the same shapes: on the meta device, or on the
    host where they are small and the optimizer reads values. None where it cannot.
    """
    if optimizer.state:
        return _state_bytes(optimizer)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    devices = ["meta"]
    if tensor_bytes(params) <= MAX_HOST_TWIN_BYTES:
        devices.append("cpu")
    for device in devices:
        try:
            return _state_bytes(_stepped_twin(optimizer, device))
        except Exception:
            continue  # an optimizer of the user's may do anything in its step
    return None


def _stepped_twin(optimizer: Optimizer, device: str) -> Optimizer:
    """An optimizer with the same settings over stand-ins of its parameters, after one step."""
    twin = copy.copy(optimizer)
    twin.__dict__ = dict(vars(optimizer))
    twin.state = type(optimizer.state)(dict)
    twin.param_groups = []
    for group in optimizer.param_groups:
        stand_ins = []
        for p in group["params"]:
            stand_in = torch.nn.Parameter(torch.zeros_like(p, device=device), p.requires_grad)
            if p.requires_grad:
                stand_in.grad = torch.zeros_like(stand_in)
            stand_ins.append(stand_in)
        # How a step is computed, not what: these need a device.
        implementation: dict[str, Any] = {
            name: False for name in ("foreach", "fused") if name in group
        }
        lr = float(group["lr"])
        twin.param_groups.append({**group, "params": stand_ins, "lr": lr, **implementation})
    type(optimizer).step.__wrapped__(twin)  # type: ignore[attr-defined]
    return twin


def _state_bytes(optimizer: Optimizer) -> int:
    return tensor_bytes(
        value
        for values in optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    )
