"""The optimizer step as a transaction: all of it happens, or everything is as before the cycle.

`step` and `roll_back` are for a host that has decided; `step_unless` takes the decision as a flag
on the device. Learning rates are set by the caller. At the end of the file: the exponential moving
average of the weights (EMA), which only committed updates move.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.precision.low_params import Fp32Update
from halfstep.step.optimizer import LearningRates, OptimizerKind, state_tensors
from halfstep.step.rollback import Buffers, Snapshot
from halfstep.step.state import StepState


class Commit:
    """Moves parameters, optimizer state, weight average and Kahan residues, or restores buffers."""

    def __init__(
        self,
        optimizer: Optimizer,
        optimizer_kind: OptimizerKind,
        params: list[Tensor],
        buffers: Buffers,
        learning_rates: LearningRates,
        ema_decay: float | None,
        fp32_update: Fp32Update | None,
    ) -> None:
        self.optimizer = optimizer
        self.optimizer_kind = optimizer_kind
        self.params = params
        self.buffers = buffers
        self.learning_rates = learning_rates
        self.ema_decay = ema_decay
        self.fp32_update = fp32_update

        # A fused optimizer skips inside its kernel. That is not enough where 16-bit parameters are
        # updated as fp32 copies: rounding these back would still move the weights.
        self.optimizer_can_skip = optimizer_kind == "fused" and fp32_update is None

        # Fused kernels on smaller pieces: faster on the device, slower on the host. For captures.
        # The function returns False where it cannot do the step.
        self.fused_step_in_pieces: Callable[[Optimizer, Tensor], bool] | None = None
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
            update_averages_(state.ema, self.params, self.ema_decay)

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
            can_split = self.step_in_pieces and self.fused_step_in_pieces is not None
            if can_split and found_inf is not None:
                assert self.fused_step_in_pieces is not None
                stepped = self.fused_step_in_pieces(self.optimizer, found_inf)
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
        return self.fp32_update.fp32_params(state.residue, state.updates)


def start_averages(params: Sequence[Tensor]) -> list[Tensor]:
    """Copies of the weights, in float32 or wider: a 16-bit average would not move."""
    dtypes = [torch.promote_types(p.dtype, torch.float32) for p in params]
    return [p.detach().to(dtype, copy=True) for p, dtype in zip(params, dtypes, strict=True)]


def update_averages_(averages: list[Tensor], params: Sequence[Tensor], decay: float) -> None:
    """average ← decay · average + (1 − decay) · weight, in place."""
    weights = [p.detach().to(a.dtype) for a, p in zip(averages, params, strict=True)]
    torch._foreach_lerp_(averages, weights, 1 - decay)


@contextmanager
def averages_as_weights(
    params: Sequence[Tensor], averages: list[Tensor], storage: list[Tensor]
) -> Iterator[None]:
    """Inside, the parameters hold copies of the averages; afterwards their own memory again.

    `storage` is filled on first use and holds the copies: a captured evaluation finds them at the
    same address every time.
    """
    own_data = [p.data for p in params]
    if not storage:
        storage.extend(torch.empty_like(p, requires_grad=False) for p in params)
    for p, average, copy in zip(params, averages, storage, strict=True):
        p.data = copy.copy_(average)
    try:
        yield
    finally:
        for p, data in zip(params, own_data, strict=True):
            p.data = data
