"""Update.on_device in three or four Triton kernels, for captured steps.

A small network's update is some forty launches, which take longer than its arithmetic. This buys
the difference between "as it is" and "polished" for the benchmark MLP in docs/internals/speed.md.
The same bits as Update.on_device, but for the order in which squares are summed to the gradients'
norm. Switched off by polish=False, and by deterministic=True.

The kernels (kernels/update_triton.py): `measure` unscales, averages and sums squares, in one launch
for each 128 gradients; `decide` does everything that is a number, and writes the record, before the
optimizer runs; `shrink` clips, where clip_norm is set. Each program of `measure` and `shrink` works
on a share of one gradient: a LaunchPlan says which.
"""

import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.kernels.foreach import is_dense
from halfstep.kernels.launch import (
    MORE_UPDATE_KERNELS,
    SAME_RESULTS,
    Launch,
    launch,
    triton_runs_on,
    warn_fallback,
)
from halfstep.precision.low_params import widen
from halfstep.step.fast.launch_plan import (
    BLOCK_ELEMENTS,
    LaunchPlan,
    make_idle_plan,
    make_launch_plan,
    split_launches,
)
from halfstep.step.state import (
    ROW_FIELDS,
    Cycle,
    RecordTarget,
    StepState,
    UpdateResult,
    row_columns,
)
from halfstep.step.update import Update
from halfstep.utils.device_values import is_capturing

MAX_PARAMS = 1024  # one program decides, and it holds a number for each parameter
MAX_SIGNATURES = 16  # kinds of updates that are remembered, to load their kernels before a capture

WARPS = 8
DECIDE_WARPS = 4
MAX_DECIDE_TILE = 4096  # norms × programs that `decide` sums at a time
MAX_PROGRAMS_AT_ONCE = 128

GRAD_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ALIGNMENT_BYTES = 16  # of the kernels' loads


class UpdateSignature(NamedTuple):
    """What plans and kernels depend on, besides what an Update keeps for life."""

    grad_indices: tuple[int, ...]
    loss_dtype: torch.dtype
    has_weight: bool

    @classmethod
    def of(cls, cycle: Cycle, grad_indices: list[int]) -> "UpdateSignature":
        assert cycle.loss is not None
        return cls(tuple(grad_indices), cycle.loss.dtype, cycle.weight is not None)


class DecideOutputs(NamedTuple):
    """What the kernel `decide` fills. New memory for each update: records are kept."""

    floats: Tensor  # norm, scale used, found_inf for the optimizer, clipping factor
    flags: Tensor  # skipped, updated, roll back
    lr: Tensor | None  # None: the optimizer's own rates hold
    loss: Tensor | None  # None: the cycle's loss as it is


class EmptyRecordTarget(NamedTuple):
    """A RecordTarget that has no rows."""

    table: Tensor
    next_row: Tensor


class FusedUpdate:
    """Runs an Update's device form through Triton, where it fits."""

    def __init__(self, update: Update) -> None:
        # Weak: the update holds this object. A cycle would keep weights and optimizer state in
        # memory until Python's garbage collector runs.
        self.update: Update = weakref.proxy(update)
        self._signatures: set[UpdateSignature] = set()  # met so far
        self._plans: dict[UpdateSignature, LaunchPlan | None] = {}  # None: Triton failed

    def remember(self, cycle: Cycle, grad_indices: list[int]) -> None:
        """Notes an update that was run, so that its kernels can be loaded before a capture."""
        is_fused = self.update.commit.optimizer_kind == "fused"
        if is_fused and len(self._signatures) < MAX_SIGNATURES:
            self._signatures.add(UpdateSignature.of(cycle, grad_indices))

    def prepare_remembered(self) -> None:
        """Loads the kernels for the updates met so far."""
        for signature in self._signatures:
            self.prepare(signature)

    def fits(self, state: StepState, grad_indices: list[int]) -> bool:
        """Whether the kernels can do this update; in a capture, only one that was prepared."""
        signature = UpdateSignature.of(state.cycle, grad_indices)
        if not self.prepare(signature) or not self._is_supported(signature):
            return False
        grads = _cycle_grads(state, grad_indices)
        if not kernels_can_read(grads, self.update.device):
            return False
        for i, grad in zip(grad_indices, grads, strict=True):
            if grad.dtype not in (self._kernel_dtype(i), self.update.params[i].dtype):
                return False
        return True

    def prepare(self, signature: UpdateSignature) -> bool:
        """Plans the launches and loads the kernels: a capture must do neither.

        The kernels run once, on numbers of no importance. Returns whether they can be used.
        """
        update = self.update
        is_new = signature not in self._plans
        if is_new and self._is_supported(signature) and triton_runs_on(update.device):
            if is_capturing():
                return False
            trial_launches = self._trial_launches(signature)
            try:
                launch(update.device, trial_launches)
                self._plans[signature] = make_launch_plan(update.params, signature.grad_indices)
            except Exception as error:  # whatever Triton, the C compiler or the disk may raise
                self._plans[signature] = None
                warn_fallback(error, MORE_UPDATE_KERNELS, SAME_RESULTS)
        return self._plans.get(signature) is not None

    def __call__(
        self,
        state: StepState,
        grad_indices: list[int],
        record_target: RecordTarget | None = None,
    ) -> UpdateResult:
        """The transaction of Update.on_device."""
        update = self.update
        cycle = state.cycle
        plan = self._plans[UpdateSignature.of(cycle, grad_indices)]
        assert plan is not None
        assert cycle.loss is not None

        # A cycle of one batch: its record is known here, and a kernel writes it.
        writes_record = record_target is not None and not update.accumulates

        # Unscale, average, check, decide, count, next scale, clip: three kernels.
        outputs = self._make_outputs(state)
        lr = update.commit.learning_rates.current() if outputs.lr is None else outputs.lr
        dtypes = [self._kernel_dtype(i) for i in grad_indices]
        wide = widen(_cycle_grads(state, grad_indices), dtypes)
        grads = [grad for grad in wide if grad is not None]
        launches = self._launches(
            state=state,
            grads=grads,
            plan=plan,
            outputs=outputs,
            lr_tensors=self._lr_tensors(),
            cycles_ended=update.cycles_ended,
            record_lr=lr,
            record_target=record_target if writes_record else None,
        )
        launch(update.device, launches)

        # Commit, or roll back.
        roll_back = outputs.flags[2]
        found_inf = outputs.floats[2]
        optimizer_grads = self._optimizer_grads(grad_indices, grads)
        update.commit.step_unless(roll_back, state, optimizer_grads, found_inf)

        return UpdateResult(
            lr=lr,
            cycle_loss=cycle.loss if outputs.loss is None else outputs.loss,
            grad_norm=outputs.floats[0],
            scale=outputs.floats[1],
            skipped=outputs.flags[0],
            updated=outputs.flags[1],
            record_written=writes_record,
        )

    def _is_supported(self, signature: UpdateSignature) -> bool:
        """A fused optimizer without hooks, gradients of one dtype, no clipping by value."""
        update = self.update
        optimizer = update.commit.optimizer
        has_hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        if not update.commit.optimizer_can_skip or has_hooks:
            return False
        if update.options.clip_value is not None or not update.loss_scale.runs_in_kernel:
            return False
        if not 0 < len(signature.grad_indices) <= len(update.params) <= MAX_PARAMS:
            return False

        # Under a table of rates no two groups may share the tensor of their rate.
        rates = update.commit.learning_rates
        if rates.table is not None:
            lrs = [group["lr"] for group in rates.groups]
            addresses = [lr.data_ptr() for lr in lrs if isinstance(lr, Tensor)]
            if len(set(addresses)) != len(addresses):
                return False
        dtypes = {self._kernel_dtype(i) for i in signature.grad_indices}
        return len(dtypes) == 1 and dtypes.issubset(GRAD_DTYPES)

    def _kernel_dtype(self, i: int) -> torch.dtype:
        """Of a gradient in the kernels: wide, unless the optimizer takes it as backward left it."""
        if self.update.edits_grads:
            return self.update.wide_dtypes[i]
        return self.update.params[i].dtype

    def _optimizer_grads(self, grad_indices: list[int], grads: list[Tensor]) -> list[Tensor | None]:
        """Update._optimizer_grads, by one cast."""
        params = self.update.params
        result: list[Tensor | None] = [None] * len(params)
        cast_grads = widen(grads, [params[i].dtype for i in grad_indices])
        for i, grad in zip(grad_indices, cast_grads, strict=True):
            result[i] = grad
        return result

    def _trial_launches(self, signature: UpdateSignature) -> Iterator[Launch]:
        """The launches of an update that does nothing, to load the kernels."""
        update = self.update
        state = StepState.start(
            update.device, update.loss_scale.start(update.device), len(update.params)
        )
        state.cycle.loss = torch.zeros((), dtype=signature.loss_dtype, device=update.device)
        if signature.has_weight:
            state.cycle.weight = torch.zeros((), dtype=torch.float64, device=update.device)
        outputs = self._make_outputs(state)
        lr = update.commit.learning_rates.current() if outputs.lr is None else outputs.lr
        lr_tensors = None
        table = update.commit.learning_rates.table
        if table is not None:
            groups = update.commit.learning_rates.groups
            lr_tensors = tuple(torch.empty_like(table[0, 0]) for _ in groups)
        return self._launches(
            state=state,
            # An idle plan follows no pointer: any tensor of the dtype will do.
            grads=[update.zero.to(self._kernel_dtype(i)) for i in signature.grad_indices],
            plan=make_idle_plan(update.params, signature.grad_indices),
            outputs=outputs,
            lr_tensors=lr_tensors,
            cycles_ended=state.skips,  # any counter will do: nobody reads this state
            record_lr=lr,
            record_target=None,
        )

    def _launches(
        self,
        *,
        state: StepState,
        grads: list[Tensor],
        plan: LaunchPlan,
        outputs: DecideOutputs,
        lr_tensors: tuple[Tensor, ...] | None,
        cycles_ended: Tensor,
        record_lr: Tensor,
        record_target: RecordTarget | None,
    ) -> Iterator[Launch]:
        """Measure, decide, and clip where asked."""
        from halfstep.kernels import update_triton

        update = self.update
        arguments: dict[str, Any]
        square_sums = torch.empty(len(plan.shares), device=update.device)
        nonfinite_flags = torch.empty_like(square_sums, dtype=torch.int32)

        for start, programs, launch_grads in split_launches(plan, grads):
            arguments = {
                "grads": launch_grads,
                "plan": plan.shares[start:],
                "square_sums": square_sums[start:],
                "nonfinite_flags": nonfinite_flags[start:],
                "scale": state.scale if update.scales_loss else None,
                "weight": state.cycle.weight if update.averages else None,
                "GRAD_COUNT": len(launch_grads),
                "BLOCK": BLOCK_ELEMENTS,
                "BLOCKS_PER_PROGRAM": plan.blocks_per_program,
            }
            yield update_triton.measure, programs, arguments, WARPS

        arguments = {
            "square_sums": square_sums,
            "nonfinite_flags": nonfinite_flags,
            "first_programs": plan.first_programs,
            **self._state_arguments(state, cycles_ended),
            **self._lr_arguments(outputs, lr_tensors),
            "loss_out": outputs.loss,
            "result_floats": outputs.floats,
            "result_flags": outputs.flags,
            **self._record_arguments(record_lr, record_target),
            **self._decide_constants(plan),
            "COLUMNS": row_columns(update_triton.RECORD_FIELDS),
            "FIELD_COUNT": len(ROW_FIELDS),
        }
        yield update_triton.decide, 1, arguments, DECIDE_WARPS

        if update.options.clip_norm is None:
            return
        for start, programs, launch_grads in split_launches(plan, grads):
            arguments = {
                "grads": launch_grads,
                "plan": plan.shares[start:],
                "factor": outputs.floats[3],
                "GRAD_COUNT": len(launch_grads),
                "BLOCK": BLOCK_ELEMENTS,
                "BLOCKS_PER_PROGRAM": plan.blocks_per_program,
            }
            yield update_triton.shrink, programs, arguments, WARPS

    def _state_arguments(self, state: StepState, cycles_ended: Tensor) -> dict[str, Any]:
        return {
            "bad": state.bad,
            "counters": (state.updates, state.skips, state.streak, state.halted, cycles_ended),
            "scale": state.scale,
            "growth": state.growth,
            "weight": state.cycle.weight,
            "loss": state.cycle.loss,
        }

    def _lr_arguments(
        self, outputs: DecideOutputs, lr_tensors: tuple[Tensor, ...] | None
    ) -> dict[str, Any]:
        table = self.update.commit.learning_rates.table
        columns = 1
        row_stride = 0
        column_stride = 0
        if table is not None:
            columns = table.shape[1]
            row_stride, column_stride = table.stride()
        return {
            "lr_table": table,
            "lr_tensors": lr_tensors,
            "lr_out": outputs.lr,
            "table_columns": columns,
            "table_row_stride": row_stride,
            "table_column_stride": column_stride,
        }

    def _record_arguments(
        self, record_lr: Tensor, record_target: RecordTarget | None
    ) -> dict[str, Any]:
        """The record's table. Without one, an empty table: the kernel is compiled once for both."""
        if self.update.accumulates:
            return {
                "record_table": None,
                "record_row": None,
                "record_lr": None,
                "record_rows": 0,
                "record_stride": 0,
                "record_lr_stride": 0,
            }
        if record_target is None:
            record_target = self._empty_target
        table = record_target.table
        return {
            "record_table": table,
            "record_row": record_target.next_row,
            "record_lr": record_lr,
            "record_rows": len(table),
            "record_stride": table.stride(0),
            "record_lr_stride": record_lr.stride(0) if record_lr.dim() else 0,
        }

    @cached_property
    def _empty_target(self) -> "EmptyRecordTarget":
        device = self.update.device
        return EmptyRecordTarget(
            table=torch.empty(0, 1, dtype=torch.float64, device=device),
            next_row=torch.zeros(1, dtype=torch.int64, device=device),
        )

    def _decide_constants(self, plan: LaunchPlan) -> dict[str, Any]:
        update = self.update
        param_count = len(update.params)
        param_slots = 1 << (param_count - 1).bit_length()  # Triton wants a power of two
        programs_at_once = min(MAX_PROGRAMS_AT_ONCE, MAX_DECIDE_TILE // param_slots)
        return {
            "param_count": param_count,
            "longest": plan.longest,
            "PARAM_SLOTS": param_slots,
            "PROGRAMS_AT_ONCE": max(1, programs_at_once),
            "GROUPS": len(update.commit.learning_rates.groups),
            "ACCUMULATES": update.accumulates,
            "IGNORES_TARGETS": update.ignores_targets,
            "NONFINITE": update.options.nonfinite,
            "DYNAMIC": update.loss_scale.kernel_constants(),
            "CLIP_NORM": update.options.clip_norm,
        }

    def _make_outputs(self, state: StepState) -> DecideOutputs:
        update = self.update
        device = update.device
        loss = state.cycle.loss
        assert loss is not None

        lr = None
        if update.commit.learning_rates.table is not None:
            group_count = len(update.commit.learning_rates.groups)
            shape = () if group_count == 1 else (group_count,)
            lr = torch.empty(shape, dtype=torch.float64, device=device)

        # The cycle's loss is another number than the batch's: a mean, or 0 without terms.
        loss_out = None
        may_be_empty = state.cycle.weight is not None or update.ignores_targets
        if update.accumulates:
            loss_out = torch.empty((), dtype=update.loss_dtype, device=device)
        elif may_be_empty:
            loss_out = torch.empty((), dtype=loss.dtype, device=device)
        return DecideOutputs(
            floats=torch.empty(4, device=device),
            flags=torch.empty(3, dtype=torch.bool, device=device),
            lr=lr,
            loss=loss_out,
        )

    def _lr_tensors(self) -> tuple[Tensor, ...] | None:
        """A tensor for each group's rate, in the optimizer, as LearningRates.set would put it."""
        table = self.update.commit.learning_rates.table
        if table is None:
            return None
        lr_tensors = []
        for group in self.update.commit.learning_rates.groups:
            lr = group["lr"]
            is_usable = isinstance(lr, Tensor) and (lr.device, lr.dtype) == (
                table.device,
                table.dtype,
            )
            if not is_usable:
                lr = torch.empty_like(table[0, 0])
                group["lr"] = lr
            lr_tensors.append(lr)
        return tuple(lr_tensors)


def kernels_can_read(grads: Sequence[Tensor], device: torch.device) -> bool:
    """Whether kernels may walk these in memory order, 16 bytes at a time, each by itself."""
    for grad in grads:
        is_plain = type(grad) is Tensor and grad.layout == torch.strided
        if not is_plain or grad.dtype not in GRAD_DTYPES or grad.device != device:
            return False
    addresses = [grad.data_ptr() for grad in grads if grad.numel()]
    are_separate = len(set(addresses)) == len(addresses)
    are_aligned = all(address % ALIGNMENT_BYTES == 0 for address in addresses)
    return are_separate and are_aligned and all(is_dense(grad) for grad in grads)


def _cycle_grads(state: StepState, grad_indices: list[int]) -> list[Tensor]:
    return [grad for i in grad_indices if (grad := state.cycle.grads[i]) is not None]
