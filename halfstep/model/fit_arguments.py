"""The arguments of `fit`, checked, and turned into times and named callbacks."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from halfstep.engine import Callback, Feed, Timing
from halfstep.engine.events import EVENTS
from halfstep.engine.limits import BatchLimit
from halfstep.errors import Notice
from halfstep.step import TrainStep
from halfstep.utils.keywords import user_stacklevel


def check_epochs_and_data(epochs: Any, data: Any) -> None:
    """Refuses the two arguments that every fit has where they are of another kind."""
    _check_count("epochs", epochs)
    if data is None or isinstance(data, int | float | str | bytes):
        advice = ""
        if isinstance(data, str):
            advice = " A data set by its name: hs.data.load('cifar10', 'train').batch(64)"
        raise TypeError(
            "fit: expected data as batches, such as hs.data.Dataset((x, y)).shuffle().batch(64), "
            f"a DataLoader or a list of batches, got {data!r}.{advice}"
        )


def _check_count(name: str, value: Any) -> None:
    if _is_count(value):
        return
    received = repr(value)
    if hasattr(value, "shape"):
        received = f"{type(value).__name__} {list(value.shape)}"
    error_class = TypeError if isinstance(value, str) else ValueError
    raise error_class(f"{name}: expected a whole number of 1 or more, got {received}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def limit_epoch(feed: Feed, steps_per_epoch: int | None, limit: BatchLimit) -> int | None:
    """Limits the batches of an epoch. Returns the steps in an epoch where `fit` was given some.

    Passes over the data end at the limit, unless an epoch has a number of steps of its own.
    """
    if steps_per_epoch is None:
        feed.limit = limit
        return None
    _check_count("steps_per_epoch", steps_per_epoch)
    return limit.apply(steps_per_epoch)


def make_timing(
    epochs: int,
    pass_size: int | None,
    *,
    steps_per_epoch: int | None,
    sink: int | None,
    valid_every: int | Iterable[int],
    valid_every_steps: int,
) -> Timing:
    """When the loop evaluates and the host reads results; every number is checked here."""
    if sink is not None:
        _check_count("sink", sink)
    if not isinstance(valid_every_steps, int) or valid_every_steps < 0:
        raise ValueError(
            "valid_every_steps: expected a number of steps, or 0 for never, "
            f"got {valid_every_steps!r}"
        )
    if pass_size == 0:
        raise ValueError("fit: expected at least one batch in the data, got none")
    return Timing(
        epochs=epochs,
        epoch_steps=steps_per_epoch,
        sink=sink,
        valid_epochs=_evaluation_epochs(valid_every),
        valid_steps=valid_every_steps,
    )


def _evaluation_epochs(valid_every: int | Iterable[int]) -> Callable[[int], bool]:
    """Epoch number → whether it ends with an evaluation."""
    if isinstance(valid_every, int) and not isinstance(valid_every, bool) and valid_every >= 0:
        if valid_every == 0:
            return lambda epoch: False
        return lambda epoch: epoch % valid_every == 0
    if isinstance(valid_every, Iterable):
        epochs = set(valid_every)
        if all(isinstance(epoch, int) and epoch >= 1 for epoch in epochs):
            return lambda epoch: epoch in epochs
    raise ValueError(
        f"valid_every: expected a number of epochs, or a list of epochs from 1, got {valid_every!r}"
    )


def close_cycle(step: Any) -> None:
    """Drops the open cycle that an earlier run left behind, and says so."""
    cycle = getattr(getattr(step, "state", None), "cycle", None)
    if cycle is not None and cycle.micro:
        warnings.warn(
            f"fit: the {cycle.micro} batches of an update cycle that an earlier run left open "
            "are dropped",
            Notice,
            stacklevel=user_stacklevel(),
        )
        if isinstance(step, TrainStep):
            step.drop_cycle()
        else:
            cycle.close()


def check_callbacks(callbacks: Any) -> list[Callback]:
    """The callbacks as a list. Refuses a class, another object, and the same object twice."""
    if isinstance(callbacks, Callback):
        callbacks = [callbacks]
    checked = list(callbacks or ())
    for callback in checked:
        if not isinstance(callback, Callback):
            advice = f" Call it: {callback.__name__}()" if isinstance(callback, type) else ""
            raise TypeError(f"callbacks: expected hs.Callback objects, got {callback!r}.{advice}")
        _warn_unknown_events(callback)
    if len({id(callback) for callback in checked}) != len(checked):
        raise ValueError("callbacks: the same object is given twice")
    return checked


def _warn_unknown_events(callback: Callback) -> None:
    """Warns of names from other libraries, such as on_epoch_end, that nobody would ever call."""
    bases = type(callback).__mro__
    methods = set()
    for base in bases[: bases.index(Callback)]:
        methods |= {name for name, value in vars(base).items() if callable(value)}
    for name in sorted(methods - set(dir(Callback))):
        is_public = not name.startswith("_")
        looks_like_event = name.startswith("on_") or name.endswith(("_end", "_begin", "_start"))
        if is_public and looks_like_event:
            warnings.warn(
                f"callbacks: {type(callback).__name__}.{name} is no event and is never called; "
                f"events are {', '.join(EVENTS)}. A leading _ tells a method of your own.",
                Notice,
                stacklevel=user_stacklevel(),
            )


def name_callbacks(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """A name for each that stays over a resume: its class, and a number from the second on."""
    named: dict[str, Callback] = {}
    for callback in callbacks:
        class_name = type(callback).__name__
        count = sum(name.split("-")[0] == class_name for name in named)
        name = class_name if count == 0 else f"{class_name}-{count + 1}"
        named[name] = callback
    return named
