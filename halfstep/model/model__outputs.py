"""What goes into a prediction and what comes out of it, whole."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def batches(data: Any, batch: int) -> Any:
    """A tensor or an array in batches; anything else as it is."""
    return (
        [(part,) for part in torch.as_tensor(data).split(batch)]
        if isinstance(data, Tensor | np.ndarray)
        else data
    )


def joined(outputs: Sequence[Any]) -> Any:
    """One tensor, or one of what the network returns (a tuple, a dict) with whole tensors in it; the batches as a list
    where they hold anything but tensors."""
    flat = [tree_flatten(each) for each in outputs]
    leaves = [leaf for found, _ in flat for leaf in found]
    alike = all(spec == flat[0][1] for _, spec in flat)
    if not flat or not alike or not all(isinstance(leaf, Tensor) and leaf.dim() for leaf in leaves):
        return list(outputs)
    columns = list(zip(*(found for found, _ in flat), strict=True))
    for column in columns:
        shapes = {leaf.shape[1:] for leaf in column}
        if len(shapes) > 1:
            a, b = sorted(list(shape) for shape in shapes)[:2]
            raise ValueError(
                f"predict: expected outputs of one shape, to make one tensor of them, got samples of {a} and of {b}; "
                "predict(…, stream=True) gives them batch by batch"
            )
    return tree_unflatten([torch.cat(column) for column in columns], flat[0][1])
