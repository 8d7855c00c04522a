"""The arguments of `fit`, checked and turned into times."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from halfstep.engine import Callback, Timing
from halfstep.errors import Notice


def arguments(epochs: Any, data: Any) -> None:
    """The two that every fit has, and that are easily swapped."""
    if _is_whole(data) and not isinstance(epochs, int | float | str) and epochs is not None:
        raise TypeError(
            f"fit: expected fit(epochs, data), got them the other way round. Write fit({data}, data)"
        )
    _whole("epochs", epochs)
    if data is None or isinstance(data, int | float | str | bytes):
        load = (
            " A data set by its name: hs.data.load('cifar10', 'train').batch(64)"
            if isinstance(data, str)
            else ""
        )
        raise TypeError(
            "fit: expected data as batches, such as hs.data.Dataset((x, y)).shuffle().batch(64), a DataLoader or a "
            f"list of batches, got {data!r}.{load}"
        )


def _whole(name: str, value: Any) -> None:
    if not _is_whole(value):
        wrong = TypeError if isinstance(value, str) else ValueError
        raise wrong(f"{name}: expected a whole number of 1 or more, got {_shown(value)}")


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {list(value.shape)}" if hasattr(value, "shape") else repr(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def timing(
    epochs: int, size: int | None, *, steps_per_epoch: int | None, sink: int | None, valid_every: int | Iterable[int],
    valid_every_steps: int,
) -> Timing:  # fmt: skip
    """When the loop evaluates and looks in; every number is checked here."""
    for name, value in (("steps_per_epoch", steps_per_epoch), ("sink", sink)):
        if value is not None:
            _whole(name, value)
    if not isinstance(valid_every_steps, int) or valid_every_steps < 0:
        raise ValueError(
            f"valid_every_steps: expected a number of steps, or 0 for never, got {valid_every_steps!r}"
        )
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
    raise ValueError(
        f"valid_every: expected a number of epochs, or a list of epochs from 1, got {every!r}"
    )


def close_cycle(step: Any) -> None:
    """A new run begins with no open cycle: what an earlier one left is dropped, and said."""
    cycle = getattr(getattr(step, "state", None), "cycle", None)
    if cycle is not None and cycle.micro:
        text = f"fit: the {cycle.micro} batches of an update cycle that an earlier run left open are dropped"
        warnings.warn(text, Notice, stacklevel=4)
        cycle.close()


def checked(callbacks: Any) -> list[Callback]:
    """A list of callbacks; a class instead of an object, and the same object twice, are told."""
    found = [callbacks] if isinstance(callbacks, Callback) else list(callbacks or ())
    for each in found:
        if not isinstance(each, Callback):
            hint = f" Call it: {each.__name__}()" if isinstance(each, type) else ""
            raise TypeError(f"callbacks: expected hs.Callback objects, got {each!r}.{hint}")
        _check_events(each)
    if len({id(each) for each in found}) != len(found):
        raise ValueError("callbacks: the same object is given twice")
    return found


def _check_events(callback: Callback) -> None:
    """Names from other libraries, such as on_epoch_end, that nobody would ever call."""
    bases = type(callback).__mro__
    own = {
        name
        for base in bases[: bases.index(Callback)]
        for name, value in vars(base).items()
        if callable(value)
    }
    for name in sorted(own - set(dir(Callback))):
        if name.startswith("on_") or (
            name[0] != "_" and name.endswith(("_end", "_begin", "_start"))
        ):
            events = "begin, epoch_begin, step, visit, epoch_end, end"
            text = f"{type(callback).__name__}.{name} is no event and is never called; events are {events}"
            warnings.warn(
                f"callbacks: {text}. A leading _ tells a method of your own.", Notice, stacklevel=5
            )


def named(callbacks: Sequence[Callback]) -> dict[str, Callback]:
    """A name for each that stays the same over a resume: its class, and a number from the second on."""
    found: dict[str, Callback] = {}
    for each in callbacks:
        base = type(each).__name__
        count = sum(name.split("-")[0] == base for name in found)
        found[base if not count else f"{base}-{count + 1}"] = each
    return found
