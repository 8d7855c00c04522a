"""From a batch to its loss, in float32 or wider, and the number of terms that the loss averages."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from halfstep.precision import Applied
from halfstep.step.batch_context import attach_loss_arguments
from halfstep.step.loss_parts import beside_loss, check_part_names, split_loss
from halfstep.step.loss_shapes import RefuseRepeatedTargets, check_target_shape, loss_name
from halfstep.step.loss_terms import Count, hugging_face_count, loss_terms
from halfstep.utils.text import dtype_name

Batch = tuple[Any, ...]

# Names of the parameter of a loss that is its target.
TARGET_PARAMETERS = ("target", "targets", "label", "labels", "y", "y_true")

# Shapes that a loss of the user's own was checked with are remembered, so many at most.
MAX_SHAPES_CHECKED = 256

# In place of a target: the loss has three or more arguments, and none is called a target.
AMBIGUOUS_TARGET = object()


class BatchLoss(NamedTuple):
    """The loss of a batch, in float32 or wider, and what came with it."""

    loss: Tensor
    term_count: Count | None  # how many terms the loss averages; None where that need not be known
    parts: dict[str, Tensor]  # other numbers that were returned with the loss, by name
    # For an observer, without history; both None where there is none.
    outputs: Any = None
    target: Any = None


class Observer(Protocol):
    """Looks at every training batch: metrics on training data."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def __call__(self, batch: Batch, result: BatchLoss) -> dict[str, tuple[Tensor, Tensor]]: ...


class Objective:
    """Network and loss as one function of a batch."""

    def __init__(
        self,
        net: nn.Module,
        loss: Any,
        forward: Callable[..., Any] | None,
        count_fn: Callable[[Any], Count] | None,
    ) -> None:
        if loss is not None and not callable(loss):
            expected = "a loss module, a function, or None when the network returns its loss"
            raise TypeError(f"loss: expected {expected}, received {loss!r}")
        self.net = net
        self.loss = loss
        self.count_fn = count_fn
        # By convention the last item of a batch is the target; without a loss all of it goes in.
        self.forward = forward or (whole_batch if loss is None else inputs_and_target)
        self.terms = loss_terms(loss)
        self.hf_count_fn: Callable[[Any], Count] | None = None
        if loss is None and forward is None and count_fn is None:
            self.hf_count_fn = hugging_face_count(net)

        # The count comes from the batch, by a function, or from the loss's own arguments.
        self.counts_batch = count_fn is not None or self.hf_count_fn is not None

        # Whether micro-batches of different sizes can be weighted.
        self.can_weight = self.terms.is_known or self.counts_batch

        # The loss is a sum, not a mean: micro-batches add up as they are.
        self.is_sum = count_fn is None and self.terms.is_known and self.terms.count is None

        # One of torch's losses that skip ignored targets. With all targets ignored its mean is 0/0
        # and its gradients are 0.
        self.ignores_targets = count_fn is None and self.terms.sum_loss is not None

        # The count may be 0 in a way that neither loss nor gradients show, so that even a cycle of
        # one batch has to know it.
        has_zero_weights = self.ignores_targets and self.terms.has_class_weights
        self.count_may_be_zero = self.counts_batch or has_zero_weights

        # The loss is torch's or the network's own: it cannot read weights outside their forward.
        self.is_known_loss = loss is None or self.terms.is_known

        # Whether something may be returned beside the loss.
        self.may_have_parts = not self.terms.is_known
        # The names of the parts, from the first batch on: a table of records has a column for each.
        self.part_names: tuple[str, ...] | None = None

        # A loss of the user's own is watched at the first batch of each shape. A compiled one would
        # be compiled twice for that.
        is_compiled = hasattr(loss, "_torchdynamo_orig_callable") or hasattr(loss, "_orig_mod")
        self._watches_loss = loss is not None and not self.terms.is_known and not is_compiled
        self._shapes_checked: set[tuple[Any, ...]] = set()

        self._target_position = _find_target_parameter(loss)
        self._observer: Observer | None = None
        self.keeps_outputs = False  # a plain attribute: compiled code reads it

    @property
    def parts(self) -> tuple[Any, ...]:
        """The modules and functions that a step calls."""
        return self.net, self.loss, self.forward, self.count_fn

    @property
    def observer(self) -> Observer | None:
        """What looks at the outputs of every training batch."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer
        self.keeps_outputs = observer is not None

    def __call__(self, applied: Applied, batch: Batch, *, weighted: bool) -> BatchLoss:
        """The loss in float32 or wider, and its count n; None where n need not be known.

        `weighted` asks for n always, and for a loss that is 0 instead of 0/0 when n is 0 and torch
        has the loss as a sum.
        """
        with applied:
            out = applied.unrounded_outputs(self.forward(self.net, *batch))
        try:
            result = self.batch_loss(out, applied.precision.output, weighted=weighted)
        except Exception as error:
            attach_loss_arguments(error, self.loss, out)
            raise
        return self.add_count(result, batch, weighted=weighted)

    def batch_loss(self, out: Any, min_dtype: torch.dtype, *, weighted: bool) -> BatchLoss:
        """The loss of what forward returned, and n where the loss's own arguments give it."""
        arguments: tuple[Any, ...] = ()
        if self.loss is not None:
            arguments = self.loss_arguments(out, min_dtype)

        count = None
        needs_count = weighted or self.count_may_be_zero
        if needs_count and self.count_fn is None and self.terms.count is not None:
            count = self.terms.count(*arguments)

        if weighted and self.ignores_targets:
            assert self.terms.sum_loss is not None
            assert count is not None
            divisor = count
            if isinstance(count, Tensor):
                divisor = torch.where(count > 0, count, 1)
            loss = self.terms.sum_loss(*arguments)
            result = self.split(loss, arguments, min_dtype, with_outputs=self.keeps_outputs)
            return result._replace(loss=result.loss / divisor, term_count=count)

        loss = out if self.loss is None else self.call_loss(arguments)
        result = self.split(loss, arguments, min_dtype, with_outputs=self.keeps_outputs)
        return result._replace(term_count=count)

    def loss_arguments(self, out: Any, min_dtype: torch.dtype) -> tuple[Any, ...]:
        """What forward returned, as the arguments of the loss, in float32 or wider.

        torch's losses get the .logits of a Hugging Face output, and outputs and target of one shape
        where they compare them element by element.
        """
        arguments = check_loss_arguments(out)
        if self.terms.is_known and arguments:
            arguments = (_scores(self.loss, arguments[0]), *arguments[1:])
        arguments = tuple(at_least_fp32(argument, min_dtype) for argument in arguments)
        if self.terms.is_elementwise:
            check_target_shape(self.loss, arguments)
        return arguments

    def call_loss(self, arguments: tuple[Any, ...]) -> Any:
        """What the loss returns. One of the user's own is watched for targets that torch repeats.

        Programs and graphs do without: the first batch of each shape has run before them.
        """
        if not self._watches_loss or torch.compiler.is_compiling():
            return self.loss(*arguments)
        shapes = tuple([getattr(argument, "shape", None) for argument in arguments])
        if shapes in self._shapes_checked or len(self._shapes_checked) >= MAX_SHAPES_CHECKED:
            return self.loss(*arguments)
        with RefuseRepeatedTargets():
            returned = self.loss(*arguments)
        self._shapes_checked.add(shapes)
        return returned

    def split(
        self,
        returned: Any,
        arguments: tuple[Any, ...],
        min_dtype: torch.dtype,
        *,
        with_outputs: bool,
    ) -> BatchLoss:
        """What the loss (or a network with its own) returned, in `min_dtype` or wider.

        All but the loss itself is without history.
        """
        if self.loss is None:
            loss: Any = find_loss(returned)
            parts, outputs = beside_loss(returned)
        else:
            loss, parts, outputs = split_loss(returned)
            if outputs is None:
                outputs = arguments[0]
        loss = at_least_fp32(check_loss(loss), min_dtype)
        parts = {name: at_least_fp32(part.detach(), min_dtype) for name, part in parts.items()}
        if not with_outputs:
            return BatchLoss(loss, None, parts)

        # What metrics are computed from.
        target = None
        if self.loss is not None:
            target = _detach(self.find_target(arguments))
        outputs = at_least_fp32(_detach(outputs), min_dtype)
        return BatchLoss(loss, None, parts, outputs, target)

    def find_target(self, arguments: tuple[Any, ...]) -> Any:
        """The target among the arguments of the loss: the second of two, or the one of that name.

        None where there is only one.
        """
        if len(arguments) <= 2:
            return arguments[1] if len(arguments) == 2 else None
        if self._target_position is None or self._target_position >= len(arguments):
            return AMBIGUOUS_TARGET
        return arguments[self._target_position]

    def check_parts(self, parts: Mapping[str, Tensor]) -> None:
        """Refuses parts of other names than those of the first batch."""
        names = tuple(parts)
        if self.part_names is None:
            check_part_names(names)
            self.part_names = names
        if names != self.part_names:
            raise ValueError(
                f"loss: expected the parts {_list_names(self.part_names)} with every batch, as the "
                f"first one had, received {_list_names(names)}; return all of them every time, in "
                "one order, with torch.zeros_like(loss) for a part that is switched off"
            )

    def add_count(self, result: BatchLoss, batch: Batch, *, weighted: bool) -> BatchLoss:
        """The result, with the count that a function of the batch gives, where there is one."""
        if self.counts_batch and (weighted or self.count_may_be_zero):
            return result._replace(term_count=self.count_terms(batch, ()))
        return result

    def count_terms(self, batch: Batch, arguments: tuple[Any, ...]) -> Count | None:
        """How many terms the loss of this batch averages; None when nobody knows."""
        batch_value = batch[0] if len(batch) == 1 else batch
        if self.count_fn is not None:
            return self.count_fn(batch_value)
        if self.hf_count_fn is not None:
            return self.hf_count_fn(batch_value)
        if self.terms.count is not None:
            return self.terms.count(*arguments)
        return None


def inputs_and_target(net: nn.Module, *batch: Any) -> tuple[Any, ...]:
    """The arguments of the loss: the last item of the batch is the target."""
    if len(batch) < 2:
        received = f"one {type(batch[0]).__name__}" if batch else "nothing"
        raise ValueError(
            f"step: expected inputs and a target, received {received}; "
            f"say how to use it, for instance {_forward_line(net, batch)}"
        )
    return net(*batch[:-1]), batch[-1]


def whole_batch(net: nn.Module, *batch: Any) -> Any:
    """What a network with its own loss returns for the whole batch."""
    if len(batch) == 1 and isinstance(batch[0], dict):
        return net(**batch[0])
    return net(*batch)


def _forward_line(net: nn.Module, batch: Batch) -> str:
    """A forward= for a batch that is one dict, with the names that it has."""
    names = list(batch[0]) if batch and isinstance(batch[0], dict) else ["x", "y"]
    targets = [name for name in names if name in TARGET_PARAMETERS]
    target = (targets or names[-1:] or ["y"])[0]
    inputs = [name for name in names if name != target] or ["x"]
    # A network that names its inputs gets them by name, as those of Hugging Face do.
    arguments = f"b[{inputs[0]!r}]"
    if set(inputs) <= set(inspect.signature(net.forward).parameters):
        arguments = ", ".join(f"{name}=b[{name!r}]" for name in inputs)
    return f"forward=lambda net, b: (net({arguments}), b[{target!r}])"


def check_loss_arguments(out: Any) -> tuple[Any, ...]:
    """What forward returned, if it is a tuple: the arguments of the loss."""
    if not isinstance(out, tuple):
        raise TypeError(
            f"forward: expected a tuple of the loss's arguments, received {type(out).__name__}; "
            "return (outputs, target), or give loss=None and return the loss"
        )
    return out


def _scores(loss: Any, outputs: Any) -> Any:
    """The tensor among a network's outputs that a loss of torch takes."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if isinstance(outputs, dict) and logits is None:
        logits = outputs.get("logits")
    if isinstance(logits, Tensor):
        return logits
    received = type(outputs).__name__
    part = "net(x)[0]"
    if isinstance(outputs, dict):
        received = f"a dict of {', '.join(map(repr, outputs)) or 'nothing'}"
        part = f"net(x)[{next(iter(outputs), 'logits')!r}]"
    raise TypeError(
        f"{loss_name(loss)}: expected the network to return a tensor, or .logits, received "
        f"{received}; say which part of it, for instance forward=lambda net, x, y: ({part}, y)"
    )


def find_loss(out: Any) -> Tensor:
    """The loss in what a network returned: a tensor, `.loss`, ["loss"], or a tuple's first."""
    loss = out
    if isinstance(out, dict):
        loss = out.get("loss")
    elif not isinstance(out, Tensor):
        first_item = out[0] if isinstance(out, (tuple, list)) and out else None
        loss = getattr(out, "loss", first_item)
    if not isinstance(loss, Tensor):
        advice = "give loss=, or put the labels in the batch"
        received = f"{type(out).__name__} without one"
        if isinstance(out, dict) and loss is None:
            received = f"a dict of {', '.join(map(repr, out)) or 'nothing'} without 'loss'"
            advice += "; where the network returns the parts of its loss, add them up in forward="
        raise TypeError(
            "loss=None: expected the network to return its loss (a tensor, .loss or ['loss']), "
            f"received {received}; {advice}"
        )
    if loss is not out and isinstance(out, (tuple, list)) and loss.numel() > 1:
        _refuse_loss_behind_outputs(out)
    return loss


def _refuse_loss_behind_outputs(out: Sequence[Any]) -> None:
    """A ValueError where (outputs, loss) came: the sum of the outputs would be minimized."""
    for position, item in enumerate(out[1:], 1):
        if isinstance(item, Tensor) and item.dim() == 0 and item.is_floating_point():
            raise ValueError(
                "loss=None: expected the network to return its loss first, received a tensor of "
                f"shape {list(out[0].shape)} first and one number at position {position}; write "
                f"forward=lambda net, *batch: net(*batch)[{position}], or return the sum of the "
                "first where it is the loss of each sample"
            )


def check_loss(loss: Any) -> Tensor:
    """The loss, if it is a tensor of real numbers."""
    if not isinstance(loss, Tensor):
        raise TypeError(
            "loss: expected it to return a tensor, the loss, received "
            f"{type(loss).__name__}; return the tensor, not .item(), or a dict with it as 'loss' "
            "and with other numbers to record"
        )
    if loss.is_complex():
        raise TypeError(
            f"loss: expected a tensor of real numbers, received {dtype_name(loss.dtype)}, which "
            "nothing can minimize; return a real number of it, for instance loss.abs() or loss.real"
        )
    return loss


def _find_target_parameter(loss: Any) -> int | None:
    """The position of the parameter of a loss that is called a target; None where none is."""
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        names = list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # no loss, or a function of C
        return None
    positions = [i for i, name in enumerate(names) if name in TARGET_PARAMETERS]
    return positions[0] if len(positions) == 1 else None


def _detach(value: Any) -> Any:
    """Every tensor in a tree without its history."""
    if isinstance(value, Tensor):
        return value.detach()
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)


def _list_names(names: tuple[str, ...]) -> str:
    return ", ".join(map(repr, names)) or "none"


def at_least_fp32(value: Any, min_dtype: torch.dtype) -> Any:
    """Floating tensors in `min_dtype` (float32 or float64) or wider.

    A loss computed in half would lose what the network kept.
    """
    if not isinstance(value, Tensor):
        return tree_map(
            lambda leaf: at_least_fp32(leaf, min_dtype) if isinstance(leaf, Tensor) else leaf,
            value,
        )
    if not value.is_floating_point():
        return value
    if torch.finfo(value.dtype).bits < torch.finfo(min_dtype).bits:
        return value.to(min_dtype)
    return value


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor on `device`; its structure stays."""
    if all(isinstance(x, Tensor) and x.device == device for x in batch):
        return batch
    # Hugging Face's batches are mappings, which tree_map would take for leaves.
    plain = tuple(dict(x) if isinstance(x, Mapping) else x for x in batch)
    on_device: Batch = tree_map(
        lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, plain
    )
    return on_device


def batch_size(batch: Batch) -> int:
    """The samples of a batch: the rows of its first tensor that has rows, 1 without one."""
    if batch and isinstance(batch[0], Tensor) and batch[0].dim() > 0:
        return batch[0].shape[0]
    with_rows = (x for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim() > 0)
    first = next(with_rows, None)
    return 1 if first is None else first.shape[0]
