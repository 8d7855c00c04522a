"""What happens when gradients will not become finite: a named error, or another precision.

A host that decides about updates knows at once. Where the device decides, the host learns of it
later, from the counters `halted` and `streak` of StepState: in a loop of your own after 16 updates
or more (`check_after_update`), in `fit` and `hs.sink` at the next visit (`raise_device_errors`).
"""

import warnings
from typing import TYPE_CHECKING

import torch

from halfstep.errors import NonFiniteError, Notice
from halfstep.precision import Precision
from halfstep.step.state import UpdateResult
from halfstep.utils.device_values import AsyncHostRead, read_to_host
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


def check_after_update(step: "TrainStep", result: UpdateResult) -> None:
    """Raises or changes the precision where an update was stopped, or skips go on too long."""
    state = step.state
    # The flag is the host's own constant where the host decided. It also decides a parameter's
    # first update under decide="device".
    if result.skipped is step.update.true:
        halted_cycle = step.cycles_ended if step.options.nonfinite == "raise" else 0
        skips_in_a_row = int(step.host_reads.read(state.streak))
        raise_or_fall_back(step, halted_cycle, skips_in_a_row)
    elif step.decides_on_device:
        counters = step.device_watch.poll(
            lambda: torch.stack([state.halted, state.streak]), step.device
        )
        if counters is not None:
            raise_or_fall_back(step, *counters)


def raise_device_errors(step: "TrainStep") -> None:
    """Raises, or changes the precision, for what the device has run into: one wait for it."""
    counters = torch.stack([step.state.halted, step.state.streak])
    halted_cycle, skips_in_a_row = read_to_host(counters)
    # Inside a cycle no precision can change: the fallback waits for the cycle's end.
    falls_back = step.precision.loss_scale.on_skips != "raise"
    if falls_back and step.state.cycle.micro > 0:
        skips_in_a_row = 0
    raise_or_fall_back(step, halted_cycle, skips_in_a_row)


def raise_or_fall_back(step: "TrainStep", halted_cycle: int, skips_in_a_row: int) -> None:
    """Acts on the counters: the cycle that nonfinite="raise" stopped at (0: none), and skips."""
    if halted_cycle:
        error = nonfinite_error(step, step.last_steps.get(halted_cycle, step.state.steps))
        step.state.halted.zero_()  # the user knows now, and may continue
        step.device_watch = AsyncHostRead(every_calls=POLL_EVERY_UPDATES)
        raise error
    handle_skip_streak(step, skips_in_a_row)


def handle_skip_streak(step: "TrainStep", skips_in_a_row: int) -> None:
    """After max_skips skipped updates in a row: raises, or continues in bf16 or fp32."""
    loss_scale = step.precision.loss_scale
    if not loss_scale.is_active or skips_in_a_row < loss_scale.max_skips:
        return
    message = (
        f"step {step.state.steps}, scale {step.state.scale.item():g}: "
        f"{skips_in_a_row} updates in a row overflowed, in {nonfinite_names(step)}"
    )
    fallback = fallback_precision(step.precision)
    if fallback is None:
        raise NonFiniteError(
            f"{message}. A learning rate that diverges does this in any precision: "
            "try a smaller one first. If gradients are that large, use dtype='bfloat16', 'fp32', "
            "or on_skips='bf16'."
        )
    warnings.warn(
        f"{message}; going on in {fallback.name} ({fallback.compute})", Notice, stacklevel=6
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
