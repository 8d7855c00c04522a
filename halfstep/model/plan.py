"""The arguments of `fit`, checked and turned into times and learning rates."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.engine import Callback, Timing
from halfstep.errors import Notice
from halfstep.schedules import resolve, tables


def timing(
    epochs: int, size: int | None, *, steps_per_epoch: int | None, sink: int | None, valid_every: int | Iterable[int],
    valid_every_steps: int,
) -> Timing:  # fmt: skip
    """When the loop evaluates and looks in; every number is checked here."""
    for name, value in (("epochs", epochs), ("steps_per_epoch", steps_per_epoch), ("sink", sink)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{name}: expected a whole number of 1 or more, got {value!r}")
    if not isinstance(valid_every_steps, int) or valid_every_steps < 0:
        raise ValueError(f"valid_every_steps: expected a number of steps, or 0 for never, got {valid_every_steps!r}")
    if size == 0:
        raise ValueError("fit: expected at least one batch in the data, got none")
    return Timing(epochs, steps_per_epoch, sink, _due(valid_every), valid_every_steps)


def _due(every: int | Iterable[int]) -> Callable[[int], bool]:
    if isinstance(every, int) and not isinstance(every, bool) and every >= 0:
        return (lambda epoch: epoch % every == 0) if every else (lambda epoch: False)
    if isinstance(every, Iterable):
        epochs = set(every)
        if all(isinstance(epoch, int) and epoch >= 1 for epoch in epochs):
            return lambda epoch: epoch in epochs
    raise ValueError(f"valid_every: expected a number of epochs, or a list of epochs from 1, got {every!r}")


def updates(epochs: int, size: int | None, steps_per_epoch: int | None, accumulate: int) -> int | None:
    """Updates in the whole run, at most: each pass over the data flushes its tail. None when nobody knows."""
    if size is None:
        return None if steps_per_epoch is None else epochs * steps_per_epoch
    if steps_per_epoch is None:
        return epochs * -(-size // accumulate)
    passes, rest = divmod(epochs * steps_per_epoch, size)
    return passes * -(-size // accumulate) + -(-rest // accumulate)


def rates(schedule: Any, optimizer: Optimizer, count: int | None, done: int = 0) -> Tensor:
    """The schedule as a table [groups, updates], behind `done` columns for updates that are over."""
    if count is None:
        raise ValueError("schedule: the data does not say how long it is; give fit(steps_per_epoch=…)")
    table = tables(resolve(schedule, optimizer, count), count)
    return torch.cat([table[:, :1].expand(-1, done), table], dim=1)


def parts(net: Any, loss: Any, optimizer: Any, step: Any, options: Sequence[str]) -> None:
    """Refuses what cannot be a model: classes instead of objects, training options with nothing to train by."""
    for name, given in (("net", net), ("loss", loss), ("optimizer", optimizer)):
        if isinstance(given, type):
            raise TypeError(f"{name}: expected an object, got the class {given.__name__}. Write {given.__name__}(…)")
    if not isinstance(net, nn.Module):
        raise TypeError(f"net: expected an nn.Module, got {type(net).__name__}")
    if optimizer is None and step is None and options:
        given = ", ".join(options)
        raise ValueError(f"{given}: these are about training, and no optimizer was given. Add optimizer=…")
    unused = [name for name in options if name not in ("forward", "count")] if step is not None else []
    if unused:
        raise ValueError(
            f"{', '.join(unused)}: the step was given whole, and these would do nothing. Put them into it."
        )


def close_cycle(step: Any) -> None:
    """A new run begins with no open cycle: what an earlier one left is dropped, and said."""
    cycle = getattr(getattr(step, "state", None), "cycle", None)
    if cycle is not None and cycle.micro:
        text = f"fit: the {cycle.micro} batches of an update cycle that an earlier run left open are dropped"
        warnings.warn(text, Notice, stacklevel=4)
        cycle.drop()


def checked(callbacks: Any) -> list[Callback]:
    """A list of callbacks; a class instead of an object, and the same object twice, are told."""
    found = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
    for each in found:
        if not isinstance(each, Callback):
            hint = f" Call it: {each.__name__}()" if isinstance(each, type) else ""
            raise TypeError(f"callbacks: expected hs.Callback objects, got {each!r}.{hint}")
    if len({id(each) for each in found}) != len(found):
        raise ValueError("callbacks: the same object is given twice")
    return found


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """A name for each that stays the same over a resume: its class, and a number from the second on."""
    found: dict[str, Callback] = {}
    for each in callbacks:
        base = type(each).__name__
        count = sum(name.split("-")[0] == base for name in found)
        found[base if not count else f"{base}-{count + 1}"] = each
    return found
