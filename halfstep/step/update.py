"""The end of a cycle: g = G · inv_scale / N, check, clip, and commit all of it or none of it."""

import math
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from halfstep.precision import NoScale, Precision
from halfstep.precision.lowcopy import widen
from halfstep.precision.scale import ScaleState, inverse
from halfstep.step import gradients
from halfstep.step.commit import Commit
from halfstep.step.host import Host
from halfstep.step.options import StepOptions
from halfstep.step.quick_plan import Shape
from halfstep.step.record import Journal, Outcome
from halfstep.step.state import Cycle, StepState

if TYPE_CHECKING:
    from halfstep.step.quick import Quick

SHAPES = 16  # of updates that are remembered for captures


class Measured(NamedTuple):
    """Gradients after unscaling and averaging, the values behind them, 1.0 if one is non-finite, and their norms."""

    grads: list[Tensor]
    values: list[Tensor]
    found: Tensor
    each: Tensor
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
        sums: bool,
        masked: bool,
    ) -> None:
        self.params, self.options, self.commit, self.host = params, options, commit, host
        self.scale, self.output = precision.loss_scale, precision.output
        self.masked = masked  # the loss is 0/0, with gradients of 0, when every target is ignored
        self.scaled, self.averages = not isinstance(self.scale, NoScale), options.accumulate > 1 and not sums
        self.edits = self.scaled or options.accumulate > 1 or options.clip_norm or options.clip_value
        self.wide = [torch.promote_types(p.dtype, torch.float32) for p in params]
        self.device = params[0].device
        self.zero, self.one = torch.zeros((), device=self.device), torch.ones((), device=self.device)
        self.yes, self.no = self.one.bool(), self.zero.bool()
        self.tries = torch.zeros((), dtype=torch.int64, device=self.device)  # cycles ended, updated or not
        self.journal: Journal | None = None  # where the next update's record may go at once
        self._places: dict[tuple[int, ...], Tensor] = {}
        self._few, self._shapes = False, set[Shape]()

    def on_host(self, state: StepState, live: list[int]) -> Outcome:
        """The transaction, decided by the host: one read of the flag, one of N where it may be 0."""
        self._note(state.cycle, live)
        m = self._measure(state, live, looks=self.device.type == "cpu")
        used = state.scale.clone() if self.scaled else state.scale
        self.tries += 1
        empty = not live or self._no_terms(state.cycle, m.norm)
        overflow = not empty and self.host.read(m.found) != 0
        skip = empty or overflow
        self.commit.on_host(state, [] if skip else self._finish(m, live), skip=skip)
        if overflow:
            state.skips += 1
            state.streak += 1
            state.bad.copy_(self._blame(torch.stack([~torch.isfinite(v).all() for v in m.values]), live))
        elif not empty:
            state.updates += 1
            state.streak.zero_()
        if not empty:
            self._move(state, self.scale.next(ScaleState(state.scale, state.growth), m.found))
        loss = self._loss(state.cycle, self.yes if empty else None)
        skipped, updated = self.yes if overflow else self.no, self.no if empty or overflow else self.yes
        return Outcome(self.commit.rates.show(), loss, m.norm, used, skipped, updated)

    def on_device(self, state: StepState, live: list[int]) -> Outcome:
        """The transaction without a host decision: every branch is a select, so that it can be captured."""
        self._note(state.cycle, live)
        if self.quick and self._quick.fits(state, live):
            return self._quick(state, live)
        m, used = self._measure(state, live, looks=False), state.scale.clone()
        self.tries += 1
        overflow = m.found > 0
        empty, hold = self._empty(state.cycle, m.norm), state.halted > 0
        hold = hold if empty is None else hold | empty  # stopped, or no terms: nothing moves
        skip = overflow | hold
        self.commit.on_device(state, self._finish(m, live), skip)
        skipped, updated = overflow & ~hold, ~skip
        state.updates += updated
        state.skips += skipped
        state.streak.copy_(torch.where(hold, state.streak, (state.streak + 1) * overflow))
        state.bad.copy_(torch.where(skipped, self._blame(~torch.isfinite(m.each), live), state.bad))
        after = self.scale.next(ScaleState(state.scale, state.growth), m.found)
        self._move(
            state,
            ScaleState(*(torch.where(hold, a, b) for a, b in zip((state.scale, state.growth), after, strict=True))),
        )
        if self.options.nonfinite == "raise":
            state.halted.copy_(torch.where(skipped, self.tries, state.halted))
        return Outcome(self.commit.rates.show(), self._loss(state.cycle, empty), m.norm, used, skipped, updated)

    @property
    def quick(self) -> bool:
        """Whether on_device takes few kernels, for captures; they sum the norm's squares in another order."""
        return self._few

    @quick.setter
    def quick(self, few: bool) -> None:
        """Loads the kernels for updates like those so far: a capture must load no code."""
        self._few = self.commit.spread = few
        for shape in self._shapes if few else ():
            self._quick.prepare(shape)

    def _note(self, cycle: Cycle, live: list[int]) -> None:
        if self.commit.kind == "fused" and len(self._shapes) < SHAPES:
            self._shapes.add(Shape.of(cycle, live))

    @cached_property
    def _quick(self) -> "Quick":
        from halfstep.step.quick import Quick

        return Quick(self)

    def _measure(self, state: StepState, live: list[int], *, looks: bool) -> Measured:
        """Unscale, average, check, measure: in that order, and before clipping, always."""
        cycle = state.cycle
        grads = self._widened(cycle, live)
        values = gradients.dense(grads)
        found = self._unscale(state, values, looks)
        self._average(cycle, values)
        measure = gradients.quick_norms if looks and self.options.clip_norm is None else gradients.norms
        each = measure(values) if values else self.zero.view(1)
        norm = gradients.total(each)
        if cycle.weight is not None:  # 0/0 is no gradient
            norm = torch.where(cycle.weight > 0, norm, 0)
        return Measured(grads, values, self._check(found, norm, values), each, norm)

    def _finish(self, m: Measured, live: list[int]) -> list[Tensor | None]:
        """Clip, and hand over."""
        self._clip(m.values, m.norm)  # after the check: a NaN norm destroys every gradient
        return self._given(live, m.grads)

    def _widened(self, cycle: Cycle, live: list[int]) -> list[Tensor]:
        """The gradients to work on: wide, unless low ones go to the optimizer as backward left them."""
        grads = [g for i in live if (g := cycle.grads[i]) is not None]
        as_is = not self.edits and self.commit.widened is None
        if as_is:
            grads = _coalesced(grads)
            as_is = self.device.type == "cpu" or all(g.dtype != torch.bfloat16 for g in grads)  # CUDA checks no bf16
        if not as_is:
            grads = [g for g in widen(grads, [self.wide[i] for i in live]) if g is not None]
        return _coalesced(grads)

    def _unscale(self, state: StepState, values: list[Tensor], looks: bool) -> Tensor | None:
        """G · inv_scale, and whether anything was non-finite: exact, and without a host read."""
        if self.scaled:
            return gradients.unscale_(values, inverse(state.scale))
        return None if self.options.nonfinite == "ignore" or looks else gradients.unscale_(values, self.one)

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

    def _given(self, live: list[int], grads: list[Tensor]) -> list[Tensor | None]:
        """What the optimizer gets: gradients in its parameters' dtype."""
        given: list[Tensor | None] = [None] * len(self.params)
        for i, g in zip(live, grads, strict=True):
            low = self.params[i].dtype != g.dtype and self.commit.widened is None
            given[i] = g.to(self.params[i].dtype) if low else g
        return given

    def _empty(self, cycle: Cycle, norm: Tensor) -> Tensor | None:
        """Whether the cycle held no terms: N = 0, or a mean loss of 0/0 whose gradients are all exactly 0."""
        if cycle.weight is not None:
            return cycle.weight == 0
        assert cycle.loss is not None
        return torch.isnan(cycle.loss) & (norm == 0) if self.masked else None

    def _loss(self, cycle: Cycle, empty: Tensor | None) -> Tensor:
        """The full batch's loss: the weighted mean of its micro-batches, 0 when there was nothing to average."""
        assert cycle.loss is not None
        if self.options.accumulate > 1:
            n = torch.where(cycle.weight > 0, cycle.weight, 1) if cycle.weight is not None else 1
            return (cycle.loss / n).to(self.output)
        return cycle.loss if empty is None else torch.where(empty, 0, cycle.loss)

    def _no_terms(self, cycle: Cycle, norm: Tensor) -> bool:
        if cycle.weight is None and self.device.type == "cpu" and norm.item() != 0:  # on a CPU this look is free
            return False
        empty = self._empty(cycle, norm)
        return empty is not None and self.host.read(empty) != 0

    def _blame(self, bad: Tensor, live: list[int]) -> Tensor:
        """Which parameters had a non-finite gradient, among all of them."""
        if len(live) == len(self.params):
            return bad
        key = tuple(live)
        if key not in self._places:
            self._places[key] = torch.tensor(live, device=self.device)
        return torch.zeros(len(self.params), dtype=torch.bool, device=self.device).index_copy(0, self._places[key], bad)

    def _move(self, state: StepState, after: ScaleState) -> None:
        if self.scaled:
            state.scale.copy_(after.scale)
            state.growth.copy_(after.growth)


def _coalesced(grads: list[Tensor]) -> list[Tensor]:
    return [g.coalesce() if g.is_sparse else g for g in grads]
