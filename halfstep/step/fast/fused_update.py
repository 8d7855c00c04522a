"""The device half of an update in three or four kernels, for captured steps: a small network's forty take longer.

What `Update.on_device` does, bit for bit, but for the order in which squares are summed to the gradients' norm.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from halfstep.kernels.launch import MORE, SAME, Launch, is_capturing, launch, tell, usable
from halfstep.precision import DynamicScale
from halfstep.precision.low_params import widen
from halfstep.step.fast.fused_update__quick_plan import (
    BLOCK,
    DTYPES,
    WARPS,
    LaunchPlan,
    UpdateSignature,
    split_launches,
    make_idle_plan,
    make_launch_plan,
    kernels_can_read,
)
from halfstep.step.state import StepState
from halfstep.step.state__record import RecordTarget, UpdateResult

if TYPE_CHECKING:
    from halfstep.step.update import Update

MOST = 1024  # parameters: one program decides, and it holds a number for each
Line: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, int, int, int]
"""A table, the counter of its rows, the rates to write; how many rows, and the distances of rows and of rates."""
Rated: TypeAlias = tuple[
    Tensor | None, tuple[Tensor, ...] | None
]  # a table, and where its rates go


class Outputs(NamedTuple):
    """What the deciding kernel fills: norm, scale, flag, factor; skipped, updated, skip; the rates; the loss."""

    floats: Tensor
    truths: Tensor
    lr: Tensor | None
    mean: Tensor | None


class FusedUpdate:
    """Runs an Update's device half through Triton."""

    def __init__(self, update: "Update") -> None:
        self.update = update
        self._plans: dict[UpdateSignature, LaunchPlan | None] = {}  # None: Triton failed

    def fits(self, state: StepState, live: list[int]) -> bool:
        """Whether the kernels can do this update; in a capture, only one that `prepare` has seen."""
        u, shape, grads = self.update, UpdateSignature.of(state.cycle, live), _grads(state, live)
        ours = self.prepare(shape) and self._plain(shape) and kernels_can_read(grads, u.device)
        return ours and all(
            g.dtype in (self._dtype(i), u.params[i].dtype) for i, g in zip(live, grads, strict=True)
        )

    def prepare(self, shape: UpdateSignature) -> bool:
        """Plans and loads the kernels: a capture must do neither. They run once, on numbers of no importance."""
        u = self.update
        if (
            shape not in self._plans
            and self._plain(shape)
            and usable(u.device)
            and not is_capturing()
        ):
            state, made, rates = (
                _rehearsal(u, shape),
                make_idle_plan(u.params, shape.grad_indices),
                self._rates(keep=False),
            )
            grads = [
                u.zero.to(self._dtype(i)) for i in shape.grad_indices
            ]  # an idle plan follows no pointer
            out = self._outputs(state)
            row = self._row(None, u.commit.rates.current() if out.lr is None else out.lr)
            try:
                launch(u.device, self._launches(state, grads, made, out, rates, state.skips, row))
                self._plans[shape] = make_launch_plan(u.params, shape.grad_indices)
            except (
                Exception
            ) as error:  # of any kind that Triton's compiler, the C compiler or the disk may raise
                self._plans[shape] = None
                tell(error, MORE, SAME)
        return self._plans.get(shape) is not None

    def _plain(self, shape: UpdateSignature) -> bool:
        """A fused optimizer without hooks, one dtype, no clipping by value; groups under a table share no rate."""
        u, commit, rates = self.update, self.update.commit, self.update.commit.rates
        hooked = (
            commit.optimizer._optimizer_step_pre_hooks
            or commit.optimizer._optimizer_step_post_hooks
        )
        fused = commit.optimizer_can_skip and not hooked and u.options.clip_value is None
        held = [group["lr"].data_ptr() for group in rates.groups if isinstance(group["lr"], Tensor)]
        apart = rates.table is None or len(set(held)) == len(held)
        few = 0 < len(shape.grad_indices) <= len(u.params) <= MOST
        dtypes = {self._dtype(i) for i in shape.grad_indices}
        return fused and apart and few and len(dtypes) == 1 and dtypes.issubset(DTYPES)

    def _dtype(self, i: int) -> torch.dtype:
        """Of a gradient in the kernels: wide, unless a low one goes to the optimizer as backward left it."""
        return (
            self.update.wide_dtypes[i] if self.update.edits_grads else self.update.params[i].dtype
        )

    def __call__(self, state: StepState, live: list[int]) -> UpdateResult:
        """The transaction, as Update.on_device has it, where it fits."""
        u, cycle, out = self.update, state.cycle, self._outputs(state)
        made = self._plans[UpdateSignature.of(cycle, live)]
        assert made is not None
        assert cycle.loss is not None
        lr = u.commit.rates.current() if out.lr is None else out.lr
        grads = [
            g for g in widen(_grads(state, live), [self._dtype(i) for i in live]) if g is not None
        ]
        row = self._row(u.record_target, lr)
        launch(
            u.device,
            self._launches(state, grads, made, out, self._rates(keep=True), u.cycles_ended, row),
        )
        u.commit.step_unless(out.truths[2], state, self._given(live, grads), out.floats[2])
        loss = cycle.loss if out.mean is None else out.mean
        return UpdateResult(lr, loss, out.floats[0], out.floats[1], out.truths[0], out.truths[1])

    def _given(self, live: list[int], grads: list[Tensor]) -> list[Tensor | None]:
        """Update._optimizer_grads, by one cast."""
        params, given = self.update.params, list[Tensor | None]([None] * len(self.update.params))
        for i, g in zip(live, widen(grads, [params[i].dtype for i in live]), strict=True):
            given[i] = g
        return given

    def _launches(
        self,
        state: StepState,
        grads: list[Tensor],
        made: LaunchPlan,
        out: Outputs,
        rates: Rated,
        tries: Tensor,
        row: Line,
    ) -> Iterator[Launch]:
        """Measure, decide, and clip where asked."""
        from halfstep.kernels import update_triton as found

        u = self.update
        sums = torch.empty(len(made.rows), device=u.device)
        flags = torch.empty_like(sums, dtype=torch.int32)
        factors = state.scale if u.scales_loss else None, state.cycle.weight if u.averages else None
        for start, programs, some in split_launches(made, grads):
            parts = made.rows[start:], sums[start:], flags[start:]
            yield (
                found.measure,
                programs,
                (some, *parts, *factors, len(some), BLOCK, made.turns),
                WARPS,
            )
        yield (
            found.decide,
            1,
            (sums, flags, made.begins, *self._numbers(state, made, out, rates, tries, row)),
            4,
        )
        if u.options.clip_norm is not None:
            for start, programs, some in split_launches(made, grads):
                clip = made.rows[start:], out.floats[3]
                yield found.shrink, programs, (some, *clip, len(some), BLOCK, made.turns), WARPS

    def _numbers(
        self,
        state: StepState,
        made: LaunchPlan,
        out: Outputs,
        rates: Rated,
        tries: Tensor,
        line: Line,
    ) -> tuple[Any, ...]:
        """The deciding kernel's arguments from `bad` on."""
        u, scale, table, cycle, size = (
            self.update,
            self.update.loss_scale,
            rates[0],
            state.cycle,
            len(state.bad),
        )
        counters = (state.updates, state.skips, state.streak, state.halted, tries)
        tensors = (state.bad, counters, state.scale, state.growth, cycle.weight, cycle.loss, *rates)
        shape = (1, 0, 0) if table is None else (table.shape[1], *table.stride())
        t = 1 << (size - 1).bit_length()
        tile = t, max(1, min(128, 4096 // t)), len(u.commit.rates.groups)
        dynamic = None
        if isinstance(scale, DynamicScale):
            dynamic = (scale.growth, scale.backoff, scale.interval, scale.floor, scale.cap)
        options = (
            u.options.accumulate > 1,
            u.ignores_targets,
            u.options.nonfinite,
            dynamic,
            u.options.clip_norm,
        )
        wide = (out.lr, out.mean, out.floats, out.truths, *line[:3])
        return (*tensors, *wide, size, made.longest, *shape, *line[3:], *tile, *options)

    def _row(self, journal: RecordTarget | None, lr: Tensor) -> Line:
        """Where the record goes: into the journal, or into one without rows, so that it is the same kernel."""
        if self.update.options.accumulate > 1:
            return None, None, None, 0, 0, 0
        table, at = self._nowhere if journal is None else (journal.table, journal.at)
        if journal is not None:
            journal.taken = True
        return table, at, lr, len(table), table.stride(0), lr.stride(0) if lr.dim() else 0

    @cached_property
    def _nowhere(self) -> tuple[Tensor, Tensor]:
        """A journal's table and counter, on the device."""
        device = self.update.device
        return torch.empty(0, 1, dtype=torch.float64, device=device), torch.zeros(
            1, dtype=torch.int64, device=device
        )

    def _outputs(self, state: StepState) -> Outputs:
        """New memory for each update: records are kept."""
        u, loss, groups = self.update, state.cycle.loss, len(self.update.commit.rates.groups)
        assert loss is not None
        many, tabled = u.options.accumulate > 1, u.commit.rates.table is not None
        may_be_empty = state.cycle.weight is not None or u.ignores_targets
        shape, dtype = () if groups == 1 else (groups,), u.loss_dtype if many else loss.dtype
        return Outputs(
            torch.empty(4, device=u.device),
            torch.empty(3, dtype=torch.bool, device=u.device),
            torch.empty(shape, dtype=torch.float64, device=u.device) if tabled else None,
            torch.empty((), dtype=dtype, device=u.device) if many or may_be_empty else None,
        )

    def _rates(self, *, keep: bool) -> Rated:
        """The table and a tensor for each group's rate: the optimizer's, made as Rates.set would, or one to try."""
        table, groups = self.update.commit.rates.table, self.update.commit.rates.groups
        if table is None:
            return None, None
        held = [group["lr"] for group in groups]
        alike = [
            keep and isinstance(v, Tensor) and v.device == table.device and v.dtype == table.dtype
            for v in held
        ]
        made = [
            v if same else torch.empty_like(table[0, 0])
            for v, same in zip(held, alike, strict=True)
        ]
        for group, rate in zip(groups if keep else (), made, strict=keep):
            group["lr"] = rate
        return table, tuple(made)


def _grads(state: StepState, live: list[int]) -> list[Tensor]:
    return [g for i in live if (g := state.cycle.grads[i]) is not None]


def _rehearsal(update: "Update", shape: UpdateSignature) -> StepState:
    """A state that nobody needs."""
    state = StepState.start(
        update.device, update.loss_scale.start(update.device), len(update.params)
    )
    state.cycle.loss = torch.zeros((), dtype=shape.loss_dtype, device=update.device)
    state.cycle.weight = (
        torch.zeros((), dtype=torch.float64, device=update.device) if shape.has_weight else None
    )
    return state
