"""One micro-batch: forward, loss, backward, and its place in the open update cycle."""

from typing import Any

import torch
from torch import Tensor

from halfstep.precision import Applied, NoScale
from halfstep.precision.lowcopy import widen
from halfstep.step.count import Number
from halfstep.step.gradients import add_
from halfstep.step.objective import Batch, Objective, rows
from halfstep.step.options import StepOptions
from halfstep.step.select import Buffers
from halfstep.step.state import Cycle, StepState


def _where(flag: Tensor, g: Tensor) -> Tensor:
    """g where the flag is set, else 0; a sparse gradient keeps its indices."""
    if not g.is_sparse:
        return torch.where(flag, g, 0)
    g._values().copy_(torch.where(flag, g._values(), 0))
    return g


class Accumulate:
    """Adds a batch to the cycle: G += grad(loss · n/nominal · scale), N += n/nominal."""

    def __init__(
        self, objective: Objective, applied: Applied, params: list[Tensor], options: StepOptions, buffers: Buffers
    ) -> None:
        self.objective, self.applied, self.params, self.options = objective, applied, params, options
        self.buffers = buffers
        self.many = options.accumulate > 1
        self.scaled = not isinstance(applied.precision.loss_scale, NoScale)
        self.wide = [torch.promote_types(p.dtype, torch.float32) for p in params]
        sens = options.sens
        self.sens = sens.to(applied.device) if isinstance(sens, Tensor) else sens
        self.one = torch.ones((), dtype=applied.precision.output, device=applied.device)
        self.zero = torch.zeros((), dtype=applied.precision.output, device=applied.device)

    def __call__(self, state: StepState, batch: Batch) -> Tensor:
        """The batch's own loss (0 when it holds no terms); its gradients are in the cycle, rightly weighted."""
        cycle = state.cycle
        if cycle.micro == 0:
            self._open(cycle)
        if rows(batch) == 0:
            loss = self.zero
            cycle.weight = self._none() if cycle.weight is None else cycle.weight
            cycle.loss = loss if cycle.loss is None else cycle.loss
        else:
            mean, n = self.objective.run(self.applied, batch, weighted=self.many)
            loss = self._many(state, mean, n) if self.many else self._single(state, mean, n)
        cycle.micro += 1
        return loss

    def _open(self, cycle: Cycle) -> None:
        cycle.grads = [None] * len(self.params)
        cycle.weight = cycle.nominal = cycle.loss = self._none() if self.many else None
        if self.buffers and self.options.nonfinite != "ignore":
            cycle.buffers = self.buffers.copy(cycle.buffers)

    def _none(self) -> Tensor:
        return torch.zeros_like(self.zero, dtype=torch.float64)

    def _single(self, state: StepState, loss: Tensor, n: Number | None) -> Tensor:
        """The only micro-batch of its cycle has weight exactly 1; its n matters only when it is 0."""
        cycle = state.cycle
        cycle.loss = loss.detach() if loss.dim() == 0 else loss.detach().sum()
        cycle.grads = self._backward(state, loss, None)
        if isinstance(n, Tensor):
            cycle.weight = n.double()
        elif n == 0:
            cycle.weight = self._none()
        return cycle.loss

    def _many(self, state: StepState, loss: Tensor, n: Number | None) -> Tensor:
        cycle = state.cycle
        assert cycle.weight is not None
        assert cycle.nominal is not None
        assert cycle.loss is not None
        value = loss.detach().sum().double()
        if self.objective.sums:
            grads, cycle.weight, cycle.loss = (
                self._backward(state, loss, None),
                torch.ones_like(cycle.weight),
                cycle.loss + value,
            )
        else:
            assert n is not None
            count = n.double() if isinstance(n, Tensor) else torch.full_like(cycle.weight, n)
            cycle.nominal = torch.where(
                cycle.nominal > 0, cycle.nominal, count
            )  # the first n that is not 0, so that N >= 1
            weight = count / torch.where(cycle.nominal > 0, cycle.nominal, 1)
            grads = self._backward(state, loss, weight)
            if not self.objective.masked:  # a mean over no terms is 0/0
                grads = [None if g is None else _where(count > 0, g) for g in grads]
            value = torch.where(count > 0, value, 0)
            cycle.weight, cycle.loss = cycle.weight + weight, cycle.loss + value * weight
        add_(cycle.grads, widen(grads, self.wide))
        return value.to(loss.dtype)

    def _backward(self, state: StepState, loss: Tensor, weight: Tensor | None) -> list[Tensor | None]:
        """The gradient of loss · weight · sens · scale by each trained parameter; p.grad is left empty."""
        if not loss.requires_grad:
            advice = "check requires_grad, and that forward is not under no_grad"
            raise ValueError(f"the loss depends on no trainable parameter: {advice}")
        leaves = [p for p in self.params if p.requires_grad]
        for p in leaves:
            p.grad = None
        seed = self._seed(state, loss, weight)
        with self.applied.again():
            torch.autograd.backward(loss, seed, inputs=leaves)
        grads = [p.grad if p.requires_grad else None for p in self.params]
        for p in leaves:
            p.grad = None
        return grads

    def _seed(self, state: StepState, loss: Tensor, weight: Tensor | None) -> Tensor:
        """What backward starts from. Seeding with the scale is what multiplying the loss by it would do."""
        seed: Any = self.sens
        if weight is not None:
            seed = weight * seed
        if self.scaled:
            seed = state.scale * seed
        if not isinstance(seed, Tensor):
            one = seed == 1.0 and loss.dim() == 0 and loss.dtype == self.one.dtype
            return self.one if one else torch.full_like(loss, seed)
        return seed.to(loss.device, loss.dtype).expand_as(loss)
