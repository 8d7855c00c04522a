"""What a step refuses or remarks on when it is built."""

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.errors import Notice
from halfstep.precision import Precision
from halfstep.precision.casting import batch_coupled
from halfstep.step.objective import Objective
from halfstep.step.optimizer import OptimizerKind, named_parameters


def find_parameters(
    net: Any, loss: Any, optimizer: torch.optim.Optimizer
) -> tuple[list[str], list[Tensor]]:
    """Names and tensors of everything the optimizer trains, in the network's order."""
    if not isinstance(net, nn.Module):
        raise TypeError(f"net: expected a torch.nn.Module, received {type(net).__name__}")
    named = named_parameters(optimizer, ("", net), ("loss.", loss))
    owned = {id(p) for p in net.parameters()}
    if not any(id(p) in owned for _, p in named):
        raise ValueError(
            "optimizer: it holds none of the network's parameters; build it from net.parameters(), after any "
            "net.to(device) that replaces them"
        )
    return [name for name, _ in named], [p for _, p in named]


def find_device(net: nn.Module, params: list[Tensor]) -> torch.device:
    """The one device of all parameters and buffers."""
    devices = {t.device for t in (*params, *net.parameters(), *net.buffers())}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(
            f"net: expected every parameter and buffer on one device, found {found}; call net.to(device) first"
        )
    return devices.pop()


def check_cycle(objective: Objective, net: nn.Module, accumulate: int) -> list[str]:
    """Refuses a cycle whose weights nobody knows; returns what the user should know of a cycle that is not exact."""
    if accumulate == 1:
        return []
    if not objective.can_weight:
        loss, example = objective.loss, "len(batch[1])"
        name = (
            type(loss).__name__
            if isinstance(loss, nn.Module)
            else getattr(loss, "__name__", str(loss))
        )
        if loss is None:
            name, example = "the network's own loss", 'len(batch["labels"])'
        raise ValueError(
            f"accumulate={accumulate}: expected to know how many terms the loss averages, but {name} is not a loss of "
            f"torch.nn; give count=, for instance count=lambda batch: {example}"
        )
    coupled = batch_coupled(net)
    if not coupled:
        return []
    notice = (
        f"batch-coupled layers see micro-batches: {', '.join(map(repr, coupled[:3]))}"
        f"{f' and {len(coupled) - 3} more' if len(coupled) > 3 else ''}; accumulate={accumulate} is then not exactly "
        "the full batch"
    )
    warnings.warn(notice, Notice, stacklevel=3)
    return [notice]


def check_optimizer_precision(
    optimizer: torch.optim.Optimizer, precision: Precision, device: torch.device
) -> None:
    """torch's fused SGD leaves half parameters on a CPU where they were (pytorch#191763): refused where it does."""
    fused = isinstance(optimizer, torch.optim.SGD) and any(
        g["fused"] for g in optimizer.param_groups
    )
    low = precision.params in (torch.float16, torch.bfloat16) and precision.rounding == "nearest"
    if low:
        _eps(optimizer, precision.params)
    if not (fused and low and device.type == "cpu"):
        return
    p = nn.Parameter(torch.ones(256, dtype=precision.params))
    p.grad = torch.ones_like(p)
    torch.optim.SGD([p], lr=1.0, fused=True).step()
    if p.any():
        raise ValueError(
            f"optimizer: torch {torch.__version__}'s fused SGD does not update {precision.params} parameters on a CPU "
            "(pytorch#191763); build it without fused=True, or use rounding='kahan' or 'stochastic'"
        )


def _eps(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> None:
    """Adam's 1e-8 is 0 in float16, and a gradient whose square underflows is then divided by 0."""
    given = [
        g["eps"] for g in optimizer.param_groups if isinstance(g.get("eps"), float) and g["eps"] > 0
    ]
    lost = [eps for eps in given if not torch.tensor(eps, dtype=dtype)]
    if lost:
        name = str(dtype).removeprefix("torch.")
        warnings.warn(
            f"{type(optimizer).__name__}: eps={lost[0]:g} is 0 in {name}, and weights may become inf; give eps=1e-4, "
            "or rounding='kahan', or a precision with float32 parameters (O1, O2, O3)", Notice, stacklevel=5,
        )  # fmt: skip


def where_to_decide(wish: str, kind: OptimizerKind, device: torch.device) -> str:
    """Where updates are decided: on the device when the optimizer allows it and waiting would cost something."""
    if wish == "device" and kind == "host":
        raise ValueError(
            "decide='device': this optimizer reads values on the host or keeps state there; "
            "build it with fused=True or capturable=True, or use decide='host'"
        )
    if wish != "auto":
        return wish
    return "device" if kind != "host" and device.type != "cpu" else "host"


def parameter_storage(precision: Precision) -> tuple[Any, ...]:
    """How a precision stores parameters: what a switch must not change."""
    whole = precision.cast == "whole"
    return (
        precision.params,
        precision.rounding,
        (precision.keep, precision.norms) if whole else None,
    )


def check_switch(old: Precision, new: Precision, micro: int) -> None:
    """Refuses a change of precision in mid-run that could not go on from the same weights and gradients."""
    if parameter_storage(new) != parameter_storage(old):
        raise ValueError(
            f"switch: {new.name!r} stores parameters otherwise than {old.name!r}; build a new TrainStep"
        )
    if micro:
        raise ValueError(
            "switch: an update cycle is open and its gradients carry the old scale; call flush() first"
        )
