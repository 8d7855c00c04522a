"""Checks of a model's parts: what is refused, what is warned of, what is chosen for the user."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from halfstep.errors import Notice
from halfstep.metrics import Accuracy, Metrics
from halfstep.precision import Precision
from halfstep.step import TrainStep
from halfstep.step import options as step_options
from halfstep.step.optimizer import classify_optimizer, prefer_fused
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.text import list_some

DEFAULT_IGNORE_INDEX = -100  # of torch's losses, and of our Accuracy

# Options as other libraries call them.
FOREIGN_OPTIONS = {
    **step_options.FOREIGN_OPTIONS,
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "accelerator": "device",
    "metric": "metrics",
    "compute_metrics": "metrics",
}
# Options that belong into another call.
MISPLACED_OPTIONS = {
    **dict.fromkeys(("epochs", "max_epochs"), "write model.fit(2, data)"),
    "callbacks": "write model.fit(2, data, callbacks=[hs.History()])",
    "learning_rate": "write torch.optim.SGD(net.parameters(), lr=0.1)",
    "batch_size": "write model.fit(x, y, epochs=2, batch_size=32)",
    **dict.fromkeys(("fp16", "use_amp"), "write hs.Model(net, loss, optimizer, 'O1')"),
    "bf16": "write hs.Model(net, loss, optimizer, 'O1+bf16')",
}


def check_parts(net: Any, loss: Any, optimizer: Any, step: Any, options: Sequence[str]) -> None:
    """Refuses classes in place of objects, and options that nothing would use."""
    for name, part in (("net", net), ("loss", loss), ("optimizer", optimizer)):
        if isinstance(part, type):
            class_name = part.__name__
            raise TypeError(
                f"{name}: expected an object, got the class {class_name}. Write {class_name}(…)"
            )
    if not isinstance(net, nn.Module):
        raise TypeError(f"net: expected an nn.Module, got {type(net).__name__}")
    if optimizer is None and step is None and options:
        raise ValueError(
            f"{', '.join(options)}: these are about training, and no optimizer was given. "
            "Add optimizer=…"
        )
    if step is None:
        return
    unused = [name for name in options if name not in ("forward", "count")]
    if unused:
        raise ValueError(
            f"{', '.join(unused)}: the step was given whole, and these would do nothing. "
            "Put them into it."
        )


def check_precision(step: Any, precision: str | Precision) -> None:
    """Refuses a precision that the step's own contradicts."""
    if step is None:
        return
    requested = Precision.parse(precision)
    if isinstance(step, TrainStep):
        if requested not in (Precision.parse("fp32"), step.precision):
            raise ValueError(
                f"precision: the step was given whole, in {step.precision.name!r}; "
                "leave precision= to it"
            )
    elif requested.name != "fp32":
        warnings.warn(
            f"precision: {precision!r} holds for evaluate and predict. "
            "The step is your own and decides for itself; "
            "inside it, `with hs.amp.autocast():` is mixed precision",
            Notice,
            stacklevel=user_stacklevel(),
        )


def warn_untrained(net: nn.Module, optimizer: Optimizer) -> None:
    """Warns of parameters that gradients are computed for and no optimizer moves."""
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    untrained = [
        name for name, p in net.named_parameters() if p.requires_grad and id(p) not in trained
    ]
    if untrained:
        warnings.warn(
            f"optimizer: {list_some(untrained, 3)} are in none of its groups and stay as they are; "
            "add them, or say so with requires_grad_(False), which is faster",
            Notice,
            stacklevel=user_stacklevel(),
        )


def warn_ignored_labels(loss: Any, metrics: Metrics) -> None:
    """Warns of labels that the loss ignores and an accuracy would count as wrong."""
    ignored = getattr(loss, "ignore_index", None)
    if not isinstance(ignored, int) or ignored == DEFAULT_IGNORE_INDEX:
        return
    for name, metric in metrics.by_name.items():
        if isinstance(metric, Accuracy) and metric.ignore_index == DEFAULT_IGNORE_INDEX:
            warnings.warn(
                f"metrics: the loss ignores the label {ignored}, and {name!r} counts it; "
                f"to leave it out, write Accuracy(ignore_index={ignored})",
                Notice,
                stacklevel=user_stacklevel(),
            )


def set_train_mode(net: nn.Module, step: Any) -> None:
    """Puts a network that is all in eval mode, as a pretrained one comes, into train mode."""
    modules = list(net.modules())
    if not isinstance(step, TrainStep) or any(module.training for module in modules):
        return
    net.train()
    if any(_differs_in_train_mode(module) for module in modules):
        warnings.warn(
            "fit: the network came in eval mode, and is trained in train mode "
            "(dropout, batch statistics); modules that shall stay in eval mode: "
            "net.train() first, then .eval() on those",
            Notice,
            stacklevel=user_stacklevel(),
        )


def _differs_in_train_mode(module: nn.Module) -> bool:
    """Whether train mode is another computation, as far as one can tell from outside."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.p > 0
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return module.track_running_stats
    return False


def may_have_parts(step: Any) -> bool:
    """Whether the step's loss may return more than itself."""
    return isinstance(step, TrainStep) and step.objective.may_have_parts


def check_can_evaluate(net: nn.Module, uses_built_in: bool, step: Any) -> None:
    """Refuses to evaluate modules without a forward, as a step of the user's own may have."""
    has_forward = getattr(net.forward, "__name__", "") != "_forward_unimplemented"
    if uses_built_in and not has_forward and not isinstance(step, TrainStep):
        raise ValueError(
            f"valid: {type(net).__name__} has no forward to evaluate by; "
            "give eval_step=, a function of a batch"
        )


def choose_fused(
    net: nn.Module,
    optimizer: Any,
    precision: str | Precision,
    schedule: Any,
    options: Mapping[str, Any],
) -> bool:
    """Turns on torch's fused kernels where the user left that open; returns whether it did.

    On CUDA always; on a CPU for a compiled step whose optimizer would otherwise read on the host.
    There the kernels leave half parameters alone and take no sparse gradients.
    """
    if not isinstance(optimizer, Optimizer):
        return False
    parsed_precision = Precision.parse(precision)  # before anything is changed
    on_cpu = False
    if options.get("compile") is True:
        is_sparse = any(getattr(module, "sparse", False) is True for module in net.modules())
        is_wide = parsed_precision.params.itemsize >= 4
        if is_wide and not is_sparse:
            has_table = schedule is not None or options.get("lr") is not None
            on_cpu = classify_optimizer(optimizer, tensor_lr=has_table) == "host"
    return prefer_fused(optimizer, on_cpu=on_cpu)
