"""The settings of a GradScaler, checked at construction."""

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, NoReturn, TypeAlias, TypeVar, cast

import torch

from halfstep.amp.autocast import default_device_type
from halfstep.errors import Notice

Init = TypeVar("Init", bound=Callable[..., None])

OnSkips: TypeAlias = Literal["raise", "bf16", "fp32"]
Skip: TypeAlias = Literal["each", "all"]
FALLBACK_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
SKIPS = ("each", "all")

# The scale is a float32: the smallest normal and the largest one.
MIN_SCALE = torch.finfo(torch.float32).tiny
MAX_SCALE = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True)
class ScalerSettings:
    """Settings that torch's scaler does not have.

    Bounds of the scale, how several optimizers skip, and how many skips in a row are too many.
    """

    floor: float = 2.0**-14
    cap: float | None = None
    skip: Skip = "each"
    max_skips: int | None = 50
    on_skips: OnSkips = "raise"

    def __post_init__(self) -> None:
        if not _is_number_within(self.floor, 0, MAX_SCALE):
            raise_expected(
                "floor",
                expected="a finite number, 0 for no floor",
                received=self.floor,
                advice="leave the default 2**-14",
            )
        lowest_cap = max(MIN_SCALE, self.floor)
        if self.cap is not None and not _is_number_within(self.cap, lowest_cap, MAX_SCALE):
            raise_expected(
                "cap",
                expected=f"None or a finite number of at least floor={self.floor}",
                received=self.cap,
                advice="pass None for no cap",
            )
        if self.skip not in SKIPS:
            raise_expected(
                "skip",
                expected="'each' or 'all'",
                received=self.skip,
                advice="choose 'each' for torch's way",
            )
        if self.max_skips is not None and (not _is_int(self.max_skips) or self.max_skips < 1):
            raise_expected(
                "max_skips",
                expected="an int of at least 1, or None for no limit",
                received=self.max_skips,
                advice="leave the default 50",
            )
        if self.on_skips not in ("raise", *FALLBACK_DTYPES):
            raise_expected(
                "on_skips",
                expected="'raise', 'bf16' or 'fp32'",
                received=self.on_skips,
                advice="choose 'raise' to be told",
            )

    def check_scale(self, argument: str, scale: Any) -> float:
        """`scale` as a float; a ValueError outside [floor, cap] and outside float32."""
        if isinstance(scale, str):
            raise_expected(
                argument,
                expected="a positive number",
                received=scale,
                advice="put the device first: GradScaler('cuda', init_scale), or name it: device=",
            )
        if not _is_number_within(scale, MIN_SCALE, MAX_SCALE):
            raise_expected(
                argument,
                expected="a positive finite number",
                received=scale,
                advice="leave the default 2**16 or choose a power of two",
            )
        if not self.floor <= scale <= (self.cap or MAX_SCALE):
            raise_expected(
                argument,
                expected=f"between floor={self.floor} and cap={self.cap}",
                received=scale,
                advice="move floor or cap",
            )
        return float(scale)


def check_growth(growth_factor: float, backoff_factor: float, growth_interval: int) -> None:
    """Raises a ValueError for what would make the scale stand still, vanish or explode."""
    if not _is_number_within(growth_factor, 1, MAX_SCALE) or growth_factor == 1:
        raise_expected(
            "growth_factor",
            expected="a finite number above 1",
            received=growth_factor,
            advice="pass growth_interval=0 for a fixed scale",
        )
    if not _is_number_within(backoff_factor, MIN_SCALE, 1) or backoff_factor == 1:
        raise_expected(
            "backoff_factor",
            expected="a number between 0 and 1",
            received=backoff_factor,
            advice="pass growth_interval=0 for a fixed scale",
        )
    if not _is_int(growth_interval) or growth_interval < 0:
        raise_expected(
            "growth_interval",
            expected="an int, 0 for a fixed scale",
            received=growth_interval,
            advice="leave the default 2000",
        )


def device_first(init: Init) -> Init:
    """`init` that also takes torch's order of arguments: a device before all others."""

    @functools.wraps(init)
    def init_in_either_order(self: object, *args: Any, **kwargs: Any) -> None:
        if not args or not isinstance(args[0], str | torch.device):
            return init(self, *args, **kwargs)
        device, *others = args
        if "device" in kwargs:
            raise TypeError(
                f"device: expected it once, received {device!r} and {kwargs['device']!r}"
            )
        return init(self, *others, device=device, **kwargs)

    return cast(Init, init_in_either_order)


def choose_device_type(device: str | torch.device | None) -> str:
    """The device type of the scale: the accelerator, or "cpu" where there is none."""
    default = default_device_type()
    if device is None:
        return default
    device_type = torch.device(device).type
    if device_type not in ("cpu", "cuda", default):
        present = " or ".join(sorted({"cpu", default}))
        raise_expected(
            "device",
            expected=f"one that this machine has ({present})",
            received=device_type,
            advice="leave device=None",
        )
    return device_type


def has_device(device_type: str) -> bool:
    """Whether the device is there. "cuda" may be missing: torch's scaler is then disabled too."""
    if device_type in ("cpu", default_device_type()):
        return True
    # Level 4 is the caller of GradScaler().
    warnings.warn(
        f"GradScaler(device={device_type!r}): expected CUDA, received a machine without it, so the "
        "scaler is disabled, as torch's is, and scales nothing; leave out the device for the one "
        "that is there",
        Notice,
        stacklevel=4,
    )
    return False


def raise_expected(argument: str, *, expected: str, received: object, advice: str) -> NoReturn:
    """Raises the ValueError for an argument, with advice at its end."""
    raise ValueError(f"{argument}: expected {expected}, received {received!r}, do {advice}")


def _is_number_within(value: Any, low: float, high: float) -> bool:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return is_number and low <= value <= high


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
