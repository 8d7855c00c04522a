"""The optimizer step as a transaction: all of it happens, or everything is as before the cycle.

`step` and `roll_back` are for a host that has decided; `step_unless` takes the decision as a flag
on the device. Learning rates are set by the caller.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor
from torch.optim import Optimizer

from halfstep.kernels.foreach import fused_step_in_pieces
from halfstep.precision.low_params__rounding import Widened
from halfstep.step import commit__ema as ema
from halfstep.step.commit__select import Buffers, Snapshot
from halfstep.step.optimizer import OptimizerKind, state_tensors
from halfstep.step.optimizer__rates import LearningRates
from halfstep.step.state import StepState


class Commit:
    """Moves parameters, optimizer state, weight average and Kahan residues, or restores buffers."""

    def __init__(
        self,
        optimizer: Optimizer,
        optimizer_kind: OptimizerKind,
        params: list[Tensor],
        buffers: Buffers,
        rates: LearningRates,
        ema_decay: float | None,
        fp32_update: Widened | None,
    ) -> None:
        self.optimizer = optimizer
        self.optimizer_kind = optimizer_kind
        self.params = params
        self.buffers = buffers
        self.rates = rates
        self.ema_decay = ema_decay
        self.fp32_update = fp32_update

        # A fused optimizer skips inside its kernel. That is not enough where 16-bit parameters are
        # updated as fp32 copies: rounding these back would still move the weights.
        self.optimizer_can_skip = optimizer_kind == "fused" and fp32_update is None

        # Fused kernels on smaller pieces: faster on the device, slower on the host. For captures.
        self.step_in_pieces = False

    def step(
        self,
        state: StepState,
        grads: Sequence[Tensor | None],
        found_inf: Tensor | None = None,
    ) -> None:
        """Runs the optimizer and moves the weight average.

        `found_inf`: a fused optimizer leaves the weights alone where it is 1.0.
        """
        with self._fp32_params(state):
            self._run_optimizer(grads, found_inf)
        if self.ema_decay is not None:
            ema.update_(state.ema, self.params, self.ema_decay)

    def roll_back(self, state: StepState) -> None:
        """Restores the buffers that forward has moved; nothing else has moved yet."""
        self.optimizer._opt_called = True  # type: ignore[attr-defined] # else an LR scheduler warns
        self.buffers.restore(state.cycle.buffers)

    def step_unless(
        self,
        skip: Tensor,
        state: StepState,
        grads: Sequence[Tensor | None],
        found_inf: Tensor | None = None,
    ) -> None:
        """Runs the optimizer, and takes everything back if the flag `skip` is set; no host read.

        `found_inf` is `skip` as 1.0 or 0.0, where the caller already has it.
        """
        # A fused optimizer leaves parameters and its state alone by itself. For others, copy all.
        if self.optimizer_can_skip:
            found_inf = skip.float() if found_inf is None else found_inf
            at_risk = state.ema
        else:
            optimizer_state = state_tensors(self.optimizer)
            at_risk = [*self.params, *optimizer_state, *state.ema, *state.residue]
        before = Snapshot.of([t.detach() for t in at_risk]) if at_risk else None

        self.step(state, grads, found_inf)

        if before is not None:
            before.restore_if(skip)
        self.buffers.restore(state.cycle.buffers, only_if=skip)

    def _run_optimizer(self, grads: Sequence[Tensor | None], found_inf: Tensor | None) -> None:
        """optimizer.step() on these gradients; p.grad is left empty."""
        for p, grad in zip(self.params, grads, strict=True):
            p.grad = grad
        # GradScaler's protocol: fused optimizers look for these two attributes.
        if found_inf is not None:
            self.optimizer.grad_scale = None  # type: ignore[attr-defined]
            self.optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        try:
            stepped = False
            if self.step_in_pieces and found_inf is not None:
                stepped = fused_step_in_pieces(self.optimizer, found_inf)
            if not stepped:
                self.optimizer.step()
        finally:
            if found_inf is not None:
                del self.optimizer.grad_scale  # type: ignore[attr-defined]
                del self.optimizer.found_inf  # type: ignore[attr-defined]
            for p in self.params:
                p.grad = None

    def _fp32_params(self, state: StepState) -> AbstractContextManager[None]:
        """Inside, 16-bit parameters are float32, where the rounding asks for it (Kahan, …)."""
        if self.fp32_update is None:
            return nullcontext()
        return self.fp32_update.wide(state.residue, state.updates)
