"""Loss scales: three frozen settings of one shape, and pure transitions of a two-tensor state."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

OnSkips: TypeAlias = Literal["raise", "bf16", "fp32"]


class ScaleState(NamedTuple):
    """The scale that the next step uses (float32) and the finite updates since it last moved (int32)."""

    scale: Tensor
    growth: Tensor


def _start(value: float, device: torch.device) -> ScaleState:
    return ScaleState(
        torch.full((), value, device=device), torch.zeros((), dtype=torch.int32, device=device)
    )


@dataclass(frozen=True, kw_only=True)
class DynamicScale:
    """torch.amp.GradScaler's state machine with a floor and an optional cap.

    `floor` defaults to 2**-14, the smallest normal float16: below it the seed gradient itself loses bits.
    After `max_skips` skipped updates in a row, `on_skips` decides: raise, or go on in "bf16" or "fp32".
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    floor: float = 2.0**-14
    cap: float | None = None
    max_skips: int = 50
    on_skips: OnSkips = "raise"

    def __post_init__(self) -> None:
        _positive("init", self.init)
        _expect(self.growth > 1, "growth", "a factor above 1", self.growth)
        _expect(0 < self.backoff < 1, "backoff", "a factor between 0 and 1", self.backoff)
        _expect(
            self.interval >= 1,
            "interval",
            "at least 1 update (FixedScale(value=…) never grows)",
            self.interval,
        )
        _expect(
            0 <= self.floor <= self.init, "floor", f"between 0 and init={self.init}", self.floor
        )
        _expect(
            self.cap is None or self.cap >= self.init,
            "cap",
            f"None or at least init={self.init}",
            self.cap,
        )
        _check_skips(self.max_skips, self.on_skips)

    def start(self, device: torch.device) -> ScaleState:
        return _start(self.init, device)

    def next(self, state: ScaleState, found: Tensor) -> ScaleState:
        """The state after an update whose gradients were finite (found == 0) or not; `state` is left as it was."""
        scale, growth = state.scale.clone(), state.growth.clamp(max=self.interval - 1)
        torch._amp_update_scale_(scale, growth, found, self.growth, self.backoff, self.interval)
        return ScaleState(scale.clamp_(self.floor, self.cap), growth)


@dataclass(frozen=True, kw_only=True)
class FixedScale:
    """A scale that never moves; an overflow still skips its update."""

    value: float
    max_skips: int = 50
    on_skips: OnSkips = "raise"

    def __post_init__(self) -> None:
        _positive("value", self.value)
        _check_skips(self.max_skips, self.on_skips)

    def start(self, device: torch.device) -> ScaleState:
        return _start(self.value, device)

    def next(self, state: ScaleState, found: Tensor) -> ScaleState:
        return state


@dataclass(frozen=True, kw_only=True)
class NoScale:
    """No loss scaling: the seed gradient is 1."""

    def start(self, device: torch.device) -> ScaleState:
        return _start(1.0, device)

    def next(self, state: ScaleState, found: Tensor) -> ScaleState:
        return state


Scale: TypeAlias = DynamicScale | FixedScale | NoScale


def inverse(scale: Tensor) -> Tensor:
    """torch's inv_scale: the reciprocal in float64, rounded once to float32."""
    return scale.double().reciprocal().float()


def parse_scale(value: Any) -> Scale:
    """A scale from "dynamic", "none", a number (fixed) or a scale object."""
    if isinstance(value, (DynamicScale, FixedScale, NoScale)):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return FixedScale(value=float(value))
    if isinstance(value, dict) and "kind" in value:  # as Precision.state_dict writes it
        kinds: dict[str, Any] = {c.__name__: c for c in (DynamicScale, FixedScale, NoScale)}
        scale: Scale = kinds[value["kind"]](**{k: v for k, v in value.items() if k != "kind"})
        return scale
    if value == "dynamic":
        return DynamicScale()
    if value == "none":
        return NoScale()
    expected = "'dynamic', 'none', a positive number or a DynamicScale / FixedScale / NoScale"
    raise ValueError(f"scale: expected {expected}, received {value!r}")


def _check_skips(max_skips: int, on_skips: str) -> None:
    _expect(max_skips >= 1, "max_skips", "at least 1 skipped update", max_skips)
    _expect(
        on_skips in ("raise", "bf16", "fp32"), "on_skips", "'raise', 'bf16' or 'fp32'", on_skips
    )


def _positive(name: str, value: float) -> None:
    _expect(0 < value < float("inf"), name, "a positive finite number", value)


def _expect(ok: bool, name: str, expected: str, received: object) -> None:
    if not ok:
        raise ValueError(f"{name}: expected {expected}, received {received!r}")
