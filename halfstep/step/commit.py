"""Committing an update or taking it back: decided by the host after one read, or on the device without any."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.optim import Optimizer

from halfstep.precision.rounding import Widened
from halfstep.step import ema, spread
from halfstep.step.optim import Kind, state_tensors
from halfstep.step.rates import Rates
from halfstep.step.select import Buffers, Snapshot
from halfstep.step.state import StepState


class Commit:
    """One optimizer step as a transaction over parameters, optimizer state, averages, residues and buffers."""

    def __init__(
        self,
        optimizer: Optimizer,
        kind: Kind,
        params: list[Tensor],
        buffers: Buffers,
        rates: Rates,
        decay: float | None,
        widened: Widened | None,
    ) -> None:
        self.optimizer, self.kind, self.params, self.buffers = optimizer, kind, params, buffers
        self.rates, self.decay, self.widened = rates, decay, widened
        self.spread = False  # fused kernels on smaller pieces: faster on the device, slower on the host; for captures

    def on_host(self, state: StepState, grads: Sequence[Tensor | None], *, skip: bool) -> None:
        """Steps, or puts the buffers back; nothing else has moved."""
        self.rates.set(state.updates)
        if skip:
            self.optimizer._opt_called = True  # type: ignore[attr-defined] # else an LR scheduler's step() would warn
            self.buffers.restore(state.cycle.buffers)
            return
        with self._wide(state):
            self._step(grads)
        if self.decay is not None:
            ema.move_(state.ema, self.params, self.decay)

    def on_device(self, state: StepState, grads: Sequence[Tensor | None], skip: Tensor) -> None:
        """Steps, then keeps new or old by the flag. A fused optimizer takes the flag into its kernel instead."""
        self.rates.set(state.updates)
        fused = self.kind == "fused" and self.widened is None
        self.flagged(state, grads, skip, skip.float() if fused else None)

    def flagged(self, state: StepState, grads: Sequence[Tensor | None], skip: Tensor, found: Tensor | None) -> None:
        """on_device at the rates that are set; `found`, for a fused optimizer, is the flag as 1.0 or 0.0."""
        fused = found is not None
        kept = state.ema if fused else [*self.params, *state_tensors(self.optimizer), *state.ema, *state.residue]
        old = Snapshot.of([t.detach() for t in kept]) if kept else None
        with self._wide(state):
            self._step(grads, found)
        if self.decay is not None:
            ema.move_(state.ema, self.params, self.decay)
        if old is not None:
            old.keep_old_where(skip)
        self.buffers.restore(state.cycle.buffers, where=skip)

    def _step(self, grads: Sequence[Tensor | None], found: Tensor | None = None) -> None:
        """optimizer.step() on these gradients; `found` goes to optimizers that skip by themselves, torch's protocol."""
        for p, g in zip(self.params, grads, strict=True):
            p.grad = g
        if found is not None:
            self.optimizer.grad_scale, self.optimizer.found_inf = None, found  # type: ignore[attr-defined]
        try:
            if not (self.spread and found is not None and spread.step(self.optimizer, found)):
                self.optimizer.step()
        finally:
            if found is not None:
                del self.optimizer.grad_scale, self.optimizer.found_inf  # type: ignore[attr-defined]
            for p in self.params:
                p.grad = None

    def _wide(self, state: StepState) -> AbstractContextManager[None]:
        return nullcontext() if self.widened is None else self.widened.wide(state.residue, state.updates)
