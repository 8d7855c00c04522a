"""From a batch to its loss and the number of terms that loss averages."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from halfstep.precision import Applied
from halfstep.step.loss_terms import Count, loss_terms, hugging_face_count

Batch = tuple[Any, ...]
Run = Callable[..., tuple[Tensor, Count | None]]


class Objective:
    """Network and loss as one function of a batch."""

    def __init__(
        self,
        net: nn.Module,
        loss: Any,
        forward: Callable[..., Any] | None,
        count: Callable[[Any], Count] | None,
    ) -> None:
        if loss is not None and not callable(loss):
            expected = "a loss module, a function, or None when the network returns its loss"
            raise TypeError(f"loss: expected {expected}, received {loss!r}")
        self.net, self.loss, self.count_fn = net, loss, count
        self.forward = forward or _by_convention(loss)
        self.terms = loss_terms(loss)
        self.hf_count_fn = (
            hugging_face_count(net) if loss is None and forward is None and count is None else None
        )
        self.run: Run = (
            self.__call__
        )  # what a training batch goes through: this, or its compiled form

    @property
    def can_weight(self) -> bool:
        """Whether micro-batches of different sizes can be weighted."""
        return self.terms.is_known or self.count_fn is not None or self.hf_count_fn is not None

    @property
    def is_sum(self) -> bool:
        """The loss is a sum, not a mean: micro-batches add up as they are."""
        return self.count_fn is None and self.terms.is_known and self.terms.count is None

    @property
    def ignores_targets(self) -> bool:
        """One of torch's losses that skip ignored targets: all ignored, its mean is 0/0 and its gradients are 0."""
        return self.count_fn is None and self.terms.sum_loss is not None

    @property
    def count_may_be_zero(self) -> bool:
        """n may be 0 in a way that loss and gradients do not tell, so that even a cycle of one needs it."""
        zero_weights = self.ignores_targets and self.terms.has_class_weights
        return self.count_fn is not None or self.hf_count_fn is not None or zero_weights

    @property
    def is_known_loss(self) -> bool:
        """The loss is torch's, or the network's own: nothing of it may read weights outside their forward."""
        return self.loss is None or self.terms.is_known

    def __call__(
        self, applied: Applied, batch: Batch, *, weighted: bool
    ) -> tuple[Tensor, Count | None]:
        """The loss in float32 or wider, and its n; n is None where it need not be known.

        `weighted` asks for n always, and for a loss that is 0, not 0/0, when n is 0 and torch knows the sum form.
        """
        with applied:
            out = applied.unrounded(self.forward(self.net, *batch))
        loss, n = self.loss_and_count(out, applied.precision.output, weighted=weighted)
        return loss, self.count_from_batch(batch, n, weighted=weighted)

    def loss_and_count(
        self, out: Any, least: torch.dtype, *, weighted: bool
    ) -> tuple[Tensor, Count | None]:
        """The loss of what forward returned, and its n where the loss's own arguments tell it."""
        taken = () if self.loss is None else loss_arguments(out, least)
        asked = (
            (weighted or self.count_may_be_zero)
            and self.count_fn is None
            and self.terms.count is not None
        )
        n = self.terms.count(*taken) if asked and self.terms.count is not None else None
        if weighted and self.ignores_targets:
            assert self.terms.sum_loss is not None
            above = torch.where(n > 0, n, 1) if isinstance(n, Tensor) else n
            return at_least_fp32(self.terms.sum_loss(*taken), least) / above, n
        return at_least_fp32(
            find_loss(out) if self.loss is None else _tensor(self.loss(*taken)), least
        ), n

    def count_from_batch(self, batch: Batch, n: Count | None, *, weighted: bool) -> Count | None:
        """n, from the batch where that is what tells it."""
        asked = weighted or self.count_may_be_zero
        return (
            self.count_terms(batch, ())
            if asked and (self.count_fn is not None or self.hf_count_fn is not None)
            else n
        )

    def count_terms(self, batch: Batch, arguments: tuple[Any, ...]) -> Count | None:
        """How many terms the loss of this batch averages; None when nobody knows."""
        whole = batch[0] if len(batch) == 1 else batch
        if self.count_fn is not None:
            return self.count_fn(whole)
        if self.hf_count_fn is not None:
            return self.hf_count_fn(whole)
        return self.terms.count(*arguments) if self.terms.count is not None else None


def _by_convention(loss: Any) -> Callable[..., Any]:
    """(net, *batch) → what the loss takes: the last item is the target; without a loss, all is the network's."""

    def with_target(net: nn.Module, *batch: Any) -> tuple[Any, ...]:
        if len(batch) < 2:
            came = f"one {type(batch[0]).__name__}" if batch else "nothing"
            raise ValueError(
                f"step: expected inputs and a target, received {came}; "
                "say how to use it, for instance forward=lambda net, b: (net(b['x']), b['y'])"
            )
        return net(*batch[:-1]), batch[-1]

    def own(net: nn.Module, *batch: Any) -> Any:
        return net(**batch[0]) if len(batch) == 1 and isinstance(batch[0], dict) else net(*batch)

    return own if loss is None else with_target


def loss_arguments(out: Any, least: torch.dtype) -> tuple[Any, ...]:
    """What a forward returned, as the arguments of the loss, in float32 or wider."""
    if not isinstance(out, tuple):
        raise TypeError(
            f"forward: expected a tuple of the loss's arguments, received {type(out).__name__}; "
            "return (outputs, target), or give loss=None and return the loss"
        )
    return tuple(at_least_fp32(a, least) for a in out)


def find_loss(out: Any) -> Tensor:
    """The loss inside what a network returned: a tensor, `.loss`, ["loss"], or the first of a tuple."""
    loss = out
    if isinstance(out, dict):
        loss = out.get("loss")
    elif not isinstance(out, Tensor):
        loss = getattr(out, "loss", out[0] if isinstance(out, (tuple, list)) and out else None)
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"loss=None: expected the network to return its loss (a tensor, .loss or ['loss']), received "
            f"{type(out).__name__} without one; give loss=, or put the labels in the batch"
        )
    return loss


def _tensor(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        parts = " with the loss first" if isinstance(loss, (tuple, list)) else ""
        raise TypeError(
            f"loss: expected it to return a tensor, the loss, received {type(loss).__name__}{parts}; return the tensor "
            "alone, not .item(): what else is worth knowing goes into metrics="
        )
    return loss


def at_least_fp32(value: Any, least: torch.dtype) -> Any:
    """Floating tensors in `least` (float32, or float64) or wider: a loss in half loses what the network kept."""
    if isinstance(value, Tensor):
        narrow = (
            value.is_floating_point() and torch.finfo(value.dtype).bits < torch.finfo(least).bits
        )
        return value.to(least) if narrow else value
    return tree_map(
        lambda leaf: at_least_fp32(leaf, least) if isinstance(leaf, Tensor) else leaf, value
    )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor on `device`, structure kept."""
    if all(isinstance(x, Tensor) and x.device == device for x in batch):
        return batch
    plain = tuple(
        dict(x) if isinstance(x, Mapping) else x for x in batch
    )  # Hugging Face's batches are mappings
    moved: Batch = tree_map(
        lambda x: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x, plain
    )
    return moved


def batch_size(batch: Batch) -> int:
    """The samples of a batch: the rows of its first tensor, 1 when it has none."""
    first = batch[0] if batch and isinstance(batch[0], Tensor) else None
    if first is None:
        first = next((x for x in tree_leaves(batch) if isinstance(x, Tensor)), None)
    return first.shape[0] if first is not None and first.dim() > 0 else 1
