"""The end of a cycle: g = G · inv_scale / N, check, clip, and commit all of it or none of it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep.precision import NoScale, Precision
from halfstep.precision.lowcopy import widen
from halfstep.precision.scale import ScaleState, inverse
from halfstep.step import gradients
from halfstep.step.commit import Commit
from halfstep.step.host import Host
from halfstep.step.options import StepOptions
from halfstep.step.state import Cycle, StepState


class Outcome(NamedTuple):
    """What became of an update, as device tensors. `norm` is taken after unscaling, before clipping."""

    skipped: Tensor
    updated: Tensor
    norm: Tensor


class Update:
    """Turns the cycle's gradients into one optimizer step, or takes everything back."""

    def __init__(
        self,
        params: list[Tensor],
        precision: Precision,
        options: StepOptions,
        commit: Commit,
        host: Host,
        *,
        on_device: bool,
        sums: bool,
    ) -> None:
        self.params, self.options, self.commit, self.host = params, options, commit, host
        self.scale, self.on_device = precision.loss_scale, on_device
        self.scaled, self.averages = not isinstance(self.scale, NoScale), options.accumulate > 1 and not sums
        self.edits = self.scaled or options.accumulate > 1 or options.clip_norm or options.clip_value
        self.wide = [torch.promote_types(p.dtype, torch.float32) for p in params]
        device = params[0].device
        self.zero, self.one = torch.zeros((), device=device), torch.ones((), device=device)
        self.yes, self.no = self.one.bool(), self.zero.bool()
        self._moved: set[int] = set()  # parameters that a committed update has moved, so that their state exists
        self._places: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, state: StepState) -> Outcome:
        """The transaction. With decide="device" the host reads nothing once every parameter has moved."""
        cycle = state.cycle
        live = [i for i, g in enumerate(cycle.grads) if g is not None]
        grads = self._widened(cycle, live)
        values = gradients.dense(grads)
        found = self._unscale(state, values)
        self._average(cycle, values)
        each = gradients.norms(values) if values else self.zero.view(1)
        norm = gradients.total(each)
        found = self._check(found, norm, values)
        self._clip(values, norm)
        given = self._given(cycle, live, grads)
        if self.on_device and live and self._moved.issuperset(live):
            skipped, updated = self._on_device(state, found, given)
        else:
            skipped, updated = self._on_host(state, found, given, live)
        self._blame(state, skipped, each, live)
        return Outcome(skipped, updated, norm)

    def _widened(self, cycle: Cycle, live: list[int]) -> list[Tensor]:
        grads = (
            widen([cycle.grads[i] for i in live], [self.wide[i] for i in live])
            if self._any_low(cycle, live)
            else [cycle.grads[i] for i in live]
        )
        return [g.coalesce() if g.is_sparse else g for g in grads if g is not None]

    def _any_low(self, cycle: Cycle, live: list[int]) -> bool:
        return any(g.dtype != self.wide[i] for i in live if (g := cycle.grads[i]) is not None)

    def _unscale(self, state: StepState, values: list[Tensor]) -> Tensor | None:
        """G · inv_scale, and whether anything was non-finite: exact, and without a host read."""
        if self.scaled:
            return gradients.unscale_(values, inverse(state.scale))
        on_cpu = self.zero.device.type == "cpu" and not self.on_device
        return None if self.options.nonfinite == "ignore" or on_cpu else gradients.unscale_(values, self.one)

    def _average(self, cycle: Cycle, values: list[Tensor]) -> None:
        """÷ N. N is 0 only for a cycle without terms, whose update is held back anyway."""
        if self.averages and values:
            assert cycle.weight is not None
            n = torch.where(cycle.weight > 0, cycle.weight, 1)
            torch._foreach_div_(values, n.to(values[0].dtype))

    def _check(self, found: Tensor | None, norm: Tensor, values: list[Tensor]) -> Tensor:
        """1.0 when an element is non-finite. On a CPU a finite norm proves the opposite in the pass it takes anyway."""
        if self.options.nonfinite == "ignore":
            return self.zero
        if found is not None:
            return found
        return self.zero if math.isfinite(norm.item()) else gradients.unscale_(values, self.one)

    def _clip(self, values: list[Tensor], norm: Tensor) -> None:
        """After unscaling, so that the limit means the same at every scale."""
        if self.options.clip_value is not None and values:
            gradients.clip_value_(values, self.options.clip_value)
            norm = gradients.total(gradients.norms(values)) if self.options.clip_norm else norm
        if self.options.clip_norm is not None and values:
            gradients.clip_norm_(values, norm, self.options.clip_norm)

    def _given(self, cycle: Cycle, live: list[int], grads: list[Tensor]) -> list[Tensor | None]:
        """What the optimizer gets: gradients in its parameters' dtype; low ones as backward left them, or rounded."""
        given: list[Tensor | None] = [None] * len(self.params)
        for i, g in zip(live, grads, strict=True):
            low = self.params[i].dtype != g.dtype and self.commit.widened is None
            given[i] = g if not low else g.to(self.params[i].dtype) if self.edits else cycle.grads[i]
        return given

    def _on_host(
        self, state: StepState, found: Tensor, given: list[Tensor | None], live: list[int]
    ) -> tuple[Tensor, Tensor]:
        weight = state.cycle.weight
        empty = not live or (weight is not None and self.host.read(weight) == 0)
        overflow = not empty and self.host.read(found) != 0
        self.commit.on_host(state, given, skip=empty or overflow)
        if empty:
            return self.no, self.no
        if overflow:
            state.skips, state.streak = state.skips + 1, state.streak + 1
        else:
            state.updates, state.streak = state.updates + 1, torch.zeros_like(state.streak)
            self._moved.update(live)
        state.scale, state.growth = self.scale.next(ScaleState(state.scale, state.growth), found)
        return (self.yes, self.no) if overflow else (self.no, self.yes)

    def _on_device(self, state: StepState, found: Tensor, given: list[Tensor | None]) -> tuple[Tensor, Tensor]:
        weight, overflow = state.cycle.weight, found > 0
        hold = state.halted if weight is None else state.halted | (weight == 0)  # no terms, or stopped: nothing moves
        skip = overflow | hold
        self.commit.on_device(state, given, skip)
        skipped, updated = overflow & ~hold, ~skip
        state.updates, state.skips = state.updates + updated, state.skips + skipped
        state.streak = torch.where(hold, state.streak, (state.streak + 1) * overflow)
        after = self.scale.next(ScaleState(state.scale, state.growth), found)
        state.scale = torch.where(hold, state.scale, after.scale)
        state.growth = torch.where(hold, state.growth, after.growth)
        if self.options.nonfinite == "raise":
            state.halted = state.halted | skipped
        return skipped, updated

    def _blame(self, state: StepState, skipped: Tensor, each: Tensor, live: list[int]) -> None:
        """Which parameters were non-finite at the last skip."""
        if skipped is self.no or not live:
            return
        key = tuple(live)
        if key not in self._places:
            self._places[key] = torch.tensor(live, device=self.zero.device)
        bad = torch.zeros_like(state.bad).index_copy(0, self._places[key], ~torch.isfinite(each))
        state.bad = torch.where(skipped, bad, state.bad)
