"""Loss scales: three frozen settings with the same methods, and pure transitions of their state.

A further rule is a further class in SCALE_CLASSES, with the members of DynamicScale: `is_active`,
`runs_in_kernel`, `max_skips`, `on_skips`, `start`, `next`, `kernel_constants`. A rule that the
kernel `decide` in kernels/update_triton.py does not know says `runs_in_kernel = False`; updates
then take the plain form.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from halfstep.utils.checks import expect

OnSkips: TypeAlias = Literal["raise", "bf16", "fp32"]

KernelConstants: TypeAlias = tuple[float, float, int, float, float | None]
"""growth, backoff, interval, floor, cap of a scale that moves, in the order that a kernel takes."""


class ScaleState(NamedTuple):
    """What a rule knows: all of it is part of StepState, and saved."""

    scale: Tensor  # float32: the scale that the next step uses
    growth: Tensor  # int32: finite updates in a row, since the last growth or overflow


@dataclass(frozen=True, kw_only=True)
class DynamicScale:
    """torch.amp.GradScaler's state machine with a floor and an optional cap.

    `floor` defaults to 2**-14, the smallest normal float16: below it the seed gradient itself loses
    bits. After `max_skips` skipped updates in a row, `on_skips` decides: raise, or go on in "bf16"
    or "fp32".
    """

    is_active: ClassVar[Literal[True]] = True
    runs_in_kernel: ClassVar[bool] = True

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 2.0**-14
    cap: float | None = None
    max_skips: int = 50
    on_skips: OnSkips = "raise"

    def __post_init__(self) -> None:
        init = self.init
        interval_expected = "at least 1 update (FixedScale(value=…) never grows)"
        expect(0 < init < float("inf"), "init", "a positive finite number", init)
        expect(self.growth > 1, "growth", "a factor above 1", self.growth)
        expect(0 < self.backoff < 1, "backoff", "a factor between 0 and 1", self.backoff)
        expect(self.interval >= 1, "interval", interval_expected, self.interval)
        expect(0 <= self.floor <= init, "floor", f"between 0 and init={init}", self.floor)
        cap_is_valid = self.cap is None or self.cap >= init
        expect(cap_is_valid, "cap", f"None or at least init={init}", self.cap)
        _check_skip_settings(self.max_skips, self.on_skips)

    def start(self, device: torch.device) -> ScaleState:
        """The state before the first update."""
        return _initial_state(self.init, device)

    def next(self, state: ScaleState, overflow: Tensor) -> ScaleState:
        """The state after an update; `overflow` is 1.0 if a gradient was not finite, else 0.0.

        `state` is left as it was.
        """
        # torch grows the scale at interval - 1 only: a count beyond it would never grow again.
        growth = state.growth.clamp(max=self.interval - 1)
        scale = state.scale.clone()
        torch._amp_update_scale_(scale, growth, overflow, self.growth, self.backoff, self.interval)
        return ScaleState(scale.clamp_(self.floor, self.cap), growth)

    def kernel_constants(self) -> KernelConstants | None:
        """What a fused kernel needs to move the scale as `next` does."""
        return (self.growth, self.backoff, self.interval, self.floor, self.cap)


@dataclass(frozen=True, kw_only=True)
class FixedScale:
    """A scale that never moves; an overflow still skips its update."""

    is_active: ClassVar[Literal[True]] = True
    runs_in_kernel: ClassVar[bool] = True

    value: float
    max_skips: int = 50
    on_skips: OnSkips = "raise"

    def __post_init__(self) -> None:
        expect(0 < self.value < float("inf"), "value", "a positive finite number", self.value)
        _check_skip_settings(self.max_skips, self.on_skips)

    def start(self, device: torch.device) -> ScaleState:
        """The state before the first update."""
        return _initial_state(self.value, device)

    def next(self, state: ScaleState, overflow: Tensor) -> ScaleState:
        """The same state: a fixed scale does not move."""
        return state

    def kernel_constants(self) -> KernelConstants | None:
        """None: the scale never moves, so a kernel leaves it as it is."""
        return None


@dataclass(frozen=True, kw_only=True)
class NoScale:
    """No loss scaling: the seed gradient is 1."""

    is_active: ClassVar[Literal[False]] = False
    runs_in_kernel: ClassVar[bool] = True
    on_skips: ClassVar[OnSkips] = "raise"  # nothing is skipped for want of a better scale

    def start(self, device: torch.device) -> ScaleState:
        """The state before the first update."""
        return _initial_state(1.0, device)

    def next(self, state: ScaleState, overflow: Tensor) -> ScaleState:
        """The same state: there is no scale that could move."""
        return state

    def kernel_constants(self) -> KernelConstants | None:
        """None: the scale never moves, so a kernel leaves it as it is."""
        return None


Scale: TypeAlias = DynamicScale | FixedScale | NoScale
SCALE_CLASSES = (DynamicScale, FixedScale, NoScale)


def inverse_scale(scale: Tensor) -> Tensor:
    """torch's inv_scale: the reciprocal in float64, rounded once to float32."""
    return scale.double().reciprocal().float()


def parse_scale(value: Any) -> Scale:
    """A scale from "dynamic", "none", a number (fixed) or a scale object."""
    if isinstance(value, SCALE_CLASSES):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return FixedScale(value=float(value))

    # As Precision.state_dict writes it: the class under "kind", its settings beside it.
    if isinstance(value, dict) and "kind" in value:
        classes: dict[str, Any] = {c.__name__: c for c in SCALE_CLASSES}
        settings = {name: setting for name, setting in value.items() if name != "kind"}
        scale: Scale = classes[value["kind"]](**settings)
        return scale

    if value == "dynamic":
        return DynamicScale()
    if value == "none":
        return NoScale()
    class_names = " / ".join(c.__name__ for c in SCALE_CLASSES)
    expected = f"'dynamic', 'none', a positive number or a {class_names}"
    raise ValueError(f"scale: expected {expected}, received {value!r}")


def _initial_state(scale: float, device: torch.device) -> ScaleState:
    return ScaleState(
        scale=torch.full((), scale, device=device),
        growth=torch.zeros((), dtype=torch.int32, device=device),
    )


def _check_skip_settings(max_skips: int, on_skips: str) -> None:
    is_known = on_skips in ("raise", "bf16", "fp32")
    expect(max_skips >= 1, "max_skips", "at least 1 skipped update", max_skips)
    expect(is_known, "on_skips", "'raise', 'bf16' or 'fp32'", on_skips)
