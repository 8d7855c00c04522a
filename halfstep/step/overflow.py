"""What happens when gradients will not become finite: a named error, or another precision.

A host that decides about updates knows at once. Where the device decides, the host learns of it
later: in a loop of your own after 16 updates or more, from the counters `halted` and `streak` of
StepState (`check_after_update`); in `fit` and `hs.sink` at the next visit, from `halted` and from
what became of each step, so that a streak that is over by then is seen too (`raise_device_errors`).
"""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from halfstep.errors import NonFiniteError, Notice
from halfstep.precision import Precision
from halfstep.step.state import UpdateResult
from halfstep.utils.device_values import AsyncHostRead, read_to_host
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.text import list_some

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

POLL_EVERY_UPDATES = 16  # how often the device's counters are copied to the host

# So many skipped updates in a row are no search for the scale any more, which begins at 2^16 and
# needs a few; `fit` warns, and weights from before the streak are the better ones to go on from.
LONG_STREAK = 10

MAX_NAMES = 6  # parameters that a message names


def nonfinite_names(step: "TrainStep") -> str:
    """The parameters whose gradients were non-finite at the last skip, for a message."""
    flags = step.state.bad.tolist()
    names = [name for name, flag in zip(step.names, flags, strict=True) if flag]
    return list_some(names, MAX_NAMES) or "none that is still known"


def nonfinite_error(step: "TrainStep", at_step: int) -> NonFiniteError:
    """The error of nonfinite="raise" for the update that ended at that step."""
    return NonFiniteError(
        f"step {at_step}: non-finite gradient in {nonfinite_names(step)}. "
        "Nothing of this update was committed. "
        "Look for log(0), 0/0 or a learning rate that diverged; "
        "nonfinite='skip' drops such updates, nonfinite='ignore' applies them."
    )


class StepOutcome(Protocol):
    """What a step's row says of its update. Inside an open cycle both flags are False."""

    @property
    def skipped(self) -> bool: ...

    @property
    def updated(self) -> bool: ...

    @property
    def scale(self) -> float: ...  # that the step used


class SkipStreak(NamedTuple):
    """Too many skipped updates in a row."""

    at_step: int  # the one whose skip was one too many
    skips: int  # in a row, up to there
    scale: float  # after it


def check_after_update(step: "TrainStep", result: UpdateResult) -> None:
    """Raises or changes the precision where an update was stopped, or skips go on too long."""
    state = step.state
    # The flag is the host's own constant where the host decided. It also decides a parameter's
    # first update under decide="device".
    if result.skipped is step.update.true:
        halted_cycle = step.cycles_ended if step.options.nonfinite == "raise" else 0
        skips_in_a_row = int(step.host_reads.read(state.streak))
        raise_or_fall_back(step, halted_cycle, _streak_at(step, skips_in_a_row, state.steps))
    elif step.decides_on_device:
        counters = step.device_watch.poll(
            lambda: torch.stack([state.halted, state.streak, step.update.cycles_ended]), step.device
        )
        if counters is not None:
            raise_for_counters(step, *counters)


def raise_device_errors(step: "TrainStep", outcomes: Sequence[StepOutcome] = ()) -> None:
    """Raises, or changes the precision, for what the device has run into: one wait for it.

    `outcomes` are those of the steps since the last visit, which are the newest ones. A streak is
    noticed also if it ended among them.
    """
    counters = torch.stack([step.state.halted, step.state.streak])
    halted_cycle, skips_in_a_row = read_to_host(counters)
    streak = _find_streak(step, outcomes) or step.postponed_streak
    step.skips_at_visit = skips_in_a_row

    # Inside a cycle no precision can change: the fallback waits for the cycle's end.
    falls_back = step.precision.loss_scale.on_skips != "raise"
    step.postponed_streak = None
    if falls_back and step.state.cycle.micro > 0:
        step.postponed_streak = streak
        streak = None
    raise_or_fall_back(step, halted_cycle, streak)


def raise_for_counters(
    step: "TrainStep", halted_cycle: int, skips_in_a_row: int, cycles_ended: int
) -> None:
    """Acts on the device's counters: the streak was one too long that many cycles ago."""
    max_skips = getattr(step.precision.loss_scale, "max_skips", skips_in_a_row)
    cycle = cycles_ended - max(skips_in_a_row - max_skips, 0)
    at_step = step.last_steps.get(cycle, step.state.steps)
    raise_or_fall_back(step, halted_cycle, _streak_at(step, skips_in_a_row, at_step))


def raise_or_fall_back(step: "TrainStep", halted_cycle: int, streak: SkipStreak | None) -> None:
    """Acts on the cycle that nonfinite="raise" stopped at (0: none), else on a streak of skips."""
    if halted_cycle:
        error = nonfinite_error(step, step.last_steps.get(halted_cycle, step.state.steps))
        step.state.halted.zero_()  # the user knows now, and may continue
        step.device_watch = AsyncHostRead(every_calls=POLL_EVERY_UPDATES)
        raise error
    if streak is not None:
        _handle_streak(step, streak)


def _streak_at(step: "TrainStep", skips_in_a_row: int, at_step: int) -> SkipStreak | None:
    """The streak that the counters show, if it is too long."""
    loss_scale = step.precision.loss_scale
    if loss_scale.is_active and skips_in_a_row >= loss_scale.max_skips:
        return SkipStreak(at_step, skips_in_a_row, step.state.scale.item())
    return None


def _find_streak(step: "TrainStep", outcomes: Sequence[StepOutcome]) -> SkipStreak | None:
    """The first skip among the outcomes that was one too many in a row.

    The streak may have begun before them.
    """
    loss_scale = step.precision.loss_scale
    if not loss_scale.is_active:
        return None
    in_a_row = step.skips_at_visit
    first_step = step.state.steps - len(outcomes) + 1
    for i, outcome in enumerate(outcomes):
        if outcome.updated:
            in_a_row = 0
        if outcome.skipped:
            in_a_row += 1
        if outcome.skipped and in_a_row >= loss_scale.max_skips:
            is_last = i + 1 == len(outcomes)
            scale = step.state.scale.item() if is_last else outcomes[i + 1].scale
            return SkipStreak(first_step + i, in_a_row, scale)
    return None


def _handle_streak(step: "TrainStep", streak: SkipStreak) -> None:
    """After max_skips skipped updates in a row: raises, or continues in bf16 or fp32."""
    message = (
        f"step {streak.at_step}, scale {streak.scale:g}: "
        f"{streak.skips} updates in a row overflowed, in {nonfinite_names(step)}"
    )
    fallback = fallback_precision(step.precision)
    if fallback is None:
        raise NonFiniteError(
            f"{message}. A learning rate that diverges does this in any precision: "
            "try a smaller one first. If gradients are that large, use dtype='bfloat16', 'fp32', "
            "or on_skips='bf16'."
        )
    warnings.warn(
        f"{message}; going on in {fallback.name} ({fallback.compute})",
        Notice,
        stacklevel=user_stacklevel(),
    )
    step.switch(fallback)


def check_fallback(precision: Precision) -> None:
    """Refuses an on_skips that could not be carried out when it is needed."""
    on_skips = precision.loss_scale.on_skips
    if on_skips == "raise":
        return
    try:
        fallback = _build_fallback(precision, on_skips)
        stored_before = (precision.params, precision.rounding)
        can_switch = (fallback.params, fallback.rounding) == stored_before
    except ValueError:
        can_switch = False
    if not can_switch:
        raise ValueError(
            f"on_skips: expected 'raise' for {precision.name!r}, received {on_skips!r}; "
            "O1, O2 and O3 can go on in bf16 or fp32"
        )


def fallback_precision(precision: Precision) -> Precision | None:
    """The precision that a run continues in when skips do not end; None: it raises."""
    on_skips = precision.loss_scale.on_skips
    if on_skips == "raise":
        return None
    return _build_fallback(precision, on_skips)


def _build_fallback(precision: Precision, on_skips: str) -> Precision:
    if on_skips == "fp32":
        return Precision("fp32")
    return Precision(
        precision.name,
        dtype="bfloat16",
        keep=precision.rules,
        keep_batchnorm_fp32=precision.keep_batchnorm_fp32,
        kernels=precision.kernels,
    )
