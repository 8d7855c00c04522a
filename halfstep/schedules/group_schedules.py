"""From whatever a user gives as the learning rate to one schedule for each parameter group."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep.schedules.formulas import constant, function, sequence
from halfstep.schedules.schedule import Schedule, check_updates, is_number
from halfstep.schedules.torch_schedulers import check_is_table, from_torch, has_moved

ACCEPTED = (
    "a number; a list, array or tensor of rates by update; a schedule of halfstep.schedules; a "
    "function update -> rate; a torch.optim.lr_scheduler of this optimizer; or one of the first "
    "four per parameter group, as a list or as a dict by group index or name"
)


def resolve(schedule: Any, optimizer: Optimizer, updates: int | None = None) -> list[Schedule]:
    """One schedule per parameter group. A group that a dict leaves out keeps its own rate.

    With `updates` known, a schedule that ends before them is a ValueError.
    """
    if updates is not None:
        check_updates("updates", updates, minimum=1)
    schedule = _without_tensors(schedule)
    if isinstance(schedule, LRScheduler):
        schedules = _from_scheduler(schedule, optimizer, updates)
    elif isinstance(schedule, Mapping):
        schedules = _from_mapping(schedule, optimizer)
    elif is_one_per_group(schedule):
        schedules = _from_list(schedule, optimizer)
    else:
        schedules = [_single_schedule("schedule", schedule)] * len(optimizer.param_groups)
    for group_schedule in schedules:
        group_schedule.check(updates or 0)
    return schedules


def check_scheduler(scheduler: LRScheduler, optimizer: Optimizer) -> None:
    """Raises a ValueError if this scheduler of torch cannot begin a run of this optimizer."""
    check_is_table(scheduler)
    name = type(scheduler).__name__
    if scheduler.optimizer is not optimizer:
        raise ValueError(
            f"schedule: {name} drives another optimizer than this step's; "
            "build it on the one given here"
        )
    if has_moved(scheduler):
        raise ValueError(
            f"schedule: expected a scheduler that has not been stepped, received {name} in the "
            "middle of its run; the step keeps the position itself and saves it: build the "
            "scheduler anew, or, to begin at update 0 with the rate it stands at, give "
            "from_torch(scheduler, updates)"
        )


def is_one_per_group(value: Any) -> bool:
    """A list of numbers is one table; a list with anything else in it has one entry per group."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and not all(map(_is_rate, value))


def _from_scheduler(
    scheduler: LRScheduler, optimizer: Optimizer, updates: int | None
) -> list[Schedule]:
    check_scheduler(scheduler, optimizer)
    if updates is None:
        raise ValueError(
            f"schedule: {type(scheduler).__name__} is run ahead into a table, so the number of "
            "updates must be known; give from_torch(scheduler, updates) of halfstep.schedules"
        )
    return from_torch(scheduler, updates)


def _from_mapping(by_key: Mapping[Any, Any], optimizer: Optimizer) -> list[Schedule]:
    """Schedules by the index or the name of a group."""
    groups = optimizer.param_groups
    by_index: dict[int, Schedule] = {}
    for key, value in by_key.items():
        if isinstance(key, int):
            matches = [i for i in range(len(groups)) if i == key]
        else:
            matches = [i for i, group in enumerate(groups) if group.get("name") == key]
        if len(matches) != 1 or isinstance(key, bool):
            problem = f"{len(matches)} groups are" if matches else "no parameter group is"
            raise ValueError(
                f"schedule: {problem} called {key!r}; groups are: {_group_names(optimizer)}"
            )
        index = matches[0]
        if index in by_index:
            raise ValueError(
                f"schedule: group {index} is given twice, the second time as {key!r}; give it once"
            )
        by_index[index] = _single_schedule(f"schedule[{key!r}]", value)

    # A group that is not named keeps its own rate.
    for index, group in enumerate(groups):
        if index not in by_index:
            by_index[index] = constant(float(group["lr"]))
    return [by_index[index] for index in range(len(groups))]


def _from_list(values: Sequence[Any], optimizer: Optimizer) -> list[Schedule]:
    """Schedules in the order of the groups."""
    group_count = len(optimizer.param_groups)
    if len(values) != group_count:
        raise ValueError(
            f"schedule: expected one schedule per parameter group, {group_count} in all "
            f"({_group_names(optimizer)}), received {len(values)}. Accepted: {ACCEPTED}"
        )
    return [_single_schedule(f"schedule[{i}]", value) for i, value in enumerate(values)]


def _single_schedule(name: str, value: Any) -> Schedule:
    """A schedule from what a single group can be given; `name` begins the message of an error."""
    plain = _without_tensors(value)
    if isinstance(plain, Schedule):
        return plain
    if is_number(plain):
        return constant(plain)
    if isinstance(plain, Sequence) and not isinstance(plain, str) and all(map(_is_rate, plain)):
        return sequence(plain)
    if callable(plain) and not isinstance(plain, type | LRScheduler):
        return function(plain)
    advice = ""
    if isinstance(plain, LRScheduler):
        advice = "; a scheduler of torch drives all groups, give it alone"
    raise TypeError(f"{name}: received {type(value).__name__}{advice}. Accepted: {ACCEPTED}")


def _without_tensors(value: Any) -> Any:
    """Tensors and arrays as plain numbers and lists; anything else as it is."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_rate(value: Any) -> bool:
    return is_number(value) or (isinstance(value, Tensor) and value.dim() == 0)


def _group_names(optimizer: Optimizer) -> str:
    """The groups by number, with their names where they have one: 0 ('body'), 1."""
    names = []
    for i, group in enumerate(optimizer.param_groups):
        names.append(f"{i} ({group['name']!r})" if "name" in group else str(i))
    return ", ".join(names)
