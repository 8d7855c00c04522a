"""What happens when gradients will not become finite: a named error, or another precision."""

import warnings
from typing import TYPE_CHECKING

import torch

from halfstep.errors import NonFiniteError, Notice
from halfstep.precision import NoScale, Precision
from halfstep.step.state__record import UpdateResult
from halfstep.utils.device_values import AsyncHostRead

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep


def nonfinite_names(step: "TrainStep", most: int = 6) -> str:
    """The parameters whose gradients were non-finite at the last skip, by name."""
    bad = [name for name, flag in zip(step.names, step.state.bad.tolist(), strict=True) if flag]
    more = f" and {len(bad) - most} more" if len(bad) > most else ""
    return (", ".join(bad[:most]) + more) or "none that is still known"


def nonfinite_error(step: "TrainStep", at: int) -> NonFiniteError:
    """The error of nonfinite="raise" for the update that ended at step `at`."""
    return NonFiniteError(
        f"step {at}: non-finite gradient in {nonfinite_names(step)}. Nothing of this update was committed. "
        "Look for log(0), 0/0 or a learning rate that diverged; "
        "nonfinite='skip' drops such updates, nonfinite='ignore' applies them."
    )


def check_after_update(step: "TrainStep", outcome: UpdateResult) -> None:
    """Raises or switches when skips go on. Deciding on the device, it learns of them some updates late."""
    state = step.state
    if (
        outcome.skipped is step.update.true
    ):  # the host decided, a first update under decide="device" too
        halted = step.cycles_ended * (step.options.nonfinite == "raise")
        raise_or_fall_back(step, halted, int(step.host_reads.read(state.streak)))
    elif step.decides_on_device:
        news = step.device_watch.poll(
            lambda: torch.stack([state.halted, state.streak]), step.device
        )
        raise_or_fall_back(step, *(news or (0, 0)))


def raise_or_fall_back(step: "TrainStep", halted: int, skips: int) -> None:
    """What the device reports: the number of the cycle that nonfinite="raise" stopped at (0: none), skips in a row."""
    if halted:
        error = nonfinite_error(step, step.last_steps.get(halted, step.state.steps))
        step.state.halted.zero_()  # the user knows now, and may go on
        step.device_watch = AsyncHostRead(every_calls=16)
        raise error
    handle_skip_streak(step, skips)


def handle_skip_streak(step: "TrainStep", skips: int) -> None:
    """After max_skips skipped updates in a row: raise, or go on in bf16 or fp32, as the scale says."""
    scale = step.precision.loss_scale
    if isinstance(scale, NoScale) or skips < scale.max_skips:
        return
    at = f"step {step.state.steps}, scale {step.state.scale.item():g}"
    said = f"{at}: {skips} updates in a row overflowed, in {nonfinite_names(step)}"
    if scale.on_skips == "raise":
        advice = "A learning rate that diverges does this in any precision: try a smaller one first. If gradients are that"
        raise NonFiniteError(
            f"{said}. {advice} large, use dtype='bfloat16', 'fp32', or on_skips='bf16'."
        )
    fallback = _fallback(step.precision, scale.on_skips)
    warnings.warn(f"{said}; going on in {fallback.name} ({fallback.compute})", Notice, stacklevel=6)
    step.switch(fallback)


def check_fallback(precision: Precision) -> None:
    """Refuses an on_skips that could not be carried out when it is needed."""
    to = getattr(precision.loss_scale, "on_skips", "raise")
    if to == "raise":
        return
    try:
        other = _fallback(precision, to)
        same = (other.params, other.rounding) == (precision.params, precision.rounding)
    except ValueError:
        same = False
    if not same:
        can = "O1, O2 and O3 can go on in bf16 or fp32"
        raise ValueError(
            f"on_skips: expected 'raise' for {precision.name!r}, received {to!r}; {can}"
        )


def fallback_precision(precision: Precision) -> Precision | None:
    """What a run in this precision goes on in when skips do not end; None: it raises."""
    to = getattr(precision.loss_scale, "on_skips", "raise")
    return None if to == "raise" else _fallback(precision, to)


def _fallback(precision: Precision, to: str) -> Precision:
    if to == "fp32":
        return Precision("fp32")
    return Precision(
        precision.name,
        dtype="bfloat16",
        keep=precision.rules,
        keep_batchnorm_fp32=precision.keep_batchnorm_fp32,
        kernels=precision.kernels,
    )
