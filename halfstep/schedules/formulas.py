"""Schedules by formula. Those of MindSpore's ResNet program give its tables bit for bit, in float32."""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

from torch import Tensor

from halfstep.schedules.schedule import Schedule, is_number, rate_of, whole_of


def constant(lr: float) -> Schedule:
    """The same rate at every update, without end."""
    return Schedule("constant", _constant, (("lr", rate_of(lr, "constant: lr")),))


def steps(
    lr: float,
    updates: int,
    *,
    milestones: Iterable[float] = (0.3, 0.6, 0.8),
    factors: Iterable[float] = (0.1, 0.01, 0.001),
    warmup: int = 0,
    start: float = 0.0,
) -> Schedule:
    """lr, then lr·factor from each milestone on: a float is a fraction of `updates`, an int an update number."""
    settings = _ramp("steps", lr, updates, warmup, start)
    ms, fs = tuple(milestones), tuple(rate_of(f, "steps: factors") for f in factors)
    places = [_place(m, updates) for m in ms if is_number(m)]
    inside = all(0 < place < updates for place in places)
    if len(places) != len(ms) or not inside or sorted(set(places)) != places:
        expected = f"increasing milestones inside {updates} updates, floats as fractions and ints as update numbers"
        raise ValueError(f"steps: expected {expected}, received {ms}")
    if len(ms) != len(fs):
        raise ValueError(
            f"steps: expected one factor per milestone, received {len(fs)} for {len(ms)}"
        )
    return Schedule("steps", _steps, (*settings, ("milestones", ms), ("factors", fs)), updates)


def poly(lr: float, updates: int, *, warmup: int = 0, start: float = 0.0) -> Schedule:
    """From `start` up to lr over `warmup` updates, then down to 0 as the square of what is left."""
    return Schedule("poly", _poly, _ramp("poly", lr, updates, warmup, start), updates)


def linear(
    lr: float, updates: int, *, warmup: int = 0, start: float = 0.0, end: float = 0.0
) -> Schedule:
    """From `start` up to lr over `warmup` updates, then straight towards `end`, which update number `updates` has."""
    last = ("end", rate_of(end, "linear: end"))
    return Schedule(
        "linear", _linear, (*_ramp("linear", lr, updates, warmup, start), last), updates
    )


def cosine(
    lr: float, updates: int, *, warmup: int = 0, start: float = 0.0, end: float = 0.0
) -> Schedule:
    """From `start` up to lr over `warmup` updates, then half a cosine towards `end`, as linear() gets there."""
    last = ("end", rate_of(end, "cosine: end"))
    return Schedule(
        "cosine", _cosine, (*_ramp("cosine", lr, updates, warmup, start), last), updates
    )


def warmup_cosine(lr: float, updates: int, *, warmup: int = 0) -> Schedule:
    """MindSpore's: up from lr/warmup, then straight line × cosine of 0.47 turns; drops at the end of the warm-up."""
    settings = _ramp("warmup_cosine", lr, updates, warmup, 0.0)[:3]
    return Schedule("warmup_cosine", _warmup_cosine, settings, updates)


def one_cycle(
    lr: float,
    updates: int,
    *,
    rise: float = 0.3,
    div: float = 25.0,
    final_div: float = 1e4,
    shape: Literal["cos", "linear"] = "cos",
) -> Schedule:
    """From lr/div up to lr in the first `rise` of the updates, then down to lr/div/final_div: torch's OneCycleLR."""
    if shape not in ("cos", "linear"):
        raise ValueError(f"one_cycle: expected shape 'cos' or 'linear', received {shape!r}")
    if not is_number(rise) or not 0 <= rise < 1:
        raise ValueError(
            f"one_cycle: expected rise as a fraction from 0 to below 1, received {rise!r}"
        )
    for name, value in (("div", div), ("final_div", final_div)):
        if not is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"one_cycle: expected {name} as a positive number, received {value!r}")
    settings = _ramp("one_cycle", lr, updates, 0, 0.0)[:2]
    rest = (("rise", rise), ("div", float(div)), ("final_div", float(final_div)), ("shape", shape))
    return Schedule("one_cycle", _one_cycle, (*settings, *rest), updates)


def sequence(values: Iterable[float] | Tensor, *, name: str = "sequence") -> Schedule:
    """The rates themselves, one per update; past the last there is none."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(listed, Iterable) or isinstance(listed, str):
        raise TypeError(
            f"{name}: expected numbers, one per update, received {type(values).__name__}"
        )
    rates = tuple(rate_of(v, f"{name}: rate of update {i}") for i, v in enumerate(listed))
    if not rates:
        raise ValueError(f"{name}: expected at least one rate, received none")
    return Schedule(name, _sequence, (("values", rates),), len(rates))


def function(fn: Callable[[int], float]) -> Schedule:
    """Any function of the update number; it is called once per update when the table is made."""
    if not callable(fn):
        raise TypeError(
            f"function: expected a function update -> rate, received {type(fn).__name__}"
        )
    return Schedule("function", _function, (("fn", fn),))


def per_epoch(schedule: Any, updates: int) -> Schedule:
    """A Schedule whose position is the epoch: each of its rates holds for `updates` updates."""
    if not isinstance(schedule, Schedule):
        advice = (
            "sequence([...]), or from_torch(scheduler, updates, every=...) for a scheduler of torch"
        )
        raise TypeError(
            f"per_epoch: expected a schedule, received {type(schedule).__name__}; wrap it: {advice}"
        )
    each = whole_of(updates, "per_epoch: updates", least=1)
    length = None if schedule.length is None else schedule.length * each
    return Schedule("per_epoch", _per_epoch, (("schedule", schedule), ("updates", each)), length)


def _ramp(name: str, lr: Any, updates: Any, warmup: Any, start: Any) -> tuple[tuple[str, Any], ...]:
    """The settings that schedules with a warm-up share, checked."""
    peak, total = rate_of(lr, f"{name}: lr"), whole_of(updates, f"{name}: updates", least=1)
    up = whole_of(warmup, f"{name}: warmup", least=0)
    if up > total:
        raise ValueError(f"{name}: expected a warm-up within its {total} updates, received {up}")
    return (
        ("lr", peak),
        ("updates", total),
        ("warmup", up),
        ("start", rate_of(start, f"{name}: start")),
    )


# The order of operations below is part of the contract: another order gives other bits.


def _constant(update: int, lr: float) -> float:
    return lr


def _up(update: int, lr: float, warmup: int, start: float) -> float:
    return start + (lr - start) * update / warmup


def _place(milestone: float, updates: int) -> float:
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
        return _up(update, lr, warmup, start)
    passed = sum(update >= _place(m, updates) for m in milestones)
    return lr * factors[passed - 1] if passed else lr


def _poly(update: int, lr: float, updates: int, warmup: int, start: float) -> float:
    if update < warmup:
        return start + (lr - start) / warmup * update  # not _up: the division comes first here
    left = 1.0 - (update - warmup) / (updates - warmup)
    return lr * left * left


def _linear(update: int, lr: float, updates: int, warmup: int, start: float, end: float) -> float:
    if update < warmup:
        return _up(update, lr, warmup, start)
    return lr - (lr - end) * (update - warmup) / (updates - warmup)


def _cosine(update: int, lr: float, updates: int, warmup: int, start: float, end: float) -> float:
    if update < warmup:
        return _up(update, lr, warmup, start)
    turn = math.pi * (update - warmup) / (updates - warmup)
    return end + (lr - end) * (1 + math.cos(turn)) / 2


def _warmup_cosine(update: int, lr: float, updates: int, warmup: int) -> float:
    if update < warmup:
        return lr / warmup * (update + 1)
    decay = updates - warmup
    wave = 0.5 * (
        1 + math.cos(math.pi * 2 * 0.47 * update / decay)
    )  # the warm-up counts in the angle
    return lr * ((updates - update) / decay * wave + 0.00001)


def _one_cycle(
    update: int,
    lr: float,
    updates: int,
    rise: float,
    div: float,
    final_div: float,
    shape: Literal["cos", "linear"],
) -> float:
    peak, low = float(rise * updates) - 1, lr / div
    if peak > 0 and update <= peak:
        first, last, part = low, lr, update / peak
    else:
        first, last, part = lr, low / final_div, (update - peak) / (updates - 1 - peak)
    if shape == "linear":
        return (last - first) * part + first
    return last + (first - last) / 2.0 * (math.cos(math.pi * part) + 1)


def _sequence(update: int, values: tuple[float, ...]) -> float:
    return values[update]


def _function(update: int, fn: Callable[[int], float]) -> float:
    return rate_of(
        fn(update),
        f"the rate that {getattr(fn, '__name__', 'the function')} gives at update {update}",
    )


def _per_epoch(update: int, schedule: Schedule, updates: int) -> float:
    return schedule.at(update // updates)
