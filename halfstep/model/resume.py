"""What a run saves, and what it does with that when it goes on: the same, or the differences named one by one."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from halfstep.checkpoint import CheckpointError
from halfstep.engine import Callback, Feed, Loop
from halfstep.errors import Notice
from halfstep.model.weights import Account, compare, tensors_of
from halfstep.step import TrainStep
from halfstep.step.state_dict import find_extra_tensors
from halfstep.utils import rng

VERSION = 1
_CHANGE = "To change it, set it in run.optimizer.param_groups at a callback's begin"
_NUMERIC = ("ema", "clip_norm", "clip_value")


def snapshot(
    step: Any, loop: Loop, feed: Feed, callbacks: Mapping[str, Callback]
) -> dict[str, Any]:
    """Everything that decides the next step, between two steps."""
    if _is_torn(step, loop):
        raise CheckpointError(
            "the error came in the middle of an update, so that there is no whole state to save. Resume from an older "
            "checkpoint."
        )
    return {
        "halfstep_run": VERSION,
        "config": {**loop.config, "rates": _rates(step)},
        "loop": loop.state_dict(),
        "feed": feed.state_dict(),
        "callbacks": {
            name: each.state_dict() for name, each in callbacks.items() if not each.writes
        },
        "writers": {name: each.state_dict() for name, each in callbacks.items() if each.writes},
        "step": step.state_dict(),
        "rng": rng.save(),
    }


def config(step: Any, feed: Feed, began: int) -> dict[str, Any]:
    """What the run was made of when it began, after `began` updates of earlier fits, to be compared in words."""
    optimizer = getattr(step, "optimizer", None)
    options = getattr(step, "options", None)
    return {
        "optimizer": type(optimizer).__name__ if optimizer is not None else type(step).__name__,
        "groups": [_settings(group, step) for group in optimizer.param_groups]
        if optimizer is not None
        else [],
        "accumulate": getattr(options, "accumulate", 1),
        "options": {name: getattr(options, name) for name in _NUMERIC if options is not None},
        "loss": _loss_of(step),
        "names": list(getattr(step, "names", ())),
        "data": feed.describe(),
        "began": began,
    }


def check(saved: Any, step: Any, path: Path) -> None:
    """Refuses a checkpoint of another network or of other parameter groups, before anything is changed."""
    if not isinstance(saved, dict) or saved.get("halfstep_run") != VERSION:
        came = saved.get("halfstep_run") if isinstance(saved, dict) else type(saved).__name__
        raise ValueError(f"resume: {path}: expected a run of version {VERSION}, got {came!r}")
    state = saved["step"]
    if not isinstance(step, TrainStep) or "net" not in state:
        return
    new = f"or begin a new run from what fits: model.load({str(path)!r}, strict=False), then fit without resume="
    for account in _accounts(state, step):
        if not account.complete:
            raise ValueError(
                f"resume: {path} was saved from another network: {account.differences()}. Build the network as it "
                f"was, {new}, and with a Checkpoint of another folder."
            )
    was, now = (
        _sizes(each["param_groups"]) for each in (state["optimizer"], step.optimizer.state_dict())
    )
    if saved["config"]["optimizer"] == type(step.optimizer).__name__ and was != now:
        raise ValueError(
            f"resume: {path} holds an optimizer with {was} parameters in its groups, this one has {now}. Build the "
            f"optimizer as it was, {new}."
        )


def _accounts(state: dict[str, Any], step: TrainStep) -> Iterator[Account]:
    """The network's tensors, and those beside them, of which the saved run may have had more."""
    if not any(
        module._load_state_dict_pre_hooks for module in step.net.modules()
    ):  # they may rename what they load
        yield compare(tensors_of(step.net.state_dict()), tensors_of(state["net"]))
    yield replace(compare(find_extra_tensors(step), state["beside"]), unexpected=())


def _sizes(groups: list[dict[str, Any]]) -> str:
    return " + ".join(str(len(group["params"])) for group in groups)


def restore(
    saved: dict[str, Any], step: Any, loop: Loop, feed: Feed, callbacks: Mapping[str, Callback]
) -> None:
    """Put a snapshot back. Whatever is not as it was: a notice says what changed and what is done about it."""
    was, now = saved["config"], loop.config
    state = dict(saved["step"])
    if was["optimizer"] != now["optimizer"] and "optimizer" in state:
        _notice(
            f"the optimizer was {was['optimizer']} and is {now['optimizer']}: its state starts anew, weights go on"
        )
        state["optimizer"] = step.optimizer.state_dict()
    step.load_state_dict(state)
    loop.load_state_dict(saved["loop"])
    if was["data"] == now["data"]:
        feed.load_state_dict(saved["feed"])
    else:
        _other_data(saved, was["data"], now["data"], loop, feed)
    _restore_callbacks(saved, callbacks)
    for change in _changes(was, {**now, "rates": _rates(step), "last": _last(step)}):
        _notice(change)
    if isinstance(step, TrainStep) and step.compiled.on:
        _notice(
            "a compiled run goes on to rounding, not bit for bit, as it is compiled anew; compile=False goes on exactly"
        )
    rng.load(saved["rng"])


def _restore_callbacks(saved: dict[str, Any], callbacks: Mapping[str, Callback]) -> None:
    known = {**saved["callbacks"], **saved["writers"]}
    new = [name for name, each in callbacks.items() if name not in known and each.state_dict()]
    for name, each in callbacks.items():
        if name in known:
            each.load_state_dict(known[name])
    gone = [name for name, state in saved["callbacks"].items() if name not in callbacks and state]
    if gone:
        _notice(
            f"the saved run had the callbacks {', '.join(gone)}, this one has not: what they knew is left out"
        )
    if new:
        _notice(
            f"the saved run had no {', '.join(new)}: new here, and knowing nothing of the steps before"
        )


def _changes(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What the user changed in the settings, in words."""
    if was["accumulate"] != now["accumulate"]:
        yield f"accumulate was {was['accumulate']} and is {now['accumulate']}: that many batches an update from here on"
    for name, value in was.get("options", {}).items():
        if value != now["options"].get(name, value):
            yield f"{name} was {value} and is {now['options'][name]}: the new one holds from here on"
    if was.get("loss", now["loss"]) != now["loss"]:
        yield f"the loss was {was['loss']} and is {now['loss']}: the new one holds from here on"
    if was["rates"] != now["rates"]:
        new = (
            "the new one holds"
            if now["rates"] is not None
            else f"the rate stays at {_said(now['last'])}. {_CHANGE}"
        )
        yield f"the schedule's rate for the next update was {_said(was['rates'])} and is {_said(now['rates'])}: {new}"
    if was["optimizer"] != now["optimizer"]:
        return
    for i, (a, b) in enumerate(zip(was["groups"], now["groups"], strict=False)):
        for name in [name for name in a if name in b and a[name] != b[name]]:
            yield (
                f"the optimizer's {name} was {a[name]} and is {b[name]} in group {i}: the checkpoint's holds. {_CHANGE}"
            )


def _settings(group: Mapping[str, Any], step: Any) -> dict[str, Any]:
    """What the user gave a parameter group; a schedule's rates are compared by themselves."""
    ruled = (
        ("params", "lr", "initial_lr")
        if getattr(step.learning_rates, "table", None) is not None
        else ("params",)
    )
    plain = {
        k: v.tolist() if isinstance(v, Tensor) else v for k, v in group.items() if k not in ruled
    }
    return {
        k: v
        for k, v in plain.items()
        if v is None or isinstance(v, bool | int | float | str | list | tuple)
    }


def _rates(step: Any) -> list[float] | None:
    """What the schedule has for the next update, by parameter group; None without one."""
    table = step.learning_rates.table if isinstance(step, TrainStep) else None
    if table is None:
        return None
    rates: list[float] = table[:, min(int(step.state.updates), table.shape[1] - 1)].tolist()
    return rates


def _last(step: Any) -> list[float]:
    """The rates that the optimizer has now."""
    optimizer = getattr(step, "optimizer", None)
    return [float(group["lr"]) for group in optimizer.param_groups] if optimizer is not None else []


def _loss_of(step: Any) -> str:
    loss = step.objective.loss if isinstance(step, TrainStep) else None
    return getattr(loss, "__qualname__", type(loss).__name__)


def _said(rates: list[float] | None) -> str:
    return "none" if rates is None else ", ".join(f"{rate:g}" for rate in rates)


def _is_torn(step: Any, loop: Loop) -> bool:
    """Whether an error left an update half done: a cycle is full, or was being flushed, and is still open."""
    if not isinstance(step, TrainStep):
        return False
    micro = step.state.cycle.micro
    return micro >= step.options.accumulate or (loop.flushing and micro > 0)


def _other_data(
    saved: dict[str, Any], was: list[str], now: list[str], loop: Loop, feed: Feed
) -> None:
    pairs = zip([*was, "nothing"], [*now, "nothing"], strict=False)
    a, b = next((a, b) for a, b in pairs if a != b)
    passes = saved["feed"]["epoch"] + bool(saved["feed"]["step"])
    _notice(
        f"the data had {a!r} and has {b!r}: the epoch goes on with a new pass, number {passes}, from its start"
    )
    feed.go_to_pass(passes)


def _notice(text: str) -> None:
    warnings.warn(f"resume: {text}", Notice, stacklevel=5)
