"""Channels-last: the memory order in which tensor cores convolve.

Strides change; values and shapes never do. It buys part of "ResNet-50, 224², batch 32" in
docs/internals/speed.md: without it torch converts every image twice, forward and backward.
Switched off by channels_last=False.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from halfstep.precision import Precision
from halfstep.step.objective import Batch
from halfstep.step.options import AutoFlag
from halfstep.step.state import StepState


class ChannelsLast:
    """Whether a network's 2-d convolutions run channels-last, why, and what has to match."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: Optimizer,
        requested: AutoFlag,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self.on, self.reason = choose_channels_last(net, requested, precision.compute, device)
        if self.on:
            for module in net.modules():
                weight = module._parameters.get("weight")
                if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) and weight is not None:
                    weight.data = weight.data.contiguous(memory_format=torch.channels_last)
            self.match_optimizer_state(optimizer)

    def convert_batch(self, batch: Batch) -> Batch:
        """The batch with its images channels-last."""
        if not self.on:
            return batch
        if all(isinstance(x, Tensor) for x in batch):
            return tuple([_image_channels_last(x) for x in batch])
        converted: Batch = tree_map(_image_channels_last, batch)
        return converted

    def match_optimizer_state(self, optimizer: Optimizer) -> None:
        """Gives optimizer state the strides of its parameter: fused kernels want them equal."""
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = _with_strides_of(value, p)

    def match_step_state(
        self, state: StepState, optimizer: Optimizer, params: list[Tensor]
    ) -> None:
        """After a load: tensors saved in another order get the strides of their parameters."""
        self.match_optimizer_state(optimizer)
        half_params = [p for p in params if p.dtype.itemsize == 2]
        state.ema = _all_with_strides_of(state.ema, params)
        state.residue = _all_with_strides_of(state.residue, half_params)
        state.cycle.grads = _all_with_strides_of(state.cycle.grads, params)


def choose_channels_last(
    net: nn.Module, requested: AutoFlag, compute: torch.dtype, device: torch.device
) -> tuple[bool, str]:
    """Channels-last or not, and the reason."""
    if requested != "auto":
        return requested, f"channels_last={requested}"
    if device.type != "cuda":
        return False, f"channels-last is faster on CUDA, this is {device.type}"
    if not any(isinstance(module, nn.Conv2d) for module in net.modules()):
        return False, "the network has no Conv2d"
    if compute == torch.float64:
        return False, "float64 runs on no tensor core"
    return True, "tensor cores convolve in this order"


def _image_channels_last(x: Any) -> Any:
    is_image = isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point()
    return x.contiguous(memory_format=torch.channels_last) if is_image else x


def _with_strides_of(value: Tensor, p: Tensor) -> Tensor:
    """The value in p's strides; as it is where it has them, or another shape."""
    if value.is_sparse or value.shape != p.shape or value.stride() == p.stride():
        return value
    return torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)


def _all_with_strides_of(values: Sequence[Any], params: Sequence[Tensor]) -> list[Any]:
    assert len(values) in (0, len(params))
    matched = []
    for value, p in zip(values, params, strict=False):
        matched.append(None if value is None else _with_strides_of(value, p))
    return matched
