"""A pass over validation data: the loss weighted by real counts, and the metrics; and predictions."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep.engine.batch_errors import explain_batch_error
from halfstep.engine.feed import Args, Feed
from halfstep.metrics import Loss, Metrics
from halfstep.metrics.counters import logits_of
from halfstep.step.eval_step import EvalRecord, eval_mode
from halfstep.step.objective import batch_size

Labels = Callable[[Any], Any]
_NAMES = ("labels", "label", "target", "y")  # where a dict keeps its labels, first found


def evaluate(
    step: Callable[..., Any], feed: Feed, metrics: Metrics, labels: Labels, stop: Callable[[], bool] = lambda: False,
    *, net: nn.Module | None = None,
) -> dict[str, float] | None:  # fmt: skip
    """Mean loss and metrics over one whole pass, the short last batch included; None when `stop` cut it short.

    With `net`, `step` is a user's cell, called with that network in eval mode and without gradients.
    """
    cell = step if net is None else _still(step, net)
    mean: Loss | None = None
    metrics.reset()
    feed.next_pass(0)  # the same samples, in the same order, whenever it is asked
    for number, args in enumerate(feed.start(), 1):
        if stop():
            return None
        try:
            record = as_record(cell(*args), args)
        except Exception as error:
            explain_batch_error(
                error,
                f"evaluation, batch {number}",
                args,
                feed.names,
                net or getattr(step, "net", None),
            )
            raise
        mean = mean or Loss().to(record.loss.device)
        mean.update(record.loss, record.count)
        if len(metrics):
            metrics.to(record.loss.device)
            found = labels(args[0] if len(args) == 1 else args)
            here = found.to(record.loss.device) if isinstance(found, Tensor) else found
            metrics.update(logits_of(record.outputs), here, loss=record.loss, count=record.count)
    return finished(mean, metrics)


def finished(mean: Loss | None, metrics: Metrics) -> dict[str, float]:
    """The loss and every metric, as numbers."""
    scores = {"loss": mean.compute() if mean else torch.tensor(torch.nan), **metrics.compute()}
    return {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in scores.items()
    }


def _still(step: Callable[..., Any], net: nn.Module) -> Callable[..., Any]:
    """`step` where BatchNorm does not move; asked anew for each batch, as a cell may end with net.train()."""

    @torch.no_grad()
    def cell(*args: Any) -> Any:
        with eval_mode(net):
            return step(*args)

    return cell


def as_record(result: Any, args: Args) -> EvalRecord:
    """What an evaluation cell returned: an EvalRecord, or (loss, outputs) with the mean over the samples of `args`."""
    if isinstance(result, EvalRecord):
        return result
    if isinstance(result, tuple) and len(result) >= 2 and isinstance(result[0], Tensor):
        loss, outputs = result[0], result[1]
        return EvalRecord(
            loss.detach(), torch.full((), batch_size(args), device=loss.device), outputs
        )
    raise TypeError(
        f"eval_step: expected an EvalRecord or (loss, outputs), got {type(result).__name__}"
    )


def label_of(batch: Any) -> Any:
    """Where labels usually are: the last of a tuple, or under one of the usual names."""
    if isinstance(batch, dict):
        name = next((n for n in _NAMES if n in batch), None)
        if name is None:
            raise ValueError(
                f"metrics: no labels among {sorted(batch)}. Say where they are: Model(labels=lambda batch: …)"
            )
        return batch[name]
    if isinstance(batch, tuple):
        return batch[-1]
    raise ValueError(
        f"metrics: no labels in a {type(batch).__name__}. Say where they are: Model(labels=lambda batch: …)"
    )


def to_host(value: Any) -> Any:
    """Every tensor in tuples, lists and dicts on the host, structure kept."""
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, value)


def inputs_of(args: Args, *, targets: bool) -> Args:
    """A batch without its target: the last of several, or the labels of a dict."""
    if len(args) == 1 and isinstance(args[0], dict):
        return ({k: v for k, v in args[0].items() if k not in _NAMES},)
    return args[:-1] if targets and len(args) > 1 else args
