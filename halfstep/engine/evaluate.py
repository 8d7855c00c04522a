"""A pass over validation data: the loss weighted by real counts, and the metrics; and predictions."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from halfstep.engine.feed import Args, Feed
from halfstep.metrics import Loss, Metrics
from halfstep.step.evaluate import EvalRecord

Labels = Callable[[Any], Any]


def evaluate(
    step: Callable[..., Any], feed: Feed, metrics: Metrics, labels: Labels, stop: Callable[[], bool] = lambda: False
) -> dict[str, float] | None:
    """Mean loss and metrics over one whole pass, the short last batch included; None when `stop` cut it short."""
    mean: Loss | None = None
    metrics.reset()
    feed.next_pass(0)  # the same samples, in the same order, whenever it is asked
    for args in feed.start():
        if stop():
            return None
        record = as_record(step(*args))
        mean = mean or Loss().to(record.loss.device)
        mean.update(record.loss, record.count)
        if len(metrics):
            metrics.to(record.loss.device)
            found = labels(args[0] if len(args) == 1 else args)
            here = found.to(record.loss.device) if isinstance(found, Tensor) else found
            metrics.update(logits(record.outputs), here, loss=record.loss, count=record.count)
    scores = {"loss": mean.compute() if mean else torch.tensor(torch.nan), **metrics.compute()}
    return {
        name: value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
        for name, value in scores.items()
    }


def as_record(result: Any) -> EvalRecord:
    """What an evaluation cell returned: an EvalRecord, or (loss, outputs) with the mean over the batch."""
    if isinstance(result, EvalRecord):
        return result
    if isinstance(result, tuple) and len(result) >= 2 and isinstance(result[0], Tensor):
        loss, outputs = result[0], result[1]
        rows = len(outputs) if isinstance(outputs, Tensor) and outputs.dim() else 1
        return EvalRecord(loss.detach(), torch.full((), rows, device=loss.device), outputs)
    raise TypeError(f"eval_step: expected an EvalRecord or (loss, outputs), got {type(result).__name__}")


def label_of(batch: Any) -> Any:
    """Where labels usually are: the last of a tuple, or under "labels" or "label"."""
    if isinstance(batch, dict):
        name = next((n for n in ("labels", "label", "target", "y") if n in batch), None)
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


def logits(outputs: Any) -> Any:
    """The scores in a Hugging Face output; other outputs as they are."""
    found = outputs.get("logits") if isinstance(outputs, dict) else getattr(outputs, "logits", None)
    return outputs if found is None else found


def inputs_of(args: Args, *, targets: bool) -> Args:
    """A batch without its target: the last of several, or the labels of a dict."""
    if len(args) == 1 and isinstance(args[0], dict):
        return ({k: v for k, v in args[0].items() if k not in ("labels", "label", "target", "y")},)
    return args[:-1] if targets and len(args) > 1 else args


def batches_of(data: Any, size: int, *, targets: bool) -> Iterator[Args]:
    """Inputs for predictions: a tensor is cut into batches; data sets give theirs, without targets."""
    if isinstance(data, Tensor):
        yield from ((part,) for part in data.split(size))
        return
    feed = Feed(data)
    feed.next_pass(0)
    for args in feed.start():
        yield inputs_of(args, targets=targets)
