"""The settings of a GradScaler, checked at construction."""

from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

import torch

from halfstep.amp.autocast import accelerator

OnSkips: TypeAlias = Literal["raise", "bf16", "fp32"]
Skip: TypeAlias = Literal["each", "all"]
FALLBACKS = {"bf16": torch.bfloat16, "fp32": torch.float32}
SKIPS = ("each", "all")
TINY, MAX = (
    torch.finfo(torch.float32).tiny,
    torch.finfo(torch.float32).max,
)  # the scale is a float32


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What torch's scaler does not have: bounds of the scale, how optimizers skip, how many skips are too many."""

    floor: float = 2.0**-14
    cap: float | None = None
    skip: Skip = "each"
    max_skips: int = 50
    on_skips: OnSkips = "raise"

    def __post_init__(self) -> None:
        if not _within(self.floor, 0, MAX):
            refuse(
                "floor", "a finite number, 0 for no floor", self.floor, "leave the default 2**-14"
            )
        if self.cap is not None and not _within(self.cap, max(TINY, self.floor), MAX):
            refuse(
                "cap",
                f"None or a finite number of at least floor={self.floor}",
                self.cap,
                "pass None for no cap",
            )
        if self.skip not in SKIPS:
            refuse("skip", "'each' or 'all'", self.skip, "choose 'each' for torch's way")
        if not _is_count(self.max_skips) or self.max_skips < 1:
            refuse("max_skips", "an int of at least 1", self.max_skips, "leave the default 50")
        if self.on_skips not in ("raise", *FALLBACKS):
            refuse(
                "on_skips", "'raise', 'bf16' or 'fp32'", self.on_skips, "choose 'raise' to be told"
            )

    def check(self, field: str, scale: Any) -> float:
        """`scale` as a float, refused outside [floor, cap] and outside float32."""
        if isinstance(scale, str):
            refuse(
                field, "a positive number", scale, f"name the device: GradScaler(device={scale!r})"
            )
        if not _within(scale, TINY, MAX):
            refuse(
                field,
                "a positive finite number",
                scale,
                "leave the default 2**16 or choose a power of two",
            )
        if not self.floor <= scale <= (self.cap or MAX):
            refuse(
                field, f"between floor={self.floor} and cap={self.cap}", scale, "move floor or cap"
            )
        return float(scale)


def check_growth(growth_factor: float, backoff_factor: float, growth_interval: int) -> None:
    """Refuse what would make the scale stand still, vanish or explode."""
    if not _within(growth_factor, 1, MAX) or growth_factor == 1:
        refuse(
            "growth_factor",
            "a finite number above 1",
            growth_factor,
            "pass growth_interval=0 for a fixed scale",
        )
    if not _within(backoff_factor, TINY, 1) or backoff_factor == 1:
        refuse(
            "backoff_factor",
            "a number between 0 and 1",
            backoff_factor,
            "pass growth_interval=0 for a fixed scale",
        )
    if not _is_count(growth_interval) or growth_interval < 0:
        refuse(
            "growth_interval",
            "an int, 0 for a fixed scale",
            growth_interval,
            "leave the default 2000",
        )


def check_device(device: str | torch.device | None, enabled: bool) -> str:
    """The device type of the scale: the accelerator, or "cpu" where there is none."""
    there = accelerator()
    kind = there if device is None else torch.device(device).type
    if enabled and kind not in ("cpu", there):
        has = " or ".join(sorted({"cpu", there}))
        refuse("device", f"one that this machine has ({has})", kind, "leave device=None")
    return kind if enabled else there


def _within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def refuse(field: str, expected: str, received: object, advice: str) -> NoReturn:
    """The one form of a refusal."""
    raise ValueError(f"{field}: expected {expected}, received {received!r}, do {advice}")
