"""Which precision to use: one decision, by what a device can do and by what was measured on it.

`halfstep info` has the speed of single products, `halfstep bench` the time of steps, and `halfstep
compare` times and accuracies. All three ask `advise` and print what it says; the table of
docs/guide/choosing.md is `begin_with`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from halfstep.precision.cpu_half import has_native
from halfstep.precision.policy import BF16, F16, Precision

# A 16-bit product must be this many times as fast as an fp32 one: casts around it cost the rest.
MIN_PRODUCT_SPEEDUP = 1.5

# A precision is faster, or slower, if its step differs by more than this share. What is nearer may
# be chance.
FASTER_SHARE = 0.95

# Compute capabilities of CUDA devices, major number, from which on a dtype has units of its own.
FP16_SINCE = 7
BF16_SINCE = 8

DTYPE_NAMES = {F16: "fp16", BF16: "bf16"}

# The precision to begin with where a half dtype has units; bf16 first, as it needs no loss scale.
BEGIN_WITH = {"bf16": "O1+bf16", "fp16": "O1"}
SCALE_REMARKS = {"bf16": "needs no loss scale", "fp16": "has a loss scale that adapts by itself"}


@dataclass(frozen=True)
class HalfUnits:
    """The half dtypes that a device multiplies in hardware."""

    device: str
    """As a sentence names it: "CPU" or "GPU"."""
    dtypes: tuple[str, ...]
    """Those of "bf16" and "fp16" that it has units for."""

    def describe(self) -> str:
        """As in "this CPU has bf16 units"."""
        if not self.dtypes:
            return f"this {self.device} has no half-precision units"
        return f"this {self.device} has {' and '.join(self.dtypes)} units"


@dataclass(frozen=True)
class StepTime:
    """What was measured of one precision: the time of its step and, where compared, its verdict."""

    precision: str
    ms_per_step: float
    is_faster: bool
    """Whether it is at least 5 % faster than the reference in every seed, or in general."""
    verdict_kind: str | None = None
    """As in `compare/verdict.py`; None where no accuracies were compared."""
    verdict: str = ""


class Advice(NamedTuple):
    """The precision to use and the reason, as the end of a sentence."""

    precision: str
    reason: str


def find_half_units(device: torch.device) -> HalfUnits:
    """The half dtypes with units of their own: by a CPU's instructions, by a GPU's age."""
    if device.type == "cpu":
        native = {"bf16": has_native(BF16), "fp16": has_native(F16)}
        return HalfUnits("CPU", tuple(name for name in native if native[name]))
    if device.type != "cuda":
        return HalfUnits(device.type, ())
    major, _ = torch.cuda.get_device_capability(device)
    native = {"bf16": major >= BF16_SINCE, "fp16": major >= FP16_SINCE}
    return HalfUnits("GPU", tuple(name for name in native if native[name]))


def begin_with(units: HalfUnits) -> str:
    """The precision to begin with, by the units alone."""
    for dtype, precision in BEGIN_WITH.items():
        if dtype in units.dtypes:
            return precision
    return "fp32"


def precisions_to_compare(units: HalfUnits) -> tuple[str, ...]:
    """What to try on a device: fp32, then stored low, O1 and O2 in each half dtype with units.

    Without such units float16, which is emulated there: to see what it costs.
    """
    names = ["fp32"]
    if "fp16" in units.dtypes or not units.dtypes:
        names += ["fp16", "O1", "O2"]
    if "bf16" in units.dtypes:
        names += ["bf16", "O1+bf16", "O2+bf16"]
    return tuple(names)


def advise(
    units: HalfUnits,
    *,
    product_speedups: Mapping[str, float] | None = None,
    steps: Sequence[StepTime] = (),
) -> Advice:
    """The precision to use, by the best evidence there is.

    Times of steps (the first is the reference) decide before `product_speedups` (dtype → how many
    times as fast as fp32), and these before what the device has units for.
    """
    if steps:
        return _advise_by_steps(units, steps)
    return _advise_by_products(units, product_speedups or {})


def describe_pace(ms_per_step: float, reference_ms: float, reference: str) -> str:
    """ "1.31 × as slow as fp32", "1.9 × as fast as fp32", or "as fast as fp32" within 5 %."""
    share = ms_per_step / reference_ms
    if share < FASTER_SHARE:
        return f"{1 / share:.3g} × as fast as {reference}"
    if share * FASTER_SHARE > 1:
        return f"{share:.3g} × as slow as {reference}"
    return f"as fast as {reference}"


def why_slow(units: HalfUnits, precisions: Sequence[str]) -> str:
    """Why these precisions are not faster here; "" where half precision is not the reason."""
    low_dtypes = set()
    for name in precisions:
        compute = Precision.parse(name).compute
        if compute in DTYPE_NAMES:
            low_dtypes.add(DTYPE_NAMES[compute])
    if not low_dtypes:
        return ""
    if not units.dtypes:
        return units.describe()
    missing = sorted(low_dtypes - set(units.dtypes))
    native = sorted(low_dtypes & set(units.dtypes))
    reasons = []
    if missing:
        reasons.append(f"this {units.device} has no {' and '.join(missing)} units")
    if native:
        reasons.append(
            f"in a network of this size the {' and '.join(native)} units of this {units.device} "
            "save less than the casts cost"
        )
    return ", and ".join(reasons)


# By products, or by the units alone


def _advise_by_products(units: HalfUnits, speedups: Mapping[str, float]) -> Advice:
    for dtype, precision in BEGIN_WITH.items():
        if dtype not in units.dtypes:
            continue
        if dtype not in speedups:
            return Advice(precision, f"{units.describe()}, and {dtype} {SCALE_REMARKS[dtype]}")
        if speedups[dtype] >= MIN_PRODUCT_SPEEDUP:
            reason = (
                f"{dtype} products are {speedups[dtype]:.1f} × as fast as fp32, and it "
                f"{SCALE_REMARKS[dtype]}; a small network, whose casts cost more than that saves, "
                "stays with fp32"
            )
            return Advice(precision, reason)
    if units.dtypes:
        names = " and ".join(units.dtypes)
        return Advice("fp32", f"{names} products are not {MIN_PRODUCT_SPEEDUP} × as fast here")
    return Advice("fp32", f"{units.describe()}: half is for studying it here, not for speed")


# By steps


def _advise_by_steps(units: HalfUnits, steps: Sequence[StepTime]) -> Advice:
    """The fastest that is proved to be no worse; by times alone, the fastest."""
    reference, *others = steps
    if not others:
        return Advice(reference.precision, "the only precision that was run")
    proved = [step for step in others if step.verdict_kind in (None, "same", "better")]
    candidates = [step for step in proved if step.is_faster]
    if not candidates:
        return Advice(reference.precision, _why_reference(units, reference, others, proved))

    best = min(candidates, key=lambda step: step.ms_per_step)
    pace = describe_pace(best.ms_per_step, reference.ms_per_step, reference.precision)
    times = f"{best.ms_per_step:.3g} ms a step against {reference.ms_per_step:.3g}"
    if best.verdict_kind is None:
        reason = f"{pace} ({times})"
        return Advice(best.precision, reason)
    verdict = best.verdict
    if best.verdict_kind == "same":
        verdict = f"{verdict} as {reference.precision}"
        pace = pace.removesuffix(f" as {reference.precision}")
    return Advice(best.precision, f"{verdict}, and {pace} ({times})")


def _why_reference(
    units: HalfUnits,
    reference: StepTime,
    others: Sequence[StepTime],
    proved: Sequence[StepTime],
) -> str:
    if not proved:
        verdicts = "; ".join(f"{step.precision}: {step.verdict}" for step in others)
        reason = f"no other precision is proved to be as accurate ({verdicts})"
        timed = [step for step in others if math.isfinite(step.ms_per_step)]
        if not timed or any(step.is_faster for step in timed):
            return reason
        # Then more seeds would gain nothing.
        because = why_slow(units, [step.precision for step in timed])
        none_faster = "and none is faster here"
        return f"{reason}, {none_faster}: {because}" if because else f"{reason}, {none_faster}"

    names = ", ".join(step.precision for step in proved)
    verb = "is" if len(proved) == 1 else "are"
    slow = [step for step in proved if step.ms_per_step > reference.ms_per_step]
    if len(slow) == len(proved):
        listed = ", ".join(f"{step.ms_per_step:.3g}" for step in slow)
        pace = f"slower ({listed} ms a step against {reference.ms_per_step:.3g})"
    elif reference.verdict_kind is None:
        pace = "not faster by 5 % or more"
    else:
        pace = "not faster in every seed by 5 % or more"
    if reference.verdict_kind is None:
        return f"{names} {verb} {pace}"
    because = why_slow(units, [step.precision for step in slow])
    if because:
        pace = f"{pace}: {because}"
    undecided = ""
    unknown = [s.precision for s in others if s.is_faster and s.verdict_kind == "unknown"]
    if unknown:
        undecided = (
            f"; whether {', '.join(unknown)}, which is faster, is as accurate is not settled"
        )
    return f"{names} {verb} as accurate, but {pace}{undecided}"
