"""Parts of a Model written as other libraries take them: each answered with the line to write."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from halfstep.errors import closest_name
from halfstep.utils.text import write_line

LOSSES = {
    "mse": "nn.MSELoss()",
    "mean_squared_error": "nn.MSELoss()",
    "l2": "nn.MSELoss()",
    "mae": "nn.L1Loss()",
    "mean_absolute_error": "nn.L1Loss()",
    "l1": "nn.L1Loss()",
    "huber": "nn.HuberLoss()",
    "ce": "nn.CrossEntropyLoss()",
    "cross_entropy": "nn.CrossEntropyLoss()",
    "categorical_crossentropy": "nn.CrossEntropyLoss()",
    "sparse_categorical_crossentropy": "nn.CrossEntropyLoss()",
    "bce": "nn.BCEWithLogitsLoss()",
    "binary_crossentropy": "nn.BCEWithLogitsLoss()",
    "binary_cross_entropy": "nn.BCEWithLogitsLoss()",
    "nll": "nn.NLLLoss()",
    "nll_loss": "nn.NLLLoss()",
    "kl_divergence": "nn.KLDivLoss(reduction='batchmean')",
    "kl_div": "nn.KLDivLoss(reduction='batchmean')",
}
OPTIMIZERS = {
    "sgd": "torch.optim.SGD(net.parameters(), lr=0.01)",
    "adam": "torch.optim.Adam(net.parameters(), lr=0.001)",
    "adamw": "torch.optim.AdamW(net.parameters(), lr=0.001)",
    "nadam": "torch.optim.NAdam(net.parameters(), lr=0.001)",
    "adamax": "torch.optim.Adamax(net.parameters(), lr=0.001)",
    "adagrad": "torch.optim.Adagrad(net.parameters(), lr=0.01)",
    "adadelta": "torch.optim.Adadelta(net.parameters(), lr=1.0)",
    "rmsprop": "torch.optim.RMSprop(net.parameters(), lr=0.001)",
}
METRICS = {
    "acc": "{'acc': hs.metrics.Accuracy()}",
    "accuracy": "{'acc': hs.metrics.Accuracy()}",
    "binary_accuracy": "{'acc': hs.metrics.Accuracy()}",
    "categorical_accuracy": "{'acc': hs.metrics.Accuracy()}",
    "sparse_categorical_accuracy": "{'acc': hs.metrics.Accuracy()}",
    "top_k_categorical_accuracy": "{'top5': hs.metrics.Accuracy(top=5)}",
    "mse": "{'mse': lambda outputs, labels: (outputs - labels).square()}",
    "mean_squared_error": "{'mse': lambda outputs, labels: (outputs - labels).square()}",
    "mae": "{'mae': lambda outputs, labels: (outputs - labels).abs()}",
    "mean_absolute_error": "{'mae': lambda outputs, labels: (outputs - labels).abs()}",
}


def answer_foreign_parts(loss: Any, optimizer: Any, metrics: Any) -> None:
    """Refuses strings, classes, schedulers and swapped parts, with the line to write."""
    if isinstance(loss, Optimizer) or (isinstance(loss, str) and loss.lower() in OPTIMIZERS):
        problem = "loss: got an optimizer, which is the third argument"
        raise TypeError(write_line(problem, "hs.Model(net, loss, optimizer)"))
    if isinstance(loss, str):
        _refuse_loss_name(loss)
    _answer_optimizer(optimizer)
    if metrics is not None:
        _answer_metrics(metrics)


def _refuse_loss_name(name: str) -> None:
    known = closest_name(name, LOSSES)
    loss = LOSSES[known] if known is not None else "nn.CrossEntropyLoss()"
    problem = f"loss: expected a loss module or a function, got the name {name!r}"
    if "CrossEntropy" in loss or "WithLogits" in loss:
        problem = f"{problem}; torch's takes outputs from before the softmax or sigmoid"
    raise TypeError(write_line(problem, f"hs.Model(net, {loss}, optimizer)"))


def _answer_optimizer(optimizer: Any) -> None:
    if isinstance(optimizer, str):
        problem = f"optimizer: expected a torch.optim.Optimizer, got the name {optimizer!r}"
        known = closest_name(optimizer, OPTIMIZERS) or "adam"
        raise TypeError(write_line(problem, f"hs.Model(net, loss, {OPTIMIZERS[known]})"))
    if isinstance(optimizer, type):
        class_name = optimizer.__name__
        problem = f"optimizer: expected an object, got the class {class_name}"
        module = "torch.optim." if hasattr(torch.optim, class_name) else ""
        usual = f"{module}{class_name}(net.parameters(), lr=0.001)"
        line = OPTIMIZERS.get(class_name.lower(), usual)
        raise TypeError(write_line(problem, f"hs.Model(net, loss, {line})"))
    if isinstance(optimizer, LRScheduler | ReduceLROnPlateau):
        kind = type(optimizer).__name__
        problem = f"optimizer: got a scheduler, {kind}, which is the argument schedule="
        if isinstance(optimizer, ReduceLROnPlateau):
            line = "model.fit(2, data, valid=data, callbacks=[hs.ReduceLROnPlateau('loss')])"
        else:
            line = (
                "hs.Model(net, loss, scheduler.optimizer, schedule=scheduler, "
                "schedule_every='epoch')"
            )
        raise TypeError(write_line(problem, line))
    if isinstance(optimizer, nn.modules.loss._Loss):
        problem = "optimizer: got a loss, which is the second argument"
        raise TypeError(write_line(problem, "hs.Model(net, loss, optimizer)"))


def _answer_metrics(metrics: Any) -> None:
    """A name, a list of names or of metrics, or a metric alone: they have names as keys here."""
    named = metrics
    if isinstance(metrics, dict):
        named = next((value for value in metrics.values() if isinstance(value, str)), None)
        if named is None:
            return
    if isinstance(named, list | tuple | set):
        named = next((value for value in named if isinstance(value, str)), None)
    kind = type(metrics).__name__
    line = "metrics={'acc': hs.metrics.Accuracy()}"
    if isinstance(named, str):
        kind = f"the name {named!r}"
        line = f"metrics={METRICS[closest_name(named, METRICS) or 'acc']}"
    elif not isinstance(metrics, list | tuple | set) and not hasattr(metrics, "compute"):
        return  # it has an error of its own
    problem = f"metrics: expected a dict by name, got {kind}"
    raise TypeError(write_line(problem, f"hs.Model(net, loss, optimizer, {line})"))
