"""What a run saves, and what it does with that when it goes on: the same, or the differences named one by one."""

import warnings
from collections.abc import Mapping
from typing import Any

from halfstep.engine import Callback, Feed, Loop, rng
from halfstep.errors import Notice

VERSION = 1


def snapshot(step: Any, loop: Loop, feed: Feed, callbacks: Mapping[str, Callback]) -> dict[str, Any]:
    """Everything that decides the next step, between two steps."""
    return {
        "halfstep_run": VERSION,
        "config": config(step, feed),
        "loop": loop.state_dict(),
        "feed": feed.state_dict(),
        "callbacks": {name: each.state_dict() for name, each in callbacks.items() if not each.writes},
        "writers": {name: each.state_dict() for name, each in callbacks.items() if each.writes},
        "step": step.state_dict(),
        "rng": rng.save(),
    }


def config(step: Any, feed: Feed) -> dict[str, Any]:
    """What the run was made of, to be compared in words."""
    optimizer = getattr(step, "optimizer", None)
    options = getattr(step, "options", None)
    return {
        "optimizer": type(optimizer).__name__ if optimizer is not None else type(step).__name__,
        "accumulate": getattr(options, "accumulate", 1),
        "data": feed.describe(),
    }


def restore(saved: dict[str, Any], step: Any, loop: Loop, feed: Feed, callbacks: Mapping[str, Callback]) -> None:
    """Put a snapshot back. Another optimizer or other data: a notice says what changed and what is done about it."""
    if saved.get("halfstep_run") != VERSION:
        raise ValueError(f"resume: expected a run of version {VERSION}, got {saved.get('halfstep_run')!r}")
    was, now = saved["config"], config(step, feed)
    state = dict(saved["step"])
    if was["optimizer"] != now["optimizer"] and "optimizer" in state:
        _notice(f"the optimizer was {was['optimizer']} and is {now['optimizer']}: its state starts anew, weights go on")
        state["optimizer"] = step.optimizer.state_dict()
    step.load_state_dict(state)
    loop.load_state_dict(saved["loop"])
    if was["data"] == now["data"]:
        feed.load_state_dict(saved["feed"])
    else:
        _other_data(saved, was["data"], now["data"], loop, feed)
    known = {**saved["callbacks"], **saved["writers"]}
    for name, each in callbacks.items():
        if name in known:
            each.load_state_dict(known[name])
    gone = [name for name, state in saved["callbacks"].items() if name not in callbacks and state]
    if gone:
        _notice(f"the saved run had the callbacks {', '.join(gone)}, this one has not: what they knew is left out")
    rng.load(saved["rng"])


def _other_data(saved: dict[str, Any], was: list[str], now: list[str], loop: Loop, feed: Feed) -> None:
    pairs = zip([*was, "nothing"], [*now, "nothing"], strict=False)
    a, b = next((a, b) for a, b in pairs if a != b)
    passes = saved["feed"]["epoch"] + bool(saved["feed"]["step"])
    _notice(f"the data had {a!r} and has {b!r}: the epoch goes on with a new pass, number {passes}, from its start")
    feed.next_pass(passes)


def _notice(text: str) -> None:
    warnings.warn(f"resume: {text}", Notice, stacklevel=5)
