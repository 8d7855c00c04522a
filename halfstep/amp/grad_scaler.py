"""One gradient scaler for two protocols: torch's (scale, step, update) and MegEngine's (backward, unscale, update)."""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any, Literal, Self, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from halfstep.amp import grad_scaler__gear as gear
from halfstep.amp import scaler_settings__checks as checks
from halfstep.amp.autocast import defaults, name, set_low
from halfstep.amp.overflow_streak import (
    ADVICE,
    GOES_ON,
    OTHER_ADVICE,
    OverflowStreak,
    Streak,
    Tally,
    blame,
    complain,
)
from halfstep.amp.scaler_settings import (
    FALLBACKS,
    Limits,
    OnSkips,
    Skip,
    check_device,
    check_growth,
    refuse,
)
from halfstep.precision.loss_scale import inverse

T = TypeVar("T")


class GradScaler(torch.amp.GradScaler):
    """torch's scale machine bit for bit, kept within [floor, cap]; a non-finite gradient always skips its update.

    growth_interval=0 fixes the scale; overflows are checked and skipped then, too. `skip="each"` lets every optimizer
    skip on its own gradients, `skip="all"` makes them skip together. After `max_skips` skipped updates in a row
    update() raises OverflowStreak, or turns the room to "bf16" / "fp32" with the scale at 1.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        device: str | torch.device | None = None,
        floor: float = 2.0**-14,
        cap: float | None = None,
        skip: Skip = "each",
        max_skips: int = 50,
        on_skips: OnSkips = "raise",
    ) -> None:
        self.limits = Limits(
            floor=floor, cap=cap, skip=skip, max_skips=max_skips, on_skips=on_skips
        )
        init = self.limits.check("init_scale", init_scale)
        check_growth(growth_factor, backoff_factor, growth_interval)
        super().__init__(
            check_device(device, enabled),
            init,
            growth_factor,
            backoff_factor,
            growth_interval,
            enabled,
        )
        self._streak = Streak()
        self._optimizers: dict[int, Optimizer] = {}  # those of this iteration
        self._founds: list[
            Tensor
        ] = []  # the verdict of unscale() in this iteration, if there is one
        self._dropped: list[
            tuple[int, Tensor]
        ] = []  # gradients it dropped last, kept until update() to be named
        self._by_hand: set[int] = (
            set()
        )  # tensors that unscale() has unscaled since the last scale()

    # torch's protocol

    def scale(self, outputs: T) -> T:
        """outputs × scale, on their devices."""
        self._by_hand.clear()
        return cast(T, super().scale(cast(Any, outputs)))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Gradients × torch's inv_scale, once per optimizer and iteration; fp16 gradients are refused."""
        if self._enabled:
            checks.not_by_hand(optimizer, self._by_hand)
            if self.limits.skip == "all":
                checks.none_stepped(self._per_optimizer_states)
            self._optimizers[id(optimizer)] = optimizer
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """optimizer.step() unless its gradients (skip="all": any optimizer's) are non-finite; no gradients, no step."""
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if not (checks.has_grads(optimizer) or args or kwargs):
            return None
        state, together = self._per_optimizer_states[id(optimizer)], self.limits.skip == "all"
        self._optimizers[id(optimizer)] = optimizer
        optimizer._opt_called = True  # type: ignore[attr-defined] # skipped or not: an LR scheduler would warn
        checks.not_by_hand(optimizer, self._by_hand)
        checks.is_checked(state, together=together)
        if together and (found := self._found()) is not None:
            state["found_inf_per_device"] = {found.device: found}
        if checks.lacks_momentum(optimizer) and self._overflowed(optimizer, state):
            state["stage"] = OptState.STEPPED
            return None
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Move the scale once per iteration, on the device; where nothing was checked nothing moves."""
        self._update(new_scale, stacklevel=4)

    def set_growth_interval(self, new_interval: int) -> None:
        """As torch's; a tracker already past the new interval grows the scale at the next finite update."""
        check_growth(self._growth_factor, self._backoff_factor, new_interval)
        super().set_growth_interval(new_interval)
        self._hold_tracker()

    # MegEngine's protocol

    @property
    def scale_factor(self) -> Tensor:
        """A copy of the scale as a 0-dim tensor on its device, without a host sync; 1 when disabled."""
        return self._live().clone() if self._enabled else torch.ones((), device=self._device)

    @scale_factor.setter
    def scale_factor(self, value: Tensor | float) -> None:
        if not self._enabled:
            return
        if isinstance(value, Tensor) and (value.numel() != 1 or value.requires_grad):
            refuse(
                "scale",
                "one element that needs no gradient",
                value,
                "pass scale.detach().reshape(())",
            )
        if (
            isinstance(value, Tensor) and value.device.type != "cpu"
        ):  # never read: bounded on the device instead
            self._live().copy_(value.reshape(())).clamp_(self.limits.floor, self.limits.cap)
        else:
            number = value.item() if isinstance(value, Tensor) else value
            self._live().fill_(self.limits.check("scale", number))

    def backward(
        self,
        gm: gear.Manager,
        y: Tensor | Sequence[Tensor] | None = None,
        dy: gear.Seed | Sequence[gear.Seed] | None = None,
        *,
        unscale_grad: bool = True,
        update_scale: bool | Literal["if_unscale_grad"] = "if_unscale_grad",
    ) -> None:
        """gm.backward(y, dy × scale), then unscale() of what is attached, then update()."""
        if update_scale not in (True, False, "if_unscale_grad"):
            refuse(
                "update_scale",
                "True, False or 'if_unscale_grad'",
                update_scale,
                "leave the default",
            )
        ys, dys = gear.roots(y, dy)
        if self._enabled:
            dys = [gear.seed(t, d, self._live(t.device)) for t, d in zip(ys, dys, strict=True)]
        gm.backward(ys, dys)
        if unscale_grad:
            self.unscale(gm.attached_tensors())
        if unscale_grad if update_scale == "if_unscale_grad" else update_scale:
            self._update(None, stacklevel=4)

    def unscale(self, tensors: Tensor | Iterable[Tensor | None]) -> Self:
        """Gradients × inv_scale in place, or every gradient None when one is non-finite: one host read decides."""
        if not self._enabled:
            return self
        held = gear.held(tensors)
        checks.not_unscaled(held, self._optimizers.values(), self._per_optimizer_states)
        verdicts = self._unscale_held(held)
        self._by_hand.update(held)
        if verdicts:  # folded into one: who never calls update() must not pile them up
            self._founds = [gear.combine([*self._founds, *verdicts], self._live().device)]
        if any(_read(v) for v in verdicts):
            self._dropped = [(i, cast(Tensor, t.grad)) for i, t in held.values()]
            for _, t in held.values():
                t.grad = None
        return self

    @property
    def skipped(self) -> int:
        """Updates in which some gradient was non-finite: a host sync on CUDA."""
        return self._streak.tally().skipped

    @property
    def skips_in_a_row(self) -> int:
        """Those since the last finite update: a host sync on CUDA."""
        return self._streak.tally().skips_in_a_row

    # state

    def state_dict(self) -> dict[str, Any]:
        """torch's five keys, and ours under "halfstep", which torch's scaler passes over; empty when disabled."""
        ours = {**asdict(self.limits), **asdict(self._streak.tally())}
        return {**super().state_dict(), "halfstep": ours} if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """torch's state or ours; from torch's the limits stay as constructed and the counts begin at 0."""
        ours = {**asdict(self.limits), **asdict(Tally()), **state_dict.get("halfstep", {})}
        limits = Limits(**{f.name: ours[f.name] for f in fields(Limits)})
        tally = Tally(**{f.name: ours[f.name] for f in fields(Tally)})
        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        self.limits = limits
        self._streak.set(tally)
        self._hold_tracker()
        if self._turn_room():
            warnings.warn(
                f"the state was saved after a fallback; {GOES_ON.format(name(defaults.low))}",
                stacklevel=2,
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_by_hand": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._turn_room()

    # how it is done

    def _live(self, device: torch.device | None = None) -> Tensor:
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device or torch.device(self._device))
        assert self._scale is not None
        return self._scale

    def _unscale_held(self, held: gear.Held) -> list[Tensor]:
        """torch's check-and-unscale over a list; one verdict per device."""
        if self._scale is None:
            raise RuntimeError(
                "expected scaled gradients, received unscale() before the scale was ever used, "
                "do gm.backward(loss, dy=scaler.scale_factor) first"
            )
        inv = inverse(self._scale) if self._scale.device.type != "mps" else self._scale.reciprocal()
        verdicts = self._unscale_grads_(
            gear.as_optimizer(held), inv, torch.zeros_like(self._scale), False
        )
        return list(verdicts.values())

    def _found(self) -> Tensor | None:
        """This iteration's verdicts as one, on the scale's device; None when nothing was checked."""
        states = self._per_optimizer_states.values()
        verdicts = [
            v for state in states for v in state["found_inf_per_device"].values()
        ] + self._founds
        return gear.combine(verdicts, self._live().device) if verdicts else None

    def _overflowed(self, optimizer: Optimizer, state: dict[str, Any]) -> bool:
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        return any(_read(v) for v in state["found_inf_per_device"].values())

    def _update(self, new_scale: float | Tensor | None, stacklevel: int) -> None:
        if not self._enabled:
            return
        found = self._found()
        if new_scale is not None:
            self.scale_factor = new_scale
        elif found is not None:
            self._move(found)
        if found is not None:
            self._streak.add(found)
        too_many = found is not None and self._streak.look() >= self.limits.max_skips
        culprits = blame(self._optimizers.values(), self._dropped) if too_many else ""
        for used in (self._per_optimizer_states, self._optimizers, self._founds, self._dropped):
            used.clear()
        if too_many:
            self._act(culprits, stacklevel)

    def _move(self, found: Tensor) -> None:
        """DynamicScale.next in place, since a captured graph keeps reading the same tensor."""
        if self._growth_interval == 0 or self._streak.fallen:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        rule = (self._growth_factor, self._backoff_factor, self._growth_interval)
        torch._amp_update_scale_(scale, tracker, found, *rule)
        scale.clamp_(self.limits.floor, self.limits.cap)

    def _hold_tracker(self) -> None:
        """torch grows the scale at tracker == interval - 1 only: one beyond it would never grow again."""
        if self._growth_interval == 0:
            return
        self._init_growth_tracker = min(self._init_growth_tracker, self._growth_interval - 1)
        if self._growth_tracker is not None:
            self._growth_tracker.clamp_(max=self._growth_interval - 1)

    def _act(self, culprits: str, stacklevel: int) -> None:
        said = complain(self.limits.max_skips, self.get_scale(), culprits)
        if self.limits.on_skips == "raise" or self._streak.fallen:
            raise OverflowStreak(said + (ADVICE if self._streak.fallen else ADVICE + OTHER_ADVICE))
        self._streak.fall()
        self._live().fill_(1.0)
        self._turn_room()
        warnings.warn(f"{said}; {GOES_ON.format(name(defaults.low))}", stacklevel=stacklevel)

    def _turn_room(self) -> bool:
        """Put the room where a fallen scaler needs it, since scale 1 is for the fallback's dtype; whether it moved."""
        low = FALLBACKS.get(self.limits.on_skips, defaults.low)
        return self._streak.fallen and set_low(low)


def _read(verdict: Tensor) -> bool:
    """The one host read of a verdict."""
    return bool(verdict.item())
