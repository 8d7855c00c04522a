"""The parts of a model, checked: what they must be, what they would silently do, and what is chosen for them."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

from torch import nn
from torch.optim import Optimizer

from halfstep.errors import Notice
from halfstep.precision import Precision
from halfstep.step import TrainStep
from halfstep.step.optimizer import classify_optimizer, prefer_fused
from halfstep.step.options import StepOptions

_OWN = ("metrics", "schedule", "labels", "step", "eval_step", "capture", "verify")
_ELSEWHERE = {
    "gradient_clip_val": "clip_norm",
    "max_grad_norm": "clip_norm",
    "accumulate_grad_batches": "accumulate",
}


def check(net: Any, loss: Any, optimizer: Any, step: Any, options: Sequence[str]) -> None:
    """Refuses what cannot be a model: classes instead of objects, training options with nothing to train by."""
    for name, given in (("net", net), ("loss", loss), ("optimizer", optimizer)):
        if isinstance(given, type):
            raise TypeError(
                f"{name}: expected an object, got the class {given.__name__}. Write {given.__name__}(…)"
            )
    if not isinstance(net, nn.Module):
        raise TypeError(f"net: expected an nn.Module, got {type(net).__name__}")
    if optimizer is None and step is None and options:
        given = ", ".join(options)
        raise ValueError(
            f"{given}: these are about training, and no optimizer was given. Add optimizer=…"
        )
    unused = (
        [name for name in options if name not in ("forward", "count")] if step is not None else []
    )
    if unused:
        raise ValueError(
            f"{', '.join(unused)}: the step was given whole, and these would do nothing. Put them into it."
        )


def precisions(step: Any, precision: str | Precision) -> None:
    """A step that was given whole has its own."""
    if isinstance(step, TrainStep) and Precision.parse(precision) not in (
        Precision.parse("fp32"),
        step.precision,
    ):
        raise ValueError(
            f"precision: the step was given whole, in {step.precision.name!r}; leave precision= to it"
        )
    if (
        step is not None
        and not isinstance(step, TrainStep)
        and Precision.parse(precision).name != "fp32"
    ):
        text = f"precision: {precision!r} holds for evaluate and predict. The step is your own and decides for itself"
        warnings.warn(
            f"{text}; inside it, `with hs.amp.autocast():` is mixed precision", Notice, stacklevel=3
        )


def known(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a TrainStep; a name that neither it nor Model has is told here, with the one that was meant."""
    taken = [*_OWN, *(field.name for field in fields(StepOptions))]
    for name in options:
        if name not in taken:
            close = [_ELSEWHERE[name]] if name in _ELSEWHERE else get_close_matches(name, taken, 1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise TypeError(
                f"Model: unknown option {name!r}; {hint}options are: {', '.join(taken)}"
            )
    return options


def untrained(net: nn.Module, optimizer: Optimizer) -> None:
    """Parameters that gradients are computed for and nobody moves."""
    given = {id(p) for group in optimizer.param_groups for p in group["params"]}
    left = [name for name, p in net.named_parameters() if p.requires_grad and id(p) not in given]
    if left:
        more = f" and {len(left) - 3} more" if len(left) > 3 else ""
        text = (
            f"optimizer: {', '.join(left[:3])}{more} are in none of its groups and stay as they are"
        )
        warnings.warn(
            f"{text}; add them, or say so with requires_grad_(False), which is faster",
            Notice,
            stacklevel=3,
        )


def training(net: nn.Module, step: Any) -> None:
    """Puts a network that is all in eval mode, as a pretrained one comes, into train mode, and says so."""
    modules = list(net.modules())
    if isinstance(step, TrainStep) and not any(module.training for module in modules):
        net.train()
        if any(_differs(module) for module in modules):
            text = "fit: the network came in eval mode, and is trained in train mode (dropout, batch statistics)"
            stay = "modules that shall stay in eval mode: net.train() first, then .eval() on those"
            warnings.warn(f"{text}; {stay}", Notice, stacklevel=4)


def _differs(module: nn.Module) -> bool:
    """Whether train mode is another computation, as far as one can tell from outside."""
    draws = isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0
    return draws or (
        isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
    )


def evaluation(net: nn.Module, built_in: bool, step: Any) -> None:
    """A step of the user's own over modules without a forward has nothing to evaluate by."""
    unused = getattr(net.forward, "__name__", "") == "_forward_unimplemented"
    if built_in and unused and not isinstance(step, TrainStep):
        name = type(net).__name__
        raise ValueError(
            f"valid: {name} has no forward to evaluate by; give eval_step=, a function of a batch"
        )


def fused(
    net: nn.Module,
    optimizer: Any,
    precision: str | Precision,
    schedule: Any,
    options: Mapping[str, Any],
) -> bool:
    """Whether torch's fused kernels were chosen: on CUDA, and on a CPU for a compiled step whose optimizer would
    otherwise read on the host. There they leave half parameters alone, and take no sparse gradients."""
    if not isinstance(optimizer, Optimizer):
        return False
    sparse = any(getattr(module, "sparse", False) is True for module in net.modules())
    wide = Precision.parse(precision).params.itemsize >= 4 and not sparse
    table = schedule is not None or options.get("lr") is not None
    reads = (
        wide
        and options.get("compile") is True
        and classify_optimizer(optimizer, tensor_lr=table) == "host"
    )
    return prefer_fused(optimizer, on_cpu=reads)
