"""One pass over validation data: the loss weighted by real counts, and the metrics."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep.engine.batch_errors import explain_batch_error
from halfstep.engine.feed import Args, Feed
from halfstep.engine.run import part_columns
from halfstep.metrics import Loss, Metrics
from halfstep.metrics.counters import logits_of
from halfstep.step.eval_step import AMBIGUOUS_TARGET, EvalRecord, eval_mode
from halfstep.step.objective import batch_size

Labels = Callable[[Any], Any]

LABEL_NAMES = ("labels", "label", "target", "y")  # where a dict keeps its labels

EMPTY_DATA_ADVICE = (
    "is the data empty, has it fewer samples than one batch with drop_remainder, or can it not be "
    "gone through again?"
)


def _never() -> bool:
    return False


def evaluate(
    step: Callable[..., Any],
    feed: Feed,
    metrics: Metrics,
    labels: Labels | None,
    stop: Callable[[], bool] = _never,
    *,
    net: nn.Module | None = None,
) -> dict[str, Any] | None:
    """Mean loss and metrics over one whole pass; None when `stop` cut it short.

    With `net`, `step` is a function of the user's. It is called with that network in eval mode and
    without gradients. `labels` finds the labels in a batch; None: see `metric_arguments`.
    """
    eval_step = step if net is None else _in_eval_mode(step, net)
    mean_loss: Loss | None = None
    mean_parts: dict[str, Loss] = {}
    batch_count = 0
    metrics.reset()
    feed.go_to_pass(0)  # the same samples, in the same order, at every evaluation
    for batch_number, args in enumerate(feed.start(), 1):
        if stop():
            return None
        try:
            record = to_eval_record(eval_step(*args), args)
        except Exception as error:
            failing_net = net or getattr(step, "net", None)
            where = f"evaluation, batch {batch_number}"
            explain_batch_error(error, where, args, feed.names, failing_net)
            raise

        device = record.loss.device
        if mean_loss is None:
            mean_loss = Loss().to(device)
        mean_loss.update(record.loss, record.count)
        add_parts(mean_parts, record, is_first=batch_count == 0)
        batch_count = batch_number
        if len(metrics):
            metrics.to(device)
            outputs, batch_labels = metric_arguments(record, args, labels, metrics)
            metrics.update(outputs, batch_labels, loss=record.loss, count=record.count)
    return final_scores(mean_loss, metrics, batch_count, mean_parts)


def add_parts(mean_parts: dict[str, Loss], record: EvalRecord, *, is_first: bool) -> None:
    """Adds the parts of a batch's loss to their means, which have the weights of the loss."""
    if is_first:
        for name in record.parts:
            if name not in mean_parts:
                mean_parts[name] = Loss().to(record.loss.device)
    if list(record.parts) != list(mean_parts):
        raise ValueError(
            f"loss: expected the parts {sorted(mean_parts)} with every batch of an evaluation, "
            f"received {sorted(record.parts)}; return all of them every time, in one order"
        )
    for name, part in record.parts.items():
        mean_parts[name].update(part, record.count)


def metric_arguments(
    record: EvalRecord, args: Args, labels: Labels | None, metrics: Metrics
) -> tuple[Any, Any]:
    """The outputs and the labels of a batch, for its metrics; None where no metric reads them.

    Without `labels`, the labels are what the loss got as its target; where the loss is computed
    elsewhere, they are where labels usually are in a batch.
    """
    names = metrics.names_that_read_outputs
    if not names:
        return None, None
    if record.outputs is None:
        raise ValueError(
            f"metrics: {', '.join(map(repr, names))}: expected outputs of the network to compute "
            "from, and only the loss was returned. Let forward= (or the network, or eval_step=) "
            "return (loss, outputs), {'loss': loss, 'logits': outputs} or an object with .loss "
            "and .logits; or leave out metrics="
        )
    if labels is not None:
        batch_labels = labels(args[0] if len(args) == 1 else args)
    elif record.target is AMBIGUOUS_TARGET:
        raise ValueError(
            "metrics: the loss has more than two arguments, and none is called target, label or y, "
            "so that nothing says what the labels are. Say it: Model(labels=lambda batch: batch[1])"
        )
    elif record.target is not None:
        batch_labels = record.target
    else:
        batch_labels = find_labels(args[0] if len(args) == 1 else args)
    if isinstance(batch_labels, Tensor):
        batch_labels = batch_labels.to(record.loss.device)
    outputs = logits_of(record.outputs)
    _refuse_one_number(outputs, batch_labels, names)
    return outputs, batch_labels


def _refuse_one_number(outputs: Any, labels: Any, names: Iterable[str]) -> None:
    """Refuses one number as the outputs of several labels: it is a loss, or a part of one.

    A metric that broadcasts would compare it with every label.
    """
    if not isinstance(outputs, Tensor) or outputs.dim() > 0:
        return
    if isinstance(labels, Tensor) and labels.numel() > 1:
        raise ValueError(
            f"metrics: {', '.join(map(repr, names))}: expected outputs for labels "
            f"{list(labels.shape)}, received one number, as a loss is. Let forward= (or the "
            "network, or eval_step=) return (loss, outputs), with other numbers in a dict between "
            "them: (loss, {'aux': aux}, outputs); or leave out metrics="
        )


def final_scores(
    mean_loss: Loss | None, metrics: Metrics, batch_count: int, mean_parts: Mapping[str, Loss]
) -> dict[str, Any]:
    """The loss, its parts and every metric: a number each, or a tensor of several on the host.

    A ValueError where nothing was evaluated: a mean over nothing would be NaN.
    """
    if mean_loss is None or batch_count == 0:
        raise ValueError(f"evaluation: expected at least one batch, got none; {EMPTY_DATA_ADVICE}")
    if not mean_loss.count.item():
        raise ValueError(
            "evaluation: expected at least one term of the loss, got none in all batches "
            f"({batch_count}): they have no samples, or only labels that are ignored"
        )
    columns = part_columns(list(mean_parts), list(metrics))
    scores: dict[str, Any] = {"loss": mean_loss.compute()}
    for column, mean_part in zip(columns, mean_parts.values(), strict=True):
        scores[column] = mean_part.compute()
    scores.update(metrics.compute())
    return {name: tree_map(plain_value, value) for name, value in scores.items()}


def plain_value(value: Any) -> Any:
    """One number as Python's; a tensor of several as a copy: a metric may go on in its memory."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else value.detach().to("cpu", copy=True)
    if isinstance(value, np.generic):
        return value.item()
    return value


def _in_eval_mode(step: Callable[..., Any], net: nn.Module) -> Callable[..., Any]:
    """`step` where BatchNorm does not move. For each batch anew: it may end with net.train()."""

    @torch.no_grad()
    def eval_step(*args: Any) -> Any:
        with eval_mode(net):
            return step(*args)

    return eval_step


def to_eval_record(result: Any, args: Args) -> EvalRecord:
    """What an evaluation step returned, as a record.

    An EvalRecord as it is; of (loss, outputs) the loss is the mean over the samples of the batch.
    """
    if isinstance(result, EvalRecord):
        return result
    if isinstance(result, tuple) and len(result) >= 2 and isinstance(result[0], Tensor):
        loss = result[0]
        count = torch.full((), batch_size(args), device=loss.device)
        return EvalRecord(loss=loss.detach(), count=count, outputs=result[1])
    raise TypeError(
        f"eval_step: expected an EvalRecord or (loss, outputs), got {type(result).__name__}"
    )


def find_labels(batch: Any) -> Any:
    """Where labels usually are: the last of a tuple, or under one of the usual names."""
    if isinstance(batch, dict):
        names = [name for name in LABEL_NAMES if name in batch]
        if len(names) == 1:
            return batch[names[0]]
        if names:
            raise ValueError(
                f"metrics: the labels may be any of {', '.join(map(repr, names))}. "
                f"Say which: Model(labels=lambda batch: batch[{names[0]!r}])"
            )
        raise ValueError(
            f"metrics: no labels among {sorted(batch)}. "
            "Say where they are: Model(labels=lambda batch: …)"
        )
    if isinstance(batch, tuple):
        return batch[-1]
    raise ValueError(
        f"metrics: no labels in a {type(batch).__name__}. "
        "Say where they are: Model(labels=lambda batch: …)"
    )


def to_host(value: Any) -> Any:
    """Every tensor in tuples, lists and dicts on the host; the structure stays."""
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, value)


def without_target(args: Args, *, targets: bool | None) -> Args:
    """A batch without its target: the last of several, or the labels of a dict.

    `targets` says whether there are any; None: only a dict may have labels.
    """
    if len(args) == 1 and isinstance(args[0], dict) and targets is not False:
        inputs = {name: value for name, value in args[0].items() if name not in LABEL_NAMES}
        return (inputs,)
    return args[:-1] if targets and len(args) > 1 else args
