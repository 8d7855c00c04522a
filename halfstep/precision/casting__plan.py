"""Which dtype each module runs in: the table, the norm rule and the user's globs, decided once at construction."""

import re
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import nn

from halfstep.precision.policy import Precision

_NORM_NAME = re.compile(
    r"Norm(\dd)?$"
)  # BatchNorm2d, LayerNorm, GroupNorm, and LlamaRMSNorm and its like


class Place(NamedTuple):
    """One module's dtype, the dtype around it, and whether a `keep=` glob named it."""

    inside: torch.dtype
    around: torch.dtype
    kept: bool


def is_norm(module: nn.Module) -> bool:
    """Norm layers, torch's own or named like one; a wrapper such as PreNorm, with layers inside, is none."""
    return _NORM_NAME.search(type(module).__name__) is not None and not any(
        True for _ in module.children()
    )


def plan(net: nn.Module, precision: Precision) -> dict[str, Place]:
    """Module name → place, parents before children. A child takes its parent's dtype unless a rule names it."""
    _check_globs(net, precision)
    places: dict[str, Place] = {}
    for name, module in net.named_modules():
        around = places[name.rpartition(".")[0]].inside if name else precision.compute
        places[name] = _place(name, module, around, precision)
    return places


def _place(name: str, module: nn.Module, around: torch.dtype, precision: Precision) -> Place:
    matched = [dtype for glob, dtype in precision.keep if fnmatchcase(name, glob)]
    if matched:  # two globs on one module: the safer dtype
        return Place(max(matched, key=lambda d: torch.finfo(d).bits), around, True)
    in_kept_block = around != precision.compute
    return Place(
        precision.norms if is_norm(module) and not in_kept_block else around, around, False
    )


def _check_globs(net: nn.Module, precision: Precision) -> None:
    known = [name for name, _ in net.named_modules() if name]
    for glob, _ in precision.keep:
        if not any(fnmatchcase(name, glob) for name in known):
            some = ", ".join(known[:12]) + (", …" if len(known) > 12 else "")
            raise ValueError(
                f"keep={{{glob!r}: …}} matches no module of the network; its modules are: {some}"
            )


def batch_coupled(net: nn.Module) -> list[str]:
    """Modules whose output for one sample depends on the others of its batch, by name."""
    kinds = nn.modules.batchnorm._NormBase
    return [
        name
        for name, m in net.named_modules()
        if isinstance(m, kinds) and not isinstance(m, nn.modules.instancenorm._InstanceNorm)
    ]
