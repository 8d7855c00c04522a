"""One gradient scaler for two protocols.

torch's: scale(loss).backward(), unscale_(optimizer), step(optimizer), update().
MegEngine's: backward(manager, loss), or manager.backward(loss, dy=scale_factor), then
unscale(tensors), update(), optimizer.step().

`found_inf` is torch's word for the flag that a check of gradients leaves on the device: 1.0 if one
of them was not finite, else 0.0.
"""

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from types import SimpleNamespace
from typing import Any, Literal, Protocol, Self, TypeAlias, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from halfstep.amp.autocast import default_device_type, default_dtypes, set_default_low_dtype
from halfstep.amp.overflow_streak import (
    ADVICE,
    FALLBACK_ADVICE,
    FALLBACK_NOTE,
    OverflowStreak,
    SkipCounts,
    SkipStreak,
    describe_streak,
    list_nonfinite,
)
from halfstep.amp.protocol_checks import (
    check_none_stepped,
    check_not_unscaled_by_list,
    check_not_unscaled_by_optimizer,
    check_ready_to_step,
    has_grads,
    would_skip_uninitialized,
)
from halfstep.amp.scaler_settings import (
    FALLBACK_DTYPES,
    OnSkips,
    ScalerSettings,
    Skip,
    check_growth,
    choose_device_type,
    device_first,
    has_device,
    raise_expected,
)
from halfstep.precision.loss_scale import inverse_scale
from halfstep.utils.saved_state import SavedValue
from halfstep.utils.text import dtype_name

MAX_INT32 = (1 << 31) - 1  # torch counts finite updates in 32 bits

T = TypeVar("T")
Seed: TypeAlias = Tensor | float
IndexedTensors: TypeAlias = dict[int, tuple[int, Tensor]]
"""id of a tensor → its position in the user's list, and the tensor."""


class Manager(Protocol):
    """What the scaler needs of a GradManager or of a group of them."""

    def backward(self, y: Any, dy: Any = None) -> None: ...

    def attached_tensors(self) -> list[Tensor]: ...


class GradScaler(torch.amp.GradScaler):
    """torch's scale machine bit for bit, within [floor, cap]; an overflow always skips its update.

    Two limits are not torch's: the scale stays at `floor` or above, and after `max_skips` skipped
    updates in a row update() raises OverflowStreak, or sets `amp.low_prec_dtype` to bfloat16 or
    float32, with the scale at 1. `GradScaler(floor=0, max_skips=None)` has neither.

    growth_interval=0 fixes the scale; overflows are checked and skipped then, too. `skip="each"`
    lets every optimizer skip on its own gradients, `skip="all"` makes them skip together. The
    device may also come first, as in torch: `GradScaler("cuda", 2.0**10)`.
    """

    @device_first
    def __init__(
        self,
        init_scale: float | str | torch.device = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        device: str | torch.device | None = None,
        floor: float = 2.0**-14,
        cap: float | None = None,
        skip: Skip = "each",
        max_skips: int | None = 50,
        on_skips: OnSkips = "raise",
    ) -> None:
        self.settings = ScalerSettings(
            floor=floor, cap=cap, skip=skip, max_skips=max_skips, on_skips=on_skips
        )
        device_type = choose_device_type(device)
        enabled = enabled and has_device(device_type)
        if enabled:
            init_scale = self.settings.check_scale("init_scale", init_scale)
            check_growth(growth_factor, backoff_factor, growth_interval)
        else:
            device_type = default_device_type()
        super().__init__(
            device=device_type,
            init_scale=cast(float, init_scale),
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._streak = SkipStreak()

        # Of this iteration, until update(): its optimizers, the flag of unscale() if it was called
        # (one or none), and the gradients that it dropped last, to be named in an error.
        self._optimizers: dict[int, Optimizer] = {}
        self._list_found_infs: list[Tensor] = []
        self._dropped_grads: list[tuple[int, Tensor]] = []

        # ids of the tensors that unscale() has unscaled since the last scale().
        self._unscaled_ids: set[int] = set()

    # torch's protocol

    def scale(self, outputs: T) -> T:
        """outputs × scale, on their devices."""
        self._unscaled_ids.clear()
        return cast(T, super().scale(cast(Any, outputs)))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Gradients × 1/scale, once for each optimizer and iteration; refuses fp16 gradients."""
        if self._enabled:
            check_not_unscaled_by_list(optimizer, self._unscaled_ids)
            if self.settings.skip == "all":
                check_none_stepped(self._per_optimizer_states)
            self._optimizers[id(optimizer)] = optimizer
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """optimizer.step(), unless its gradients are not finite, or there are none.

        With skip="all" the gradients of all optimizers decide.
        """
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        if not (has_grads(optimizer) or args or kwargs):
            return None
        self._optimizers[id(optimizer)] = optimizer
        optimizer._opt_called = True  # type: ignore[attr-defined] # else an LR scheduler warns

        state = self._per_optimizer_states[id(optimizer)]
        skips_together = self.settings.skip == "all"
        check_not_unscaled_by_list(optimizer, self._unscaled_ids)
        check_ready_to_step(state, skips_together=skips_together)

        # torch skips if one of these flags is set: with skip="all", the one of all optimizers.
        found_inf = self._combined_found_inf() if skips_together else None
        if found_inf is not None:
            state["found_inf_per_device"] = {found_inf.device: found_inf}

        # Here the host decides, so that the optimizer does not make its buffers.
        if would_skip_uninitialized(optimizer) and self._has_overflowed(optimizer, state):
            state["stage"] = OptState.STEPPED
            return None
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scale once per iteration, on the device; not if nothing was checked.

        An AssertionError, torch's, before the scale was ever used.
        """
        if self._enabled and new_scale is None:
            self._check_scale_growth_tracker("update")
        self._end_iteration(new_scale)

    def set_growth_interval(self, new_interval: int) -> None:
        """As torch's; a tracker already past the interval grows the scale at the next update."""
        check_growth(self._growth_factor, self._backoff_factor, new_interval)
        super().set_growth_interval(new_interval)
        self._clamp_growth_tracker()

    # MegEngine's protocol

    @property
    def scale_factor(self) -> Tensor:
        """A copy of the scale as a 0-dim tensor on its device, no host sync; 1 when disabled."""
        if not self._enabled:
            return torch.ones((), device=self._device)
        return self._scale_tensor().clone()

    @scale_factor.setter
    def scale_factor(self, value: Tensor | float) -> None:
        if not self._enabled:
            return
        if isinstance(value, Tensor) and (value.numel() != 1 or value.requires_grad):
            raise_expected(
                "scale",
                expected="one element that needs no gradient",
                received=value,
                advice="pass scale.detach().reshape(())",
            )
        # A value on the device is not read by the host: it is clamped there instead of checked.
        if isinstance(value, Tensor) and value.device.type != "cpu":
            scale = self._scale_tensor().copy_(value.reshape(()))
            scale.clamp_(self.settings.floor, self.settings.cap)
        else:
            number = value.item() if isinstance(value, Tensor) else value
            self._scale_tensor().fill_(self.settings.check_scale("scale", number))

    def backward(
        self,
        gm: Manager,
        y: Tensor | Sequence[Tensor] | None = None,
        dy: Seed | Sequence[Seed] | None = None,
        *,
        unscale_grad: bool = True,
        update_scale: bool | Literal["if_unscale_grad"] = "if_unscale_grad",
    ) -> None:
        """gm.backward(y, dy × scale), then unscale() of what is attached, then update()."""
        if update_scale not in (True, False, "if_unscale_grad"):
            raise_expected(
                "update_scale",
                expected="True, False or 'if_unscale_grad'",
                received=update_scale,
                advice="leave the default",
            )
        outputs, seeds = _pair_outputs_with_seeds(y, dy)
        if self._enabled:
            pairs = zip(outputs, seeds, strict=True)
            seeds = [_scale_seed(t, s, self._scale_tensor(t.device)) for t, s in pairs]
        gm.backward(outputs, seeds)

        if unscale_grad:
            self.unscale(gm.attached_tensors())
        if update_scale == "if_unscale_grad":
            update_scale = unscale_grad
        if update_scale:
            self._end_iteration(None)

    def unscale(self, tensors: Tensor | Iterable[Tensor | None]) -> Self:
        """Gradients × 1/scale in place, or every gradient None if one is not finite.

        The host reads one flag to decide.
        """
        if not self._enabled:
            return self
        targets = _with_grads(tensors)
        check_not_unscaled_by_optimizer(
            targets, self._optimizers.values(), self._per_optimizer_states
        )
        found_infs = self._unscale_targets(targets)
        self._unscaled_ids.update(targets)

        # Folded into one flag: they must not pile up where update() is never called.
        if found_infs:
            device = self._scale_tensor().device
            self._list_found_infs = [_any_found([*self._list_found_infs, *found_infs], device)]

        if any(_read_flag(found_inf) for found_inf in found_infs):
            self._dropped_grads = [(i, cast(Tensor, t.grad)) for i, t in targets.values()]
            for _, tensor in targets.values():
                tensor.grad = None
        return self

    @property
    def skipped(self) -> int:
        """Updates in which some gradient was not finite: a host sync on CUDA."""
        return self._streak.read().skipped

    @property
    def skips_in_a_row(self) -> int:
        """Those since the last finite update: a host sync on CUDA."""
        return self._streak.read().skips_in_a_row

    # State

    def state_dict(self) -> dict[str, Any]:
        """torch's five keys, and ours under "halfstep", which torch ignores; empty if disabled."""
        if not self._enabled:
            return {}
        extra = {**asdict(self.settings), **asdict(self._streak.read())}
        return {**super().state_dict(), "halfstep": extra}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads torch's state, MegEngine's or ours.

        With torch's and MegEngine's, the settings stay as constructed and the counts begin at 0.
        """
        if "scale_factor" in state_dict:  # MegEngine's word; its other keys are torch's
            state_dict = {"scale": state_dict["scale_factor"], **state_dict}
        if self._enabled and state_dict:  # torch refuses an empty one
            saved = SavedValue(state_dict, "GradScaler.load_state_dict")
            _check_saved_state(saved)
            state_dict = {**state_dict, "scale": _saved_scale(saved)}
        defaults = {**asdict(self.settings), **asdict(SkipCounts())}
        extra = {**defaults, **state_dict.get("halfstep", {})}
        settings = ScalerSettings(**{f.name: extra[f.name] for f in fields(ScalerSettings)})
        counts = SkipCounts(**{f.name: extra[f.name] for f in fields(SkipCounts)})

        super().load_state_dict(state_dict)
        if not self._enabled:
            return
        self.settings = settings
        self._streak.set(counts)
        self._clamp_growth_tracker()
        if self._set_fallback_dtype():
            note = FALLBACK_NOTE.format(dtype_name(default_dtypes.low))
            warnings.warn(f"the state was saved after a fallback; {note}", stacklevel=2)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_unscaled_ids": set()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_fallback_dtype()

    # The end of an iteration

    def _end_iteration(self, new_scale: float | Tensor | None) -> None:
        """Moves the scale, counts a skip, and acts if there were too many."""
        if not self._enabled:
            return
        found_inf = self._combined_found_inf()
        if new_scale is not None:
            self.scale_factor = new_scale
        elif found_inf is not None:
            self._move_scale(found_inf)

        is_too_many = False
        nonfinite = ""
        if found_inf is not None:
            self._streak.add(found_inf)
            max_skips = self.settings.max_skips
            is_too_many = max_skips is not None and self._streak.read_in_a_row() >= max_skips
        if is_too_many:
            nonfinite = list_nonfinite(self._optimizers.values(), self._dropped_grads)

        self._per_optimizer_states.clear()
        self._optimizers.clear()
        self._list_found_infs.clear()
        self._dropped_grads.clear()
        if is_too_many:
            self._raise_or_fall_back(nonfinite)

    def _move_scale(self, found_inf: Tensor) -> None:
        """DynamicScale.next in place, since a captured graph keeps reading the same tensor."""
        if self._growth_interval == 0 or self._streak.fallen:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        torch._amp_update_scale_(
            scale,
            tracker,
            found_inf,
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
        )
        scale.clamp_(self.settings.floor, self.settings.cap)

    def _clamp_growth_tracker(self) -> None:
        """torch grows the scale at interval - 1 only: a tracker beyond that would never grow it."""
        if self._growth_interval == 0:
            return
        self._init_growth_tracker = min(self._init_growth_tracker, self._growth_interval - 1)
        if self._growth_tracker is not None:
            self._growth_tracker.clamp_(max=self._growth_interval - 1)

    def _raise_or_fall_back(self, nonfinite: str) -> None:
        """Raises OverflowStreak, or goes on in the fallback's dtype with the scale at 1."""
        assert self.settings.max_skips is not None
        message = describe_streak(self.settings.max_skips, self.get_scale(), nonfinite)
        if self._streak.fallen:
            raise OverflowStreak(message + ADVICE)
        if self.settings.on_skips == "raise":
            raise OverflowStreak(message + ADVICE + FALLBACK_ADVICE)

        self._streak.set_fallen()
        self._scale_tensor().fill_(1.0)
        self._set_fallback_dtype()
        note = FALLBACK_NOTE.format(dtype_name(default_dtypes.low))
        # Level 4 is the caller of update() or backward().
        warnings.warn(f"{message}; {note}", stacklevel=4)

    def _set_fallback_dtype(self) -> bool:
        """After a fallback, sets the dtype that scale 1 is for. Returns whether it has changed."""
        if not self._streak.fallen:
            return False
        low = FALLBACK_DTYPES.get(self.settings.on_skips, default_dtypes.low)
        return set_default_low_dtype(low)

    # Scale and flags

    def _scale_tensor(self, device: torch.device | None = None) -> Tensor:
        """The scale itself; made on the device if there is none yet."""
        if self._scale is None:
            self._lazy_init_scale_growth_tracker(device or torch.device(self._device))
        assert self._scale is not None
        return self._scale

    def _unscale_targets(self, targets: IndexedTensors) -> list[Tensor]:
        """torch's check-and-unscale over a list; one found_inf for each device."""
        if self._scale is None:
            raise RuntimeError(
                "expected scaled gradients, received unscale() before the scale was ever used, "
                "do gm.backward(loss, dy=scaler.scale_factor) first"
            )
        # mps has no float64.
        if self._scale.device.type == "mps":
            inv_scale = self._scale.reciprocal()
        else:
            inv_scale = inverse_scale(self._scale)

        # torch reads no more of an optimizer than its parameters.
        params = [tensor for _, tensor in targets.values()]
        optimizer = cast(Optimizer, SimpleNamespace(param_groups=[{"params": params}]))
        found_inf = torch.zeros_like(self._scale)
        per_device = self._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16=False)
        return list(per_device.values())

    def _combined_found_inf(self) -> Tensor | None:
        """This iteration's flags as one, on the scale's device; None if nothing was checked."""
        found_infs = []
        for state in self._per_optimizer_states.values():
            found_infs += state["found_inf_per_device"].values()
        found_infs += self._list_found_infs
        if not found_infs:
            return None
        return _any_found(found_infs, self._scale_tensor().device)

    def _has_overflowed(self, optimizer: Optimizer, state: dict[str, Any]) -> bool:
        """Whether a gradient of the optimizer is not finite: a host read."""
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        return any(_read_flag(found_inf) for found_inf in state["found_inf_per_device"].values())


def _check_saved_state(saved: SavedValue) -> None:
    """ValueError for a state that could not be loaded, or not be trained with. Changes nothing."""
    _saved_scale(saved)
    for name in ("growth_factor", "backoff_factor"):
        saved.field(name).number(finite=True, minimum=0)
    for name in ("growth_interval", "_growth_tracker"):
        saved.field(name).whole_number(maximum=MAX_INT32)
    extra = saved.optional_field("halfstep")
    if extra is None:
        return
    for name, value in extra.entries().items():
        if name in ("skipped", "skips_in_a_row"):
            value.whole_number()
        elif name == "fallen":
            value.flag()


def _saved_scale(saved: SavedValue) -> float:
    """The scale of a saved state, which MegEngine's holds as a tensor. ValueError for no number."""
    scale = saved.field("scale")
    if isinstance(scale.value, Tensor):
        tensor = scale.value
        if tensor.numel() != 1 or tensor.is_meta or tensor.is_complex():
            scale.refuse("one number")
        scale = replace(scale, value=tensor.item())
    return scale.number(finite=True, minimum=0)


def _pair_outputs_with_seeds(
    y: Tensor | Sequence[Tensor] | None, dy: Seed | Sequence[Seed] | None
) -> tuple[list[Tensor], list[Seed | None]]:
    """The outputs, and one seed gradient for each; a single dy serves every y."""
    outputs: list[Tensor]
    if y is None:
        outputs = []
    elif isinstance(y, Tensor):
        outputs = [y]
    else:
        outputs = list(y)

    seeds: list[Seed | None]
    if isinstance(dy, list | tuple):
        seeds = [*dy]
    else:
        seeds = [cast(Seed | None, dy)] * len(outputs)
    if len(seeds) != len(outputs):
        raise_expected(
            "dy",
            expected=f"one per y ({len(outputs)}) or a single one",
            received=f"{len(seeds)} of them",
            advice="pass as many",
        )
    return outputs, seeds


def _scale_seed(output: Tensor, seed: Seed | None, scale: Tensor) -> Tensor:
    """seed × scale, in at least float32, on the output's device.

    The manager rounds it to the output's dtype.
    """
    scale = scale.to(output.device, torch.promote_types(output.dtype, torch.float32))
    if seed is None:
        return scale
    if isinstance(seed, Tensor):
        seed = seed.to(scale.dtype)
    return seed * scale


def _with_grads(tensors: Tensor | Iterable[Tensor | None]) -> IndexedTensors:
    """The tensors that have a gradient, each once."""
    listed = [tensors] if isinstance(tensors, Tensor) else tensors
    indexed: IndexedTensors = {}
    for i, tensor in enumerate(listed):
        if tensor is not None and tensor.grad is not None:
            indexed[id(tensor)] = (i, tensor)
    return indexed


def _any_found(found_infs: Sequence[Tensor], device: torch.device) -> Tensor:
    """1 if some flag is set, else 0: on `device`, without reading it."""
    # To a CPU the copy must wait: torch would make it asynchronous, and the host would read it too
    # early.
    non_blocking = device.type != "cpu"
    on_device = [found_inf.to(device, non_blocking=non_blocking) for found_inf in found_infs]
    if len(on_device) == 1:
        return on_device[0]
    # Not a sum: fused kernels test for == 1, so that a sum of 2 would pass.
    return torch.stack(on_device).amax()


def _read_flag(found_inf: Tensor) -> bool:
    """The one host read of a flag."""
    return bool(found_inf.item())
