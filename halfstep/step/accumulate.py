"""One micro-batch: forward, loss, scaled backward, and its sums in the open cycle.

A cycle is the `accumulate` micro-batches that end in one update. Where a loss is the mean of n
terms, a micro-batch adds its gradients G and its weight N:

    G += gradient of (loss · n / nominal · scale)        N += n / nominal

`nominal` is the n of the cycle's first micro-batch with terms. At the end of the cycle, in
update.py, G / N / scale is the gradient of the mean over all terms: what one large batch gives.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from halfstep.precision import Applied
from halfstep.precision.low_params import widen
from halfstep.step.batch_context import attach_batch
from halfstep.step.gradients import add_gradients_
from halfstep.step.loss_terms import Count
from halfstep.step.objective import Batch, BatchLoss, Objective, batch_size
from halfstep.step.options import StepOptions
from halfstep.step.plain_paths import ForwardPath
from halfstep.step.rollback import Buffers
from halfstep.step.state import NOTHING, Cycle


class MicroBatch(NamedTuple):
    """What one micro-batch reports of itself."""

    loss: Tensor  # its own, 0 if it has no terms
    parts: Mapping[str, Tensor] = NOTHING  # of its loss, by name
    counts: Mapping[str, tuple[Tensor, Tensor]] = NOTHING  # of the metrics: totals and counts
    terms: Tensor | None = None  # n, where micro-batches are weighted by it; 1 where losses add up


class OpenCycle(Protocol):
    """What a micro-batch is added to: a StepState, or the state of one lane."""

    cycle: Cycle
    scale: Tensor


class Accumulate:
    """Adds micro-batches to the open cycle of a StepState, or of a lane."""

    def __init__(
        self,
        objective: Objective,
        forward_path: ForwardPath,
        applied: Applied,
        params: list[Tensor],
        options: StepOptions,
        buffers: Buffers,
        *,
        in_lanes: bool = False,
    ) -> None:
        self.objective = objective
        self.forward_path = forward_path  # the objective as it is, or compiled
        self.applied = applied
        self.params = params
        self.options = options
        self.buffers = buffers

        # Whether the micro-batches of a cycle are weighted by their terms: all but an only one are.
        self.accumulates = options.accumulate > 1 or in_lanes
        self.scales_loss = applied.precision.loss_scale.is_active
        self.in_lanes = in_lanes
        self.sum_dtypes = [torch.promote_types(p.dtype, torch.float32) for p in params]
        self.has_complex_params = any(p.is_complex() for p in params)
        self.sens = options.sens
        if isinstance(self.sens, Tensor):
            self.sens = self.sens.to(applied.device)

        loss_dtype = applied.precision.output
        self.zero_loss = torch.zeros((), dtype=loss_dtype, device=applied.device)
        self.no_batch = MicroBatch(self.zero_loss)  # of a flush
        self.unit_seed = torch.ones((), dtype=loss_dtype, device=applied.device)

    def __call__(self, state: OpenCycle, batch: Batch) -> MicroBatch:
        """Adds one micro-batch to the open cycle. Returns what it reports."""
        cycle = state.cycle
        if cycle.micro == 0 and not self.in_lanes:  # the cycles of lanes are opened together
            self._open_cycle(cycle)
        parts: Mapping[str, Tensor] = NOTHING
        counts: Mapping[str, tuple[Tensor, Tensor]] = NOTHING
        terms: Tensor | None = None
        try:
            if batch_size(batch) == 0:
                loss_value = self._add_empty_batch(cycle)
                parts, counts = self._parts_of_empty_batch()
            else:
                # Forward. The loss comes in float32 or wider; `count` is n, or None if not needed.
                forward_and_loss = self.forward_path.forward_and_loss
                result = forward_and_loss(self.applied, batch, weighted=self.accumulates)
                loss = result.loss
                count = result.term_count
                parts, counts = self._look_at(batch, result)
                # Backward, and into the sums of the cycle.
                if not self.accumulates:
                    loss_value = self._add_only_batch(state, loss, count)
                elif self.objective.is_sum:
                    loss_value, terms = self._add_sum(state, loss)
                else:
                    loss_value, terms = self._add_mean(state, loss, count)
        except Exception as error:
            attach_batch(error, batch)  # for a message about the batch: engine/batch_errors.py
            raise
        cycle.micro += 1
        return MicroBatch(loss_value, parts, counts, terms)

    def _look_at(
        self, batch: Batch, result: BatchLoss
    ) -> tuple[Mapping[str, Tensor], Mapping[str, tuple[Tensor, Tensor]]]:
        """The parts of the loss, and what metrics count in this batch."""
        objective = self.objective
        if result.parts or objective.part_names != ():
            objective.check_parts(result.parts)
        counts: Mapping[str, tuple[Tensor, Tensor]] = NOTHING
        if objective.observer is not None:
            counts = objective.observer(batch, result)
        return result.parts, counts

    def _parts_of_empty_batch(
        self,
    ) -> tuple[Mapping[str, Tensor], Mapping[str, tuple[Tensor, Tensor]]]:
        """Zeros: a batch without rows adds nothing to any mean."""
        objective = self.objective
        zero = self.float64_zero()
        parts = dict.fromkeys(objective.part_names or (), zero)
        counts = {}
        if objective.observer is not None:
            counts = dict.fromkeys(objective.observer.names, (zero, zero))
        return parts, counts

    def _open_cycle(self, cycle: Cycle) -> None:
        """Starts from nothing, with a copy of the buffers to roll back to."""
        self.open_sums(cycle)
        if self.buffers and self.options.nonfinite != "ignore":
            cycle.buffers = self.buffers.copy(cycle.buffers)

    def open_sums(self, cycle: Cycle) -> None:
        """Starts the sums of a cycle from nothing."""
        zero = self.float64_zero() if self.accumulates else None
        cycle.grads = [None] * len(self.params)
        cycle.weight = zero
        cycle.nominal = zero
        cycle.loss = zero

    def _add_empty_batch(self, cycle: Cycle) -> Tensor:
        """A batch of 0 rows: no forward pass, no gradients, weight 0."""
        if cycle.weight is None:
            cycle.weight = self.float64_zero()
        if cycle.loss is None:
            cycle.loss = self.zero_loss
        return self.zero_loss

    def _add_only_batch(self, state: OpenCycle, loss: Tensor, count: Count | None) -> Tensor:
        """The only micro-batch of its cycle: weight 1, so G and the loss are taken as they are."""
        cycle = state.cycle
        cycle.loss = loss.detach() if loss.dim() == 0 else loss.detach().sum()
        cycle.grads = self._backward(state, loss, weight=None)

        # The weight only has to say whether there were terms: 0 if not.
        if isinstance(count, Tensor):
            cycle.weight = count.double()
        elif count == 0:
            cycle.weight = self.float64_zero()
        return cycle.loss

    def _add_sum(self, state: OpenCycle, loss: Tensor) -> tuple[Tensor, Tensor]:
        """A loss that is a sum: micro-batches add up as they are, and N stays 1."""
        cycle = state.cycle
        assert cycle.weight is not None
        assert cycle.loss is not None
        grads = self._backward(state, loss, weight=None)
        loss_value = loss.detach().sum().double()

        add_gradients_(cycle.grads, widen(grads, self.sum_dtypes))
        cycle.weight = torch.ones_like(cycle.weight)
        cycle.loss = cycle.loss + loss_value
        return loss_value.to(loss.dtype), cycle.weight

    def _add_mean(
        self, state: OpenCycle, loss: Tensor, count: Count | None
    ) -> tuple[Tensor, Tensor]:
        """A loss that is a mean over n terms: weight n / nominal. Returns its value, and n."""
        cycle = state.cycle
        assert count is not None
        assert cycle.weight is not None
        assert cycle.nominal is not None
        assert cycle.loss is not None

        # Weights are relative to the first n that is not 0, so that N is at least 1.
        if not isinstance(count, Tensor):
            count = torch.full_like(cycle.weight, count)
        n = count.double()
        has_terms = n > 0
        nominal = power_of_two_below(n) if self.in_lanes else n
        cycle.nominal = torch.where(cycle.nominal > 0, cycle.nominal, nominal)
        weight = n / torch.where(cycle.nominal > 0, cycle.nominal, 1)

        grads = self._backward(state, loss, weight)

        # A mean over no terms is 0/0 and must not reach the sums. torch's losses with ignored
        # targets are 0 here already: the objective divides their sum by at least 1.
        if not self.objective.ignores_targets:
            grads = [None if grad is None else _zero_unless(has_terms, grad) for grad in grads]
        loss_value = torch.where(has_terms, loss.detach().sum().double(), 0)

        add_gradients_(cycle.grads, widen(grads, self.sum_dtypes))
        cycle.weight = cycle.weight + weight
        cycle.loss = cycle.loss + loss_value * weight
        return loss_value.to(loss.dtype), n

    def _backward(
        self, state: OpenCycle, loss: Tensor, weight: Tensor | None
    ) -> list[Tensor | None]:
        """The gradient of loss · weight · sens · scale by each parameter; p.grad is left empty."""
        if not loss.requires_grad:
            raise ValueError(
                "the loss depends on no trainable parameter: "
                "check requires_grad, and that forward is not under no_grad"
            )
        trainable = [p for p in self.params if p.requires_grad]
        for p in trainable:
            p.grad = None

        # All frozen, and the loss depends on parameters of another optimizer: nothing to compute.
        if not trainable:
            return [None] * len(self.params)

        # Activation checkpointing repeats parts of forward here, and must find its precision.
        seed = self._backward_seed(state.scale, loss, weight)
        with self.applied.for_recompute():
            torch.autograd.backward(loss, seed, inputs=trainable)

        grads = [p.grad if p.requires_grad else None for p in self.params]
        for p in trainable:
            p.grad = None
        if self.has_complex_params:
            # Autograd may leave a conjugate to be computed later, which kernels do not take.
            grads = [None if grad is None else grad.resolve_conj() for grad in grads]
        return grads

    def _backward_seed(self, scale: Tensor, loss: Tensor, weight: Tensor | None) -> Tensor:
        """scale · weight · sens: starting backward from it is the same as scaling the loss."""
        seed: Any = self.sens
        if weight is not None:
            seed = weight * seed
        if self.scales_loss:
            seed = scale * seed

        if isinstance(seed, Tensor):
            return seed.to(loss.device, loss.dtype).expand_as(loss)
        if seed == 1.0 and loss.dim() == 0 and loss.dtype == self.unit_seed.dtype:
            return self.unit_seed
        return torch.full_like(loss, seed)

    def float64_zero(self) -> Tensor:
        return torch.zeros_like(self.zero_loss, dtype=torch.float64)


def power_of_two_below(n: Tensor) -> Tensor:
    """The largest power of two that is not above n; 0 of 0.

    Weights relative to it are between 1 and 2, and multiplying by it rounds nothing, so that sums
    over lanes do not depend on who has added what.
    """
    exponent = torch.frexp(n).exponent
    return torch.where(n > 0, torch.ldexp(torch.ones_like(n), exponent - 1), 0)


def _zero_unless(flag: Tensor, grad: Tensor) -> Tensor:
    """The gradient if the flag is set, else zeros. A sparse gradient keeps its indices."""
    if not grad.is_sparse:
        return torch.where(flag, grad, 0)
    values = grad._values()
    values.copy_(torch.where(flag, values, 0))
    return grad
