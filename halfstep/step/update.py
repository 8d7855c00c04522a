"""The end of a cycle: unscale, average, check, clip, then commit all of the update or none of it.

The same recipe in two forms. `on_host` reads the overflow flag and decides with `if`. `on_device`
reads nothing: each `if` becomes a flag and a torch.where, so that a CUDA graph can hold it.

`grad_indices` are the positions of the parameters that have a gradient in this cycle.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep.precision import Precision
from halfstep.precision.loss_scale import ScaleState, inverse_scale
from halfstep.precision.low_params import widen
from halfstep.step import gradients
from halfstep.step.commit import Commit
from halfstep.step.options import StepOptions
from halfstep.step.plain_paths import FusedPath
from halfstep.step.state import Cycle, HostReads, RecordTarget, StepState, UpdateResult


class UnscaledGrads(NamedTuple):
    """A cycle's gradients after unscaling and averaging, before clipping."""

    indices: list[int]  # the parameter that each gradient belongs to
    tensors: list[Tensor]
    values: list[Tensor]  # their memory: other tensors where these are sparse or complex
    overflow: Tensor  # 1.0 if an element is inf or NaN, else 0.0
    norms: Tensor  # of each gradient
    total_norm: Tensor
    nonfinite: Tensor | None  # of each gradient, whether an element is; None if not asked for


class Update:
    """Turns the gradients of a cycle into one optimizer step, or rolls everything back."""

    def __init__(
        self,
        params: list[Tensor],
        precision: Precision,
        options: StepOptions,
        commit: Commit,
        host_reads: HostReads,
        *,
        is_sum: bool,
        ignores_targets: bool,
        in_lanes: bool = False,
    ) -> None:
        self.params = params
        self.options = options
        self.commit = commit
        self.host_reads = host_reads
        self.loss_scale = precision.loss_scale
        self.loss_dtype = precision.output
        self.ignores_targets = ignores_targets  # a loss that is 0/0 when it ignores every target

        # Whether cycles hold sums that are weighted, as accumulate.py says.
        self.accumulates = options.accumulate > 1 or in_lanes
        self.averages = self.accumulates and not is_sum
        self.scales_loss = self.loss_scale.is_active
        self.clips = bool(options.clip_norm or options.clip_value)
        self.edits_grads = self.scales_loss or self.accumulates or self.clips
        self.wide_dtypes = [torch.promote_types(p.dtype, torch.float32) for p in params]

        # Constants on the device, so that no update has to copy them there.
        self.device = params[0].device
        self.zero = torch.zeros((), device=self.device)
        self.one = torch.ones((), device=self.device)
        self.true = self.one.bool()
        self.false = self.zero.bool()
        self._index_tensors: dict[tuple[int, ...], Tensor] = {}

        # Cycles that have ended, updated or not: nonfinite="raise" notes which one it stopped at.
        self.cycles_ended = torch.zeros((), dtype=torch.int64, device=self.device)

        # on_device in few kernels, for captured steps; None without the folder step/fast.
        self.fused_update: FusedPath | None = None
        self._use_fused_kernels = False

    def on_host(self, state: StepState, grad_indices: list[int]) -> UpdateResult:
        """Ends the cycle, decided by the host: one read of the flag, one of N where it may be 0."""
        if self.fused_update is not None:
            self.fused_update.remember(state.cycle, grad_indices)

        # Unscale, average, check.
        on_cpu = self.device.type == "cpu"
        grads = self._unscale_and_check(state, grad_indices, reads_are_free=on_cpu)
        scale_used = state.scale.clone() if self.scales_loss else state.scale
        self.cycles_ended += 1

        # Decide. A cycle without terms is dropped and not counted: neither an update nor a skip. So
        # are one whose loss reached no parameter, whose loss is recorded as it is, and every cycle
        # after nonfinite="raise" has halted the device, until the host has raised.
        is_empty = self._read_has_no_terms(state.cycle, grads.total_norm)
        drop = is_empty or not grad_indices
        overflowed = False
        if not drop:
            overflowed, drop = self._read_overflow_and_halt(state, grads.overflow)
        skipped = overflowed and not drop
        updated = not (skipped or drop)

        # Clip and commit, or roll back. The optimizer gets the rate of the update to come in any
        # case: the record shows it.
        self.commit.learning_rates.set(state.updates)
        if updated:
            self._clip(grads)
            self.commit.step(state, self._optimizer_grads(grads))
        else:
            self.commit.roll_back(state)

        # Count, and note which parameters overflowed: by element, since a large finite gradient
        # may have an infinite norm.
        if updated:
            state.updates += 1
            state.streak.zero_()
        if skipped:
            state.skips += 1
            state.streak += 1
            nonfinite = torch.stack([~torch.isfinite(value).all() for value in grads.values])
            state.bad.copy_(self._for_all_params(nonfinite, grad_indices))

        # Next scale, by the rule of the loss scale.
        if self.scales_loss and not drop:
            scale_state = ScaleState(state.scale, state.growth)
            next_state = self.loss_scale.next(scale_state, grads.overflow)
            state.scale.copy_(next_state.scale)
            state.growth.copy_(next_state.growth)

        return UpdateResult(
            lr=self.commit.learning_rates.current(),
            cycle_loss=self._cycle_loss(state.cycle, self.true if is_empty else None),
            grad_norm=grads.total_norm,
            scale=scale_used,
            skipped=self.true if skipped else self.false,
            updated=self.true if updated else self.false,
        )

    def on_device(
        self,
        state: StepState,
        grad_indices: list[int],
        record_target: RecordTarget | None = None,
    ) -> UpdateResult:
        """Ends the cycle, decided by the device: on_host with flags, without a host read.

        The fused kernels also write the record, into `record_target`; the result says if they did.
        """
        if self.fused_update is not None:
            self.fused_update.remember(state.cycle, grad_indices)
            if self.use_fused_kernels and self.fused_update.fits(state, grad_indices):
                return self.fused_update(state, grad_indices, record_target)

        # Unscale, average, check.
        grads = self._unscale_and_check(state, grad_indices, reads_are_free=False, checks_each=True)
        scale_used = state.scale.clone()
        self.cycles_ended += 1

        # Decide. A cycle without terms is dropped and not counted: neither an update nor a skip. So
        # is every cycle after nonfinite="raise" has halted the device, until the host has raised.
        empty = self._has_no_terms(state.cycle, grads.total_norm)
        drop = state.halted > 0
        if empty is not None:
            drop = drop | empty
        overflow = grads.overflow > 0
        roll_back = overflow | drop
        skipped = overflow & ~drop
        updated = ~roll_back

        # Clip and commit, or roll back. Gradients that are not finite are clipped too, which does
        # no harm: the roll-back takes everything back.
        self.commit.learning_rates.set(state.updates)
        self._clip(grads)
        self.commit.step_unless(roll_back, state, self._optimizer_grads(grads))

        # Count, and note which parameters overflowed: by element, as on_host does.
        state.updates += updated
        state.skips += skipped
        streak = (state.streak + 1) * overflow
        state.streak.copy_(torch.where(drop, state.streak, streak))
        if grads.nonfinite is not None:
            nonfinite = self._for_all_params(grads.nonfinite, grad_indices)
            state.bad.copy_(torch.where(skipped, nonfinite, state.bad))
        if self.options.nonfinite == "raise":
            state.halted.copy_(torch.where(skipped, self.cycles_ended, state.halted))

        # Next scale, by the rule of the loss scale.
        if self.scales_loss:
            scale_state = ScaleState(state.scale, state.growth)
            next_state = self.loss_scale.next(scale_state, grads.overflow)
            state.scale.copy_(torch.where(drop, state.scale, next_state.scale))
            state.growth.copy_(torch.where(drop, state.growth, next_state.growth))

        return UpdateResult(
            lr=self.commit.learning_rates.current(),
            cycle_loss=self._cycle_loss(state.cycle, empty),
            grad_norm=grads.total_norm,
            scale=scale_used,
            skipped=skipped,
            updated=updated,
        )

    def _unscale_and_check(
        self,
        state: StepState,
        grad_indices: list[int],
        *,
        reads_are_free: bool,
        checks_each: bool = False,
    ) -> UnscaledGrads:
        """g = G · 1/scale / N, its norm, and whether an element is inf or NaN. Before clipping.

        `reads_are_free`: a look at a value waits for nothing, as on a CPU. `checks_each`: the
        result says of each gradient whether it is finite, where that can matter.
        """
        cycle = state.cycle
        tensors = self._fp32_grads(cycle, grad_indices)
        values = gradients.dense_values(tensors)

        nonfinite = None
        if checks_each and values and self.options.nonfinite != "ignore":
            nonfinite = gradients.nonfinite_flags(values)

        # Unscale. The kernel checks in the same pass; times 1, it only checks.
        overflow = None
        if nonfinite is not None and not self.scales_loss:
            overflow = nonfinite.any().float()
        elif self.scales_loss:
            overflow = gradients.unscale_(values, inverse_scale(state.scale))
        elif self.options.nonfinite != "ignore" and not reads_are_free:
            overflow = gradients.unscale_(values, self.one)

        # Average over the micro-batches.
        if self.averages and values:
            assert cycle.weight is not None
            gradients.average_(values, cycle.weight)

        # Measure. BLAS is faster and a few ulp off: good enough to report, not to clip by.
        if not values:
            norms = self.zero.view(1)
        elif reads_are_free and self.options.clip_norm is None:
            norms = gradients.grad_norms_by_blas(values)
        else:
            norms = gradients.grad_norms(values)
        total_norm = gradients.total_norm(norms)
        if cycle.weight is not None:  # without terms the gradients are 0/0
            total_norm = torch.where(cycle.weight > 0, total_norm, 0)

        # Check, before clipping: a NaN norm would destroy every gradient. On a CPU a finite norm
        # proves that all is finite. An infinite one may be the squares: look at each element.
        if self.options.nonfinite == "ignore":
            overflow = self.zero
        elif overflow is None:
            overflow = self.zero
            if not math.isfinite(total_norm.item()):
                overflow = gradients.unscale_(values, self.one)

        return UnscaledGrads(
            indices=grad_indices,
            tensors=tensors,
            values=values,
            overflow=overflow,
            norms=norms,
            total_norm=total_norm,
            nonfinite=nonfinite,
        )

    def _fp32_grads(self, cycle: Cycle, grad_indices: list[int]) -> list[Tensor]:
        """The cycle's gradients in float32 or wider, so that editing them rounds nothing away.

        16-bit ones that nothing edits stay as backward left them: the optimizer takes them so.
        """
        grads = [grad for i in grad_indices if (grad := cycle.grads[i]) is not None]
        if not self.edits_grads and self.commit.fp32_update is None:
            grads = gradients.coalesce(grads)
            # The kernel that checks does not take bfloat16 on CUDA.
            has_bf16 = any(grad.dtype == torch.bfloat16 for grad in grads)
            if self.device.type == "cpu" or not has_bf16:
                return grads
        wide = widen(grads, [self.wide_dtypes[i] for i in grad_indices])
        return gradients.coalesce([grad for grad in wide if grad is not None])

    def _clip(self, grads: UnscaledGrads) -> None:
        """By value, then by norm. After unscaling, so that limits do not depend on the scale."""
        if not grads.values:
            return
        norm = grads.total_norm
        if self.options.clip_value is not None:
            gradients.clip_value_(grads.values, self.options.clip_value)
            if self.options.clip_norm:
                norm = gradients.total_norm(gradients.grad_norms(grads.values))
        if self.options.clip_norm is not None:
            gradients.clip_norm_(grads.values, norm, self.options.clip_norm)

    def _optimizer_grads(self, grads: UnscaledGrads) -> list[Tensor | None]:
        """One gradient for each parameter, in the dtype that the parameter has during the step."""
        result: list[Tensor | None] = [None] * len(self.params)
        for i, grad in zip(grads.indices, grads.tensors, strict=True):
            dtype = self.params[i].dtype
            if grad.dtype != dtype and self.commit.fp32_update is None:
                grad = grad.to(dtype)
            result[i] = grad
        return result

    def _has_no_terms(self, cycle: Cycle, total_norm: Tensor) -> Tensor | None:
        """Whether the loss averaged nothing, as a flag; None where that cannot happen.

        Then N is 0, or a mean with ignored targets is 0/0 and its gradients are all exactly 0.
        """
        if cycle.weight is not None:
            return cycle.weight == 0
        assert cycle.loss is not None
        if self.ignores_targets:
            return torch.isnan(cycle.loss) & (total_norm == 0)
        return None

    def _read_has_no_terms(self, cycle: Cycle, total_norm: Tensor) -> bool:
        """_has_no_terms as a bool. On a CPU a norm that is not 0 answers it without the flag."""
        if cycle.weight is None and self.device.type == "cpu" and total_norm.item() != 0:
            return False
        empty = self._has_no_terms(cycle, total_norm)
        return empty is not None and self.host_reads.read(empty) != 0

    def _read_overflow_and_halt(self, state: StepState, overflow: Tensor) -> tuple[bool, bool]:
        """Whether a gradient is not finite, and whether the device has halted: one read of both."""
        if self.options.nonfinite != "raise":
            return self.host_reads.read(overflow) != 0, False
        flags = torch.stack([overflow, state.halted.to(overflow.dtype)])
        overflow_flag, halted_cycle = self.host_reads.read_all(flags)
        return overflow_flag != 0, halted_cycle != 0

    def _cycle_loss(self, cycle: Cycle, empty: Tensor | None) -> Tensor:
        """The loss of the whole cycle: the weighted mean of its micro-batches, 0 without terms."""
        assert cycle.loss is not None
        if self.accumulates:
            assert cycle.weight is not None
            mean = cycle.loss / torch.where(cycle.weight > 0, cycle.weight, 1)
            return mean.to(self.loss_dtype)
        if empty is None:
            return cycle.loss
        return torch.where(empty, 0, cycle.loss)

    def _for_all_params(self, flags: Tensor, grad_indices: list[int]) -> Tensor:
        """Flags of the gradients as flags of all parameters; False where there is no gradient."""
        if len(grad_indices) == len(self.params):
            return flags
        key = tuple(grad_indices)
        if key not in self._index_tensors:
            self._index_tensors[key] = torch.tensor(grad_indices, device=self.device)
        no_flags = torch.zeros(len(self.params), dtype=torch.bool, device=self.device)
        return no_flags.index_copy(0, self._index_tensors[key], flags)

    # The fast form of on_device, for captured steps: see fast/fused_update.py.

    @property
    def use_fused_kernels(self) -> bool:
        """on_device in three or four Triton kernels. Norms are summed in another order."""
        return self._use_fused_kernels

    @use_fused_kernels.setter
    def use_fused_kernels(self, value: bool) -> None:
        self._use_fused_kernels = value
        self.commit.step_in_pieces = value
        # A capture must load no code: load the kernels for the updates met so far.
        if value and self.fused_update is not None:
            self.fused_update.prepare_remembered()
