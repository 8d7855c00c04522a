"""What MegEngine's gear adds to torch's scaler: seed gradients, and unscaling by a list of tensors."""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.amp.scaler_settings import refuse

Seed: TypeAlias = Tensor | float
Held: TypeAlias = dict[int, tuple[int, Tensor]]


class Manager(Protocol):
    """What the scaler needs of a GradManager or of a group of them."""

    def backward(self, y: Any, dy: Any = None) -> None: ...

    def attached_tensors(self) -> list[Tensor]: ...


def roots(
    y: Tensor | Sequence[Tensor] | None, dy: Seed | Sequence[Seed] | None
) -> tuple[list[Tensor], list[Seed | None]]:
    """The outputs and one seed each; a single dy serves every y."""
    ys = [] if y is None else [y] if isinstance(y, Tensor) else list(y)
    dys = [*dy] if isinstance(dy, list | tuple) else [cast(Seed | None, dy)] * len(ys)
    if len(dys) != len(ys):
        refuse(
            "dy", f"one per y ({len(ys)}) or a single one", f"{len(dys)} of them", "pass as many"
        )
    return ys, dys


def seed(y: Tensor, dy: Seed | None, scale: Tensor) -> Tensor:
    """dy × scale in at least float32 on y's device; the manager rounds it to y's dtype."""
    scale = scale.to(y.device, torch.promote_types(y.dtype, torch.float32))
    if dy is None:
        return scale
    return (dy.to(scale.dtype) if isinstance(dy, Tensor) else dy) * scale


def held(tensors: Tensor | Iterable[Tensor | None]) -> Held:
    """By id, each tensor that has a gradient, once, with its position in the list."""
    listed = enumerate([tensors] if isinstance(tensors, Tensor) else tensors)
    return {id(t): (i, t) for i, t in listed if t is not None and t.grad is not None}


def as_optimizer(found: Held) -> Optimizer:
    """The tensors in the one shape that torch's unscaling reads."""
    return cast(
        Optimizer, SimpleNamespace(param_groups=[{"params": [t for _, t in found.values()]}])
    )


def combine(verdicts: Sequence[Tensor], device: torch.device) -> Tensor:
    """1 when some verdict is non-finite, else 0: on `device`, without reading it."""
    # to a CPU the copy must wait: torch would make it asynchronous, and the host would read it too early
    there = [v.to(device, non_blocking=device.type != "cpu") for v in verdicts]
    return (
        there[0] if len(there) == 1 else torch.stack(there).amax()
    )  # a sum of 2 would pass: fused kernels test == 1
