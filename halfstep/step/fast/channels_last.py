"""Channels-last: the memory order in which tensor cores convolve. Strides change, values and shapes never do."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from halfstep.precision import Precision
from halfstep.step.objective import Batch
from halfstep.step.options import AutoFlag

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


class ChannelsLast:
    """Whether a network's 2-d convolutions run channels-last, why, and what has to follow when they do."""

    def __init__(
        self,
        net: nn.Module,
        optimizer: Optimizer,
        wish: AutoFlag,
        precision: Precision,
        device: torch.device,
    ) -> None:
        self.on, self.reason = choose_channels_last(net, wish, precision.compute, device)
        if self.on:
            for p in _weights(net):
                p.data = p.data.contiguous(memory_format=torch.channels_last)
            self.match_optimizer_state(optimizer)

    def convert_batch(self, batch: Batch) -> Batch:
        """Images channels-last, which a convolution would otherwise do to them twice, forward and backward."""
        if not self.on:
            return batch
        if all(isinstance(x, Tensor) for x in batch):
            return tuple([_last(x) for x in batch])
        moved: Batch = tree_map(_last, batch)
        return moved

    def match_optimizer_state(self, optimizer: Optimizer) -> None:
        """Optimizer state in the strides of its parameter, whichever they are: fused kernels want them equal."""
        for p, state in optimizer.state.items():
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = _like(value, p)

    def match_step_state(self, step: "TrainStep") -> None:
        """After a load: what was saved in the other order, in the strides of the parameters it belongs to."""
        self.match_optimizer_state(step.optimizer)
        state, low = step.state, [p for p in step.params if p.dtype.itemsize == 2]
        state.ema, state.residue = _all_like(state.ema, step.params), _all_like(state.residue, low)
        state.cycle.grads = _all_like(state.cycle.grads, step.params)


def choose_channels_last(
    net: nn.Module, wish: AutoFlag, compute: torch.dtype, device: torch.device
) -> tuple[bool, str]:
    """Channels-last or not, and the reason."""
    if wish != "auto":
        return wish, f"channels_last={wish}"
    if device.type != "cuda":
        return False, f"channels-last is faster on CUDA, this is {device.type}"
    if not any(isinstance(m, nn.Conv2d) for m in net.modules()):
        return False, "the network has no Conv2d"
    if compute == torch.float64:
        return False, "float64 runs on no tensor core"
    return True, "tensor cores convolve in this order"


def _weights(net: nn.Module) -> Iterable[Tensor]:
    own = [m._parameters.get("weight") for m in net.modules() if isinstance(m, _CONVOLUTIONS)]
    return [p for p in own if p is not None]


def _last(x: Any) -> Any:
    image = isinstance(x, Tensor) and x.dim() == 4 and x.is_floating_point()
    return x.contiguous(memory_format=torch.channels_last) if image else x


def _like(value: Tensor, p: Tensor) -> Tensor:
    """`value` in p's strides: itself where it has them, or another shape."""
    if value.is_sparse or value.shape != p.shape or value.stride() == p.stride():
        return value
    return torch.empty_like(p, dtype=value.dtype, requires_grad=False).copy_(value)


def _all_like(values: Sequence[Any], params: Sequence[Tensor]) -> list[Any]:
    assert len(values) in (0, len(params))
    return [None if v is None else _like(v, p) for v, p in zip(values, params, strict=False)]
