"""From what a user gives as data to the arguments of a network's forward."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.engine.evaluate import without_target
from halfstep.model import Model
from halfstep.step.objective import batch_size


@dataclass(frozen=True)
class Batch:
    """A batch on the network's device: how the network is called, and what the step would take."""

    inputs: tuple[Any, ...]
    named_inputs: dict[str, Any]
    whole: tuple[Any, ...] | None
    """With its target, for the loss of a Model; None where only inputs were given."""
    size: int
    calls_forward_option: bool = False
    """The forward= of a Model calls the network, with the whole batch."""


def is_shape(data: Any) -> bool:
    """Whether it is a shape: whole numbers, or a torch.Size."""
    is_sequence = isinstance(data, tuple | list) and len(data) > 0
    return is_sequence and all(isinstance(x, int) and not isinstance(x, bool) for x in data)


def read_batch(net: nn.Module, model: Model | None, data: Any, device: torch.device) -> Batch:
    """The arguments of the network for a batch, a tensor of inputs, or a shape."""
    if is_shape(data):
        data = _floats_of_shape(net, data)
    data = _on_device(data, device)
    args = data if isinstance(data, tuple) else (data,)
    size = batch_size(args)

    has_only_inputs = isinstance(data, Tensor)
    if model is not None and model._has_own_forward and not has_only_inputs:
        # A forward of the user's own takes the batch as it is.
        return Batch(args, {}, whole=args, size=size, calls_forward_option=True)
    if isinstance(data, dict):
        named = data if model is not None and model.loss is None else _accepted(net, data)
        whole = args if model is not None and model.loss is None else None
        return Batch(inputs=(), named_inputs=named, whole=whole, size=size)
    if model is not None:
        inputs = without_target(args, targets=model.loss is not None and not has_only_inputs)
        takes_whole = not has_only_inputs and (model.loss is None or len(args) > 1)
        return Batch(inputs, {}, args if takes_whole else None, size)
    return Batch(_inputs_of(net, args), {}, None, size)


def _floats_of_shape(net: nn.Module, shape: Any) -> Tensor:
    if any(length < 1 for length in shape):
        raise ValueError(f"summary: expected a shape of positive lengths, got {tuple(shape)}")
    dtype = next((p.dtype for p in net.parameters() if p.is_floating_point()), torch.float32)
    return torch.rand(tuple(shape)).to(dtype)


def _on_device(data: Any, device: torch.device) -> Any:
    if isinstance(data, Tensor):
        return data.to(device)
    if isinstance(data, Mapping):
        return {name: _on_device(value, device) for name, value in data.items()}
    if isinstance(data, tuple | list):
        return tuple(_on_device(value, device) for value in data)
    return data


def _inputs_of(net: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The batch, or all but its target where forward takes one argument fewer."""
    if len(args) > 1 and not _takes(net.forward, *args) and _takes(net.forward, *args[:-1]):
        return args[:-1]
    return args


def _accepted(net: nn.Module, named: dict[str, Any]) -> dict[str, Any]:
    """The entries that forward takes by name."""
    if _takes(net.forward, **named):
        return named
    known = inspect.signature(net.forward).parameters
    return {name: value for name, value in named.items() if name in known}


def _takes(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    return True
