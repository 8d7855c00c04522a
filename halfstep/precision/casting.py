"""Casts at module boundaries, as wrappers of `forward`."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep.precision.policy import F32

Forward = Callable[..., Any]


def cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating tensor inside it in `dtype`."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype != dtype and value.is_floating_point() else value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return tree_map(lambda leaf: cast(leaf, dtype) if isinstance(leaf, Tensor) else leaf, value)


def cast_inputs(forward: Forward, dtype: torch.dtype) -> Forward:
    """A module that owns low weights takes low inputs, wherever they come from."""

    @wraps(forward)
    def low(*args: Any, **kwargs: Any) -> Any:
        args = tuple([cast(a, dtype) for a in args])
        return (
            forward(*args, **{k: cast(v, dtype) for k, v in kwargs.items()})
            if kwargs
            else forward(*args)
        )

    return low


def cast_both(
    forward: Forward, inside: torch.dtype, outside: torch.dtype, exact: "Exact | None"
) -> Forward:
    """A module kept in another dtype: inputs in, outputs back to the dtype around it."""
    inner = cast_inputs(forward, inside)

    @wraps(forward)
    def kept(*args: Any, **kwargs: Any) -> Any:
        out = inner(*args, **kwargs)
        return exact.round(out, outside) if exact is not None else cast(out, outside)

    return kept


def outside_autocast(forward: Forward, device_type: str) -> Forward:
    """A module kept in fp32 under O1: no autocast inside, fp32 inputs."""
    inner = cast_inputs(forward, F32)

    @wraps(forward)
    def kept(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device_type, enabled=False):
            return inner(*args, **kwargs)

    return kept


class Exact:
    """Remembers what the outputs of kept modules were before rounding, for those that are the network's outputs."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, int, Tensor]] = {}

    def round(self, out: Any, dtype: torch.dtype) -> Any:
        def one(leaf: Any) -> Any:
            low = cast(leaf, dtype)
            if low is not leaf:
                self._kept[id(low)] = (
                    low,
                    low._version,
                    leaf,
                )  # holding `low` keeps its id from being reused
            return low

        return one(out) if isinstance(out, Tensor) else tree_map(one, out)

    def restore(self, out: Any) -> Any:
        """`out` without the detour through the low dtype, where nothing was written into it since."""
        if not self._kept:  # torch 2.11 traces no id() of an intermediate: it would break a compiled program in three
            return out

        def one(leaf: Any) -> Any:
            kept = self._kept.get(id(leaf))
            return leaf if kept is None or leaf._version != kept[1] else kept[2]

        return one(out) if isinstance(out, Tensor) else tree_map(one, out)

    def leave(self, forward: Forward, dtype: torch.dtype) -> Forward:
        """The network's own forward: outputs in `dtype`."""

        @wraps(forward)
        def network(*args: Any, **kwargs: Any) -> Any:
            return cast(self.restore(forward(*args, **kwargs)), dtype)

        return network

    def clear(self) -> None:
        self._kept.clear()


def native_mixed(module: nn.Module) -> bool:
    """BatchNorm takes low inputs beside fp32 statistics in one kernel, rounding once: no casts around it."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)
