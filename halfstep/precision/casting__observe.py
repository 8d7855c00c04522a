"""The dtypes that modules really got and gave, read off one forward."""

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


class Observed(NamedTuple):
    """One module's input, weight and output dtypes in one forward ("-" where it has none)."""

    kind: str
    input: str
    weight: str
    output: str


def observe(
    forward: Callable[..., Any], module: nn.Module, name: str, into: dict[str, Observed]
) -> Callable[..., Any]:
    """`forward` that writes down the dtypes of its first call under `name`."""

    @wraps(forward)
    def watched(*args: Any, **kwargs: Any) -> Any:
        weights = [w for w in module._parameters.values() if w is not None]
        out = forward(*args, **kwargs)
        row = Observed(
            type(module).__name__, _dtypes((args, kwargs)), _dtypes(weights), _dtypes(out)
        )
        into.setdefault(name, row)
        return out

    return watched


def _dtypes(values: Any) -> str:
    leaves = [leaf.dtype for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    floating = [d for d in leaves if d.is_floating_point or d.is_complex] or leaves
    return "/".join(dict.fromkeys(short(d) for d in floating)) or "-"


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
