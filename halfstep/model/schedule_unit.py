"""Whether a schedule moves once per epoch or once per update.

torch's schedulers move once per epoch, as in most programs that build one; halfstep's own kinds of
schedules once per update. A scheduler that looks as if it counted updates is refused until
somebody says what it counts.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import getclosurevars
from typing import Any, Literal, NamedTuple, TypeAlias

from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from halfstep.schedules.torch_schedulers import check_is_table
from halfstep.utils.checks import one_of
from halfstep.utils.text import plural, write_line

Unit: TypeAlias = Literal["epoch", "update"]

UNITS = ("epoch", "update")

# The settings by which torch's schedulers call their own length.
LENGTH_SETTINGS = ("T_max", "total_iters", "step_size", "T_0", "milestones", "total_steps")

# Schedulers that are built for updates in nearly every program.
USUALLY_BY_UPDATE = (OneCycleLR, CyclicLR)

# In the name of a number that a function of the user's reads: it counts updates.
STEP_WORDS = ("step", "iter", "update")

# What torch's schedulers need besides the optimizer, as an example.
USUAL_SETTINGS = {
    "CosineAnnealingLR": "T_max=10",
    "CosineAnnealingWarmRestarts": "T_0=10",
    "ExponentialLR": "gamma=0.9",
    "MultiStepLR": "milestones=[5, 8]",
    "StepLR": "step_size=5",
}

OWN_SCHEDULE = "halfstep"  # stands for all but torch's schedulers in checkpoints


class UnitChoice(NamedTuple):
    """The unit of a schedule; why it is refused until somebody says one; what a notice says."""

    unit: Unit
    refusal: ValueError | None = None
    notice: str = ""


def check_unit(schedule: Any, every: Any) -> None:
    """Refuses a unit that there is not, and schedules of torch that are no tables of rates.

    A class in the place of a schedule is answered with the line that builds an object.
    """
    if every is not None:
        one_of("schedule_every", every, UNITS)
    if isinstance(schedule, type):
        name = schedule.__name__
        if schedule is ReduceLROnPlateau:
            line = "model.fit(2, data, valid=data, callbacks=[hs.ReduceLROnPlateau('loss')])"
        elif issubclass(schedule, LRScheduler):
            module = "torch.optim.lr_scheduler." if hasattr(lr_scheduler, name) else ""
            settings = USUAL_SETTINGS.get(name, "…")
            every = "update" if schedule in USUALLY_BY_UPDATE else "epoch"
            scheduler = f"{module}{name}(optimizer, {settings})"
            line = f"hs.Model(net, loss, optimizer, schedule={scheduler}, schedule_every={every!r})"
        else:
            line = f"hs.Model(net, loss, optimizer, schedule={name}(…))"
        raise TypeError(write_line(f"schedule: expected an object, got the class {name}", line))
    if isinstance(schedule, LRScheduler):
        check_is_table(schedule)


def choose_unit(schedule: Any, every: Unit | None, epochs: int, updates: int | None) -> UnitChoice:
    """The unit that the user said, or that of most programs with such a schedule."""
    if every is not None:
        return UnitChoice(every)
    if not isinstance(schedule, LRScheduler):
        return UnitChoice("update")
    if updates is not None and updates <= epochs:  # one update an epoch: it is the same
        return UnitChoice("epoch")
    signs = list(_signs_of_updates(schedule, epochs))
    if signs:
        return UnitChoice("epoch", refusal=_unclear_unit(signs, epochs, updates))
    name = type(schedule).__name__
    notice = (
        f"{name} moves once per epoch. Say so by Model(schedule_every='epoch'), or "
        "schedule_every='update' to move it once per update"
    )
    return UnitChoice("epoch", notice=notice)


def describe_unit(schedule: Any, unit: Unit, epochs_before: int) -> dict[str, Any]:
    """What a checkpoint says about a schedule."""
    description: dict[str, Any] = {"every": unit, "kind": _kind(schedule)}
    # By update, the updates of the fits before are known; other kinds begin with each fit.
    if unit == "epoch" and isinstance(schedule, LRScheduler):
        description["epochs_before"] = epochs_before
    return description


def resumed_unit(schedule: Any, every: Unit | None, config: Mapping[str, Any]) -> UnitChoice | None:
    """The unit that a saved run goes on with; None where the run had no such schedule.

    A run keeps its unit. A ValueError where the user says another now.
    """
    kind = _kind(schedule)
    if "schedule" in config:
        saved_unit: Unit = config["schedule"]["every"]
        saved_kind = config["schedule"]["kind"]
        notice = ""
    elif config["rates"] is not None:
        # Earlier versions moved every schedule once per update.
        saved_unit = "update"
        saved_kind = kind
        notice = (
            f"the run was begun by an earlier version of halfstep, which moved {kind} once per "
            "update, and goes on so. Model(schedule_every='update') says the same"
        )
        if kind == OWN_SCHEDULE or every is not None:
            notice = ""
    else:
        return None

    # Another kind of schedule is another schedule: what is said or usual for it holds.
    if (saved_kind == OWN_SCHEDULE) != (kind == OWN_SCHEDULE):
        return None
    if every not in (None, saved_unit):
        raise ValueError(
            f"resume: schedule_every={every!r} is said now, and the saved run moved its schedule "
            f"({saved_kind}) once per {saved_unit}, which decides where it stands. Say "
            f"schedule_every={saved_unit!r}, or leave it out; to begin the schedule anew, load the "
            "weights with model.load(…) and fit without resume="
        )
    return UnitChoice(saved_unit, notice=notice)


def _kind(schedule: Any) -> str:
    return type(schedule).__name__ if isinstance(schedule, LRScheduler) else OWN_SCHEDULE


def _signs_of_updates(scheduler: Any, epochs: int) -> Iterator[str]:
    """What lets a scheduler look as if it counted updates, as code: "CosineAnnealingLR(T_max=90)".

    Numbers greater than that of the epochs, and classes that count updates in most programs; of
    schedulers inside too.
    """
    name = type(scheduler).__name__
    milestones = getattr(scheduler, "_milestones", None)
    if milestones and max(milestones) > epochs:
        yield f"{name}(milestones={list(milestones)})"
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _signs_of_updates(part, epochs)

    if isinstance(scheduler, OneCycleLR):
        yield f"{name}(total_steps={scheduler.total_steps})"
        return
    if isinstance(scheduler, USUALLY_BY_UPDATE):
        yield f"{name}(…)"
        return
    for setting in LENGTH_SETTINGS:
        value: Any = getattr(scheduler, setting, None)
        if hasattr(value, "__iter__"):
            value = sorted(value)
        last = value[-1] if isinstance(value, list) and value else value
        if isinstance(last, int | float) and last > epochs:
            yield f"{name}({setting}={value})"
    for function in getattr(scheduler, "lr_lambdas", ()):
        for variable, value in _numbers_of(function).items():
            if value > epochs and any(word in variable.lower() for word in STEP_WORDS):
                yield f"{name} ({variable}={value})"


def _numbers_of(function: Any) -> dict[str, int]:
    """The whole numbers that a function gets beside its argument, by name."""
    values: dict[str, Any] = {}
    if isinstance(function, partial):
        values = dict(function.keywords)
    elif isinstance(function, Callable):  # type: ignore[arg-type]
        try:
            variables = getclosurevars(function)
        except TypeError:  # an object that can be called
            values = dict(getattr(function, "__dict__", {}))
        else:
            values = {**variables.globals, **variables.nonlocals}
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def _unclear_unit(signs: list[str], epochs: int, updates: int | None) -> ValueError:
    unique = list(dict.fromkeys(signs))
    length = plural(epochs, "epoch")
    if updates is not None:
        length = f"{length} of {-(-updates // epochs):,} updates, {updates:,} in all"
    return ValueError(
        f"schedule: {', '.join(unique)}: this fit has {length}, so that this may count epochs or "
        "updates. Say which: Model(…, schedule_every='epoch') calls its step() once per epoch, "
        "schedule_every='update' once per update"
    )
