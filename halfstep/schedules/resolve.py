"""From whatever a user gives as the learning rate to one schedule per parameter group."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep.schedules.formulas import constant, function, sequence
from halfstep.schedules.schedule import Schedule, is_number, whole_of
from halfstep.schedules.torch_schedulers import from_torch, has_moved, refuse_feedback

ACCEPTED = (
    "a number; a list, array or tensor of rates by update; a schedule of halfstep.schedules; a function update -> "
    "rate; a torch.optim.lr_scheduler of this optimizer; or one of the first four per parameter group, as a list or "
    "as a dict by group index or name"
)


def resolve(schedule: Any, optimizer: Optimizer, updates: int | None = None) -> list[Schedule]:
    """One schedule per parameter group. A group that a dict leaves out keeps its own rate.

    With `updates` known, a schedule that ends before them is a ValueError.
    """
    if updates is not None:
        whole_of(updates, "updates", least=1)
    plain = schedule.tolist() if hasattr(schedule, "tolist") else schedule
    if isinstance(plain, LRScheduler):
        found = _roll(plain, optimizer, updates)
    elif isinstance(plain, Mapping):
        found = _by_key(plain, optimizer)
    elif one_per_group(plain):
        found = _by_position(plain, optimizer)
    else:
        found = [_single(plain, "schedule")] * len(optimizer.param_groups)
    for each in found:
        each.check(updates or 0)
    return found


def check_scheduler(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Refuses a scheduler of torch that cannot begin a run of this optimizer."""
    refuse_feedback(scheduler)
    name = type(scheduler).__name__
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            f"schedule: {name} drives another optimizer than this step's; build it on the one given here"
        )
    if has_moved(scheduler):
        raise ValueError(
            f"schedule: expected a scheduler that has not been stepped, received {name} in the middle of its run; the "
            "step keeps the position itself and saves it: build the scheduler anew, or, to begin at update 0 with the "
            "rate it stands at, give from_torch(scheduler, updates)"
        )


def _roll(scheduler: LRScheduler, optimizer: Optimizer, updates: int | None) -> list[Schedule]:
    check_scheduler(scheduler, optimizer)
    if updates is None:
        raise ValueError(
            f"schedule: {type(scheduler).__name__} is run ahead into a table, so the number of updates must be known; "
            "give from_torch(scheduler, updates) of halfstep.schedules"
        )
    return from_torch(scheduler, updates)


def _by_key(given: Mapping[Any, Any], optimizer: Optimizer) -> list[Schedule]:
    groups = optimizer.param_groups
    found: dict[int, Schedule] = {}
    for key, value in given.items():
        places = [
            i for i, g in enumerate(groups) if key == (i if _is_index(key) else g.get("name"))
        ]
        if len(places) != 1 or isinstance(key, bool):
            which = f"{len(places)} groups are" if places else "no parameter group is"
            raise ValueError(f"schedule: {which} called {key!r}; groups are: {_names(optimizer)}")
        if places[0] in found:
            raise ValueError(
                f"schedule: group {places[0]} is given twice, the second time as {key!r}; give it once"
            )
        found[places[0]] = _single(value, f"schedule[{key!r}]")
    return [found.get(i) or constant(float(g["lr"])) for i, g in enumerate(groups)]


def _by_position(given: Sequence[Any], optimizer: Optimizer) -> list[Schedule]:
    groups = optimizer.param_groups
    if len(given) != len(groups):
        expected = f"one schedule per parameter group, {len(groups)} in all ({_names(optimizer)})"
        raise ValueError(
            f"schedule: expected {expected}, received {len(given)}. Accepted: {ACCEPTED}"
        )
    return [_single(value, f"schedule[{i}]") for i, value in enumerate(given)]


def _single(value: Any, where: str) -> Schedule:
    """What one group can be given."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, Schedule):
        return plain
    if is_number(plain):
        return constant(plain)
    if isinstance(plain, Sequence) and not isinstance(plain, str) and all(map(_is_rate, plain)):
        return sequence(plain)
    if callable(plain) and not isinstance(plain, type | LRScheduler):
        return function(plain)
    hint = (
        "; a scheduler of torch drives all groups, give it alone"
        if isinstance(plain, LRScheduler)
        else ""
    )
    raise TypeError(f"{where}: received {type(value).__name__}{hint}. Accepted: {ACCEPTED}")


def one_per_group(value: Any) -> bool:
    """A list of numbers is one table; a list with anything else in it has one entry per group."""
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and not all(map(_is_rate, value))


def _is_rate(value: Any) -> bool:
    return is_number(value) or (isinstance(value, Tensor) and value.dim() == 0)


def _is_index(key: Any) -> bool:
    return isinstance(key, int)


def _names(optimizer: Optimizer) -> str:
    groups = enumerate(optimizer.param_groups)
    return ", ".join(f"{i} ({g['name']!r})" if "name" in g else str(i) for i, g in groups)
