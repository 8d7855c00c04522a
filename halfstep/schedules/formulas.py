"""Schedules by formula. Those of MindSpore's ResNet program give its tables bit for bit in float32.

Each function checks its settings and returns a Schedule. The formulas are at the end of the file:
functions of a module, so that a schedule can be pickled and compared.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import Tensor

from halfstep.schedules.schedule import Schedule, Settings, check_rate, check_updates, is_number


def constant(lr: float) -> Schedule:
    """The same rate at every update, without end."""
    return Schedule("constant", _constant, (("lr", check_rate("constant: lr", lr)),))


def steps(
    lr: float,
    updates: int,
    *,
    milestones: Iterable[float] = (0.3, 0.6, 0.8),
    factors: Iterable[float] = (0.1, 0.01, 0.001),
    warmup: int = 0,
    start: float = 0.0,
) -> Schedule:
    """lr, then lr · factor from each milestone on.

    A float as a milestone is a fraction of `updates`, an int an update number.
    """
    settings = _warmup_settings("steps", lr, updates, warmup, start)
    milestones = tuple(milestones)
    factors = tuple(check_rate("steps: factors", factor) for factor in factors)

    numbers = [_update_of(milestone, updates) for milestone in milestones if is_number(milestone)]
    all_numbers = len(numbers) == len(milestones)
    all_inside = all(0 < number < updates for number in numbers)
    increasing = sorted(set(numbers)) == numbers
    if not (all_numbers and all_inside and increasing):
        raise ValueError(
            f"steps: expected increasing milestones inside {updates} updates, floats as fractions "
            f"and ints as update numbers, received {milestones}"
        )
    if len(factors) != len(milestones):
        raise ValueError(
            "steps: expected one factor per milestone, "
            f"received {len(factors)} for {len(milestones)}"
        )
    settings = (*settings, ("milestones", milestones), ("factors", factors))
    return Schedule("steps", _steps, settings, updates)


def poly(lr: float, updates: int, *, warmup: int = 0, start: float = 0.0) -> Schedule:
    """From `start` up to lr over `warmup` updates, then down to 0 as the square of what is left."""
    settings = _warmup_settings("poly", lr, updates, warmup, start)
    return Schedule("poly", _poly, settings, updates)


def linear(
    lr: float, updates: int, *, warmup: int = 0, start: float = 0.0, end: float = 0.0
) -> Schedule:
    """From `start` up to lr over `warmup` updates, then straight down towards `end`.

    Update number `updates`, the first past the last, would have the rate `end`.
    """
    settings = _warmup_settings("linear", lr, updates, warmup, start)
    settings = (*settings, ("end", check_rate("linear: end", end)))
    return Schedule("linear", _linear, settings, updates)


def cosine(
    lr: float, updates: int, *, warmup: int = 0, start: float = 0.0, end: float = 0.0
) -> Schedule:
    """From `start` up to lr over `warmup` updates, then half a cosine towards `end`.

    Update number `updates`, the first past the last, would have the rate `end`.
    """
    settings = _warmup_settings("cosine", lr, updates, warmup, start)
    settings = (*settings, ("end", check_rate("cosine: end", end)))
    return Schedule("cosine", _cosine, settings, updates)


def warmup_cosine(lr: float, updates: int, *, warmup: int = 0) -> Schedule:
    """MindSpore's: up from lr / warmup, then a straight line times a cosine of 0.47 turns.

    The rate drops at the end of the warm-up, because the cosine has begun with the first update.
    """
    settings = _warmup_settings("warmup_cosine", lr, updates, warmup, 0.0)
    without_start = settings[:3]
    return Schedule("warmup_cosine", _warmup_cosine, without_start, updates)


def one_cycle(
    lr: float,
    updates: int,
    *,
    rise: float = 0.3,
    div: float = 25.0,
    final_div: float = 1e4,
    shape: Literal["cos", "linear"] = "cos",
) -> Schedule:
    """torch's OneCycleLR: up from lr / div to lr, then down to lr / div / final_div.

    `rise` is the fraction of the updates that goes up.
    """
    if shape not in ("cos", "linear"):
        raise ValueError(f"one_cycle: expected shape 'cos' or 'linear', received {shape!r}")
    if not is_number(rise) or not 0 <= rise < 1:
        raise ValueError(
            f"one_cycle: expected rise as a fraction from 0 to below 1, received {rise!r}"
        )
    for name, value in (("div", div), ("final_div", final_div)):
        if not is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"one_cycle: expected {name} as a positive number, received {value!r}")
    settings = (
        ("lr", check_rate("one_cycle: lr", lr)),
        ("updates", check_updates("one_cycle: updates", updates, minimum=1)),
        ("rise", rise),
        ("div", float(div)),
        ("final_div", float(final_div)),
        ("shape", shape),
    )
    return Schedule("one_cycle", _one_cycle, settings, updates)


def sequence(values: Iterable[float] | Tensor, *, name: str = "sequence") -> Schedule:
    """The rates themselves, one for each update; past the last there is none."""
    plain_values = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(plain_values, Iterable) or isinstance(plain_values, str):
        raise TypeError(
            f"{name}: expected numbers, one per update, received {type(values).__name__}"
        )
    rates = []
    for update, value in enumerate(plain_values):
        rates.append(check_rate(f"{name}: rate of update {update}", value))
    if not rates:
        raise ValueError(f"{name}: expected at least one rate, received none")
    return Schedule(name, _sequence, (("values", tuple(rates)),), len(rates))


def function(fn: Callable[[int], float]) -> Schedule:
    """Any function of the update number; it is called once for each update of a table."""
    if not callable(fn):
        raise TypeError(
            f"function: expected a function update -> rate, received {type(fn).__name__}"
        )
    return Schedule("function", _function, (("fn", fn),))


def per_epoch(schedule: Any, updates: int) -> Schedule:
    """A Schedule whose position is the epoch: each of its rates holds for `updates` updates."""
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"per_epoch: expected a schedule, received {type(schedule).__name__}; wrap it: "
            "sequence([...]), or from_torch(scheduler, updates, every=...) for a scheduler of torch"
        )
    updates = check_updates("per_epoch: updates", updates, minimum=1)
    length = None if schedule.length is None else schedule.length * updates
    return Schedule("per_epoch", _per_epoch, (("schedule", schedule), ("updates", updates)), length)


def _warmup_settings(name: str, lr: Any, updates: Any, warmup: Any, start: Any) -> Settings:
    """The settings that schedules with a warm-up share, checked: lr, updates, warmup, start."""
    lr = check_rate(f"{name}: lr", lr)
    updates = check_updates(f"{name}: updates", updates, minimum=1)
    warmup = check_updates(f"{name}: warmup", warmup, minimum=0)
    if warmup > updates:
        raise ValueError(
            f"{name}: expected a warm-up within its {updates} updates, received {warmup}"
        )
    start = check_rate(f"{name}: start", start)
    return (("lr", lr), ("updates", updates), ("warmup", warmup), ("start", start))


# The formulas. Their order of operations is part of the contract: another order gives other bits.


def _constant(update: int, lr: float) -> float:
    return lr


def _warm_up(update: int, lr: float, warmup: int, start: float) -> float:
    return start + (lr - start) * update / warmup


def _update_of(milestone: float, updates: int) -> float:
    """The update at which a milestone lies."""
    return milestone * updates if isinstance(milestone, float) else milestone


def _steps(
    update: int,
    lr: float,
    updates: int,
    warmup: int,
    start: float,
    milestones: tuple[float, ...],
    factors: tuple[float, ...],
) -> float:
    if update < warmup:
        return _warm_up(update, lr, warmup, start)
    passed = sum(update >= _update_of(milestone, updates) for milestone in milestones)
    return lr * factors[passed - 1] if passed else lr


def _poly(update: int, lr: float, updates: int, warmup: int, start: float) -> float:
    if update < warmup:
        return start + (lr - start) / warmup * update  # not _warm_up: here the division comes first
    remaining = 1.0 - (update - warmup) / (updates - warmup)
    return lr * remaining * remaining


def _linear(update: int, lr: float, updates: int, warmup: int, start: float, end: float) -> float:
    if update < warmup:
        return _warm_up(update, lr, warmup, start)
    return lr - (lr - end) * (update - warmup) / (updates - warmup)


def _cosine(update: int, lr: float, updates: int, warmup: int, start: float, end: float) -> float:
    if update < warmup:
        return _warm_up(update, lr, warmup, start)
    angle = math.pi * (update - warmup) / (updates - warmup)
    return end + (lr - end) * (1 + math.cos(angle)) / 2


def _warmup_cosine(update: int, lr: float, updates: int, warmup: int) -> float:
    if update < warmup:
        return lr / warmup * (update + 1)
    decay_updates = updates - warmup
    angle = math.pi * 2 * 0.47 * update / decay_updates  # counts the warm-up too, as MindSpore does
    wave = 0.5 * (1 + math.cos(angle))
    return lr * ((updates - update) / decay_updates * wave + 0.00001)


def _one_cycle(
    update: int,
    lr: float,
    updates: int,
    rise: float,
    div: float,
    final_div: float,
    shape: Literal["cos", "linear"],
) -> float:
    peak = float(rise * updates) - 1
    initial_lr = lr / div
    if peak > 0 and update <= peak:
        first = initial_lr
        last = lr
        fraction = update / peak
    else:
        first = lr
        last = initial_lr / final_div
        fraction = (update - peak) / (updates - 1 - peak)
    if shape == "linear":
        return (last - first) * fraction + first
    return last + (first - last) / 2.0 * (math.cos(math.pi * fraction) + 1)


def _sequence(update: int, values: tuple[float, ...]) -> float:
    return values[update]


def _function(update: int, fn: Callable[[int], float]) -> float:
    name = getattr(fn, "__name__", "the function")
    return check_rate(f"the rate that {name} gives at update {update}", fn(update))


def _per_epoch(update: int, schedule: Schedule, updates: int) -> float:
    return schedule.at(update // updates)
