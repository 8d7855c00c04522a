"""What a run saves, and how it continues from that.

It continues as it was, or with every difference named. The keys of the saved tree are part of the
checkpoint format (docs/internals/checkpoint-format.md).
"""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from halfstep.checkpoint import CheckpointError
from halfstep.engine import Callback, Feed, Loop
from halfstep.errors import Notice
from halfstep.model.resume_check import SETS_KEY, VERSION, generators_of_set
from halfstep.model.valid_sets import ONE_SET
from halfstep.step import TrainStep
from halfstep.step.state_dict import apply_saved_step
from halfstep.utils import rng
from halfstep.utils.keywords import user_stacklevel

OPTIMIZER_ADVICE = "To change it, set it in run.optimizer.param_groups at a callback's begin"
CUSTOM_STEP_KEY = "OwnStep"  # stands for the optimizer of a user's own step in saved runs
COMPARED_OPTIONS = ("ema", "clip_norm", "clip_value")


def take_snapshot(
    step: Any,
    loop: Loop,
    feed: Feed,
    callbacks: Mapping[str, Callback],
    valid_feeds: Mapping[str, Feed] | None = None,
) -> dict[str, Any]:
    """Everything that decides the next step, between two steps."""
    if _is_inside_update(step, loop):
        raise CheckpointError(
            "the error came in the middle of an update, so that there is no whole state to save. "
            "Resume from an older checkpoint."
        )
    if not getattr(step, "can_be_saved", True):
        raise CheckpointError(
            "the error came in the middle of an update cycle, whose sums are spread over lanes and "
            "ranks. Resume from an older checkpoint."
        )
    states = {name: callback.state_dict() for name, callback in callbacks.items()}
    writers = {name for name, callback in callbacks.items() if callback.writes}
    # Each evaluation draws from them: its order, augmentations of the validation data.
    valid_generators = _save_valid_generators(valid_feeds or {})
    return {
        "halfstep_run": VERSION,
        "config": {**loop.config, "rates": _next_rates(step)},
        "loop": loop.state_dict(),
        "feed": feed.state_dict(),
        "callbacks": {name: state for name, state in states.items() if name not in writers},
        "writers": {name: state for name, state in states.items() if name in writers},
        "step": step.state_dict(),
        "rng": rng.save(),
        **({"valid_generators": valid_generators} if valid_generators else {}),
        **({"compiled": step.compiled.compiled_shapes()} if _is_compiled(step) else {}),
    }


def _save_valid_generators(valid_feeds: Mapping[str, Feed]) -> dict[str, Any]:
    """The generators of the validation data: of one data set as they are, of several by name."""
    generators = {name: feed.save_generators() for name, feed in valid_feeds.items()}
    if list(generators) == [ONE_SET]:
        return generators[ONE_SET]
    saved = {name: states for name, states in generators.items() if states}
    return {SETS_KEY: saved} if saved else {}


def _is_compiled(step: Any) -> bool:
    return isinstance(step, TrainStep) and step.compiled.on


def describe_run(step: Any, feed: Feed, updates_before: int) -> dict[str, Any]:
    """What the run was made of when it began, to be compared in words when it is resumed.

    `updates_before` are the updates of earlier fits.
    """
    optimizer = getattr(step, "optimizer", None)
    options = getattr(step, "options", None)
    groups = []
    if optimizer is not None:
        groups = [_group_settings(group, step) for group in optimizer.param_groups]
    return {
        "optimizer": CUSTOM_STEP_KEY if optimizer is None else type(optimizer).__name__,
        "groups": groups,
        "accumulate": getattr(options, "accumulate", 1),
        "options": {
            name: getattr(options, name) for name in COMPARED_OPTIONS if options is not None
        },
        "loss": _loss_name(step),
        "names": list(getattr(step, "names", ())),
        "data": feed.describe(),
        "began": updates_before,
    }


def restore_snapshot(
    saved: dict[str, Any],
    step: Any,
    loop: Loop,
    feed: Feed,
    callbacks: Mapping[str, Callback],
    valid_feeds: Mapping[str, Feed] | None = None,
) -> None:
    """Continues from a snapshot that was checked (resume_check.py).

    A notice says what is not as it was, and what is done about it.
    """
    before = saved["config"]
    now = loop.config
    state = dict(saved["step"])
    if before["optimizer"] != now["optimizer"] and "optimizer" in state:
        _notice(
            f"the optimizer was {before['optimizer']} and is {now['optimizer']}: "
            "its state starts anew, weights go on"
        )
        state["optimizer"] = step.optimizer.state_dict()
    load_checked_step(step, state)
    loop.load_state_dict(saved["loop"])
    if before["data"] == now["data"]:
        feed.load_state_dict(saved["feed"])
    else:
        _start_new_pass(saved, now["data"], feed)
    for name, valid_feed in (valid_feeds or {}).items():
        valid_feed.load_generators(generators_of_set(saved.get("valid_generators", {}), name))
    _restore_callbacks(saved, callbacks)

    current = {**now, "rates": _next_rates(step), "last": _optimizer_rates(step)}
    if before["rates"] and current["rates"] and _was_over(saved["loop"]):
        before = {**before, "rates": current["rates"]}  # its schedule had no next rate
    for change in _describe_changes(before, current):
        _notice(change)
    if isinstance(step, TrainStep) and step.compiled.on:
        step.compiled.load_compiled_shapes(saved.get("compiled", {}))
        for limit in _compiled_limits(saved, step, loop):
            _notice(f"{limit}; compile=False goes on exactly")
    rng.load(saved["rng"])


def _compiled_limits(saved: dict[str, Any], step: TrainStep, loop: Loop) -> Iterator[str]:
    """In which way a compiled run does not go on bit for bit, in words."""
    saved_shapes = saved.get("compiled")
    is_whole_step = loop.captured_runner is not None and step.device.type == "cpu"
    if saved_shapes is None and not is_whole_step:
        yield (
            "the checkpoint does not say what was compiled, so the first batch of each shape runs "
            "uncompiled: it is rounded in another way, and dropout draws other numbers for it"
        )
    elif saved_shapes and is_whole_step:
        yield (
            "forward and loss were compiled, as the whole step could not be. That is tried again "
            "first, for which some steps run uncompiled: they are rounded in another way, and "
            "dropout draws other numbers for them"
        )
    elif is_whole_step:
        yield (
            "a compiled run goes on to rounding, not bit for bit, as its first steps run "
            "uncompiled until the whole step is compiled anew"
        )
    elif step.device.type != "cpu":
        yield (
            "a compiled run goes on to rounding, not bit for bit, as it is compiled anew and may "
            "be tuned in another way"
        )


def _restore_callbacks(saved: dict[str, Any], callbacks: Mapping[str, Callback]) -> None:
    states = {**saved["callbacks"], **saved["writers"]}
    # Which ones are new is asked before the others are loaded.
    new = [
        name for name, callback in callbacks.items() if name not in states and callback.state_dict()
    ]
    for name, callback in callbacks.items():
        if name in states:
            _load_callback(name, callback, states[name])
    missing = [
        name for name, state in saved["callbacks"].items() if name not in callbacks and state
    ]
    if missing:
        _notice(
            f"the saved run had the callbacks {', '.join(missing)}, this one has not: "
            "what they knew is left out"
        )
    if new:
        _notice(
            f"the saved run had no {', '.join(new)}: "
            "new here, and knowing nothing of the steps before"
        )


def load_checked_step(step: Any, state: dict[str, Any]) -> None:
    """Loads the state of a step that was checked; fit itself takes back what fails."""
    if isinstance(step, TrainStep):
        apply_saved_step(step, state)
    else:
        step.load_state_dict(state)


def _load_callback(name: str, callback: Callback, state: dict[str, Any]) -> None:
    try:
        callback.load_state_dict(state)
    except (OSError, Warning):
        raise
    except Exception as error:
        raise ValueError(
            f"resume: callbacks.{name}: {type(callback).__name__}.load_state_dict failed: "
            f"{type(error).__name__}: {error}. The resume is taken back"
        ) from error


def _describe_changes(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What the user changed in the settings, in words."""
    if before["accumulate"] != now["accumulate"]:
        yield (
            f"accumulate was {before['accumulate']} and is {now['accumulate']}: "
            "that many batches an update from here on"
        )
    for name, value in before.get("options", {}).items():
        if value != now["options"].get(name, value):
            yield (
                f"{name} was {value} and is {now['options'][name]}: the new one holds from here on"
            )
    if before.get("loss", now["loss"]) != now["loss"]:
        yield (
            f"the loss was {before['loss']} and is {now['loss']}: the new one holds from here on"
        )
    kind_before = before.get("schedule", {}).get("kind")
    kind = now.get("schedule", {}).get("kind")
    if kind_before is not None and kind not in (None, kind_before):
        yield f"the schedule was {kind_before} and is {kind}: the new one holds from here on"
    limit_before = before.get("limit_batches")
    limit = now.get("limit_batches")
    if repr(limit_before) != repr(limit):
        yield (
            f"limit_batches was {limit_before} and is {limit}: passes that begin from here on "
            "have as many batches as the new one says"
        )
    if before["rates"] != now["rates"]:
        effect = "the new one holds"
        if now["rates"] is None:
            effect = f"the rate stays at {_join_rates(now['last'])}. {OPTIMIZER_ADVICE}"
        yield (
            f"the schedule's rate for the next update was {_join_rates(before['rates'])} "
            f"and is {_join_rates(now['rates'])}: {effect}"
        )
    if before["optimizer"] != now["optimizer"]:
        return
    groups = zip(before["groups"], now["groups"], strict=False)
    for i, (settings_before, settings) in enumerate(groups):
        for name, value in settings_before.items():
            if name in settings and settings[name] != value:
                yield (
                    f"the optimizer's {name} was {value} and is {settings[name]} in group {i}: "
                    f"the checkpoint's holds. {OPTIMIZER_ADVICE}"
                )


def _group_settings(group: Mapping[str, Any], step: Any) -> dict[str, Any]:
    """What the user gave a parameter group; a schedule's rates are compared by themselves."""
    left_out = {"params"}
    if getattr(step.learning_rates, "table", None) is not None:
        left_out |= {"lr", "initial_lr"}
    settings = {}
    for name, value in group.items():
        if name in left_out:
            continue
        if isinstance(value, Tensor):
            value = value.tolist()
        if value is None or isinstance(value, bool | int | float | str | list | tuple):
            settings[name] = value
    return settings


def _next_rates(step: Any) -> list[float] | None:
    """What the schedule has for the next update, by parameter group; None without one."""
    if not isinstance(step, TrainStep) or step.learning_rates.table is None:
        return None
    table = step.learning_rates.table
    column = min(int(step.state.updates), table.shape[1] - 1)
    rates: list[float] = table[:, column].tolist()
    return rates


def _optimizer_rates(step: Any) -> list[float]:
    """The rates that the optimizer has now."""
    optimizer = getattr(step, "optimizer", None)
    if optimizer is None:
        return []
    return [float(group["lr"]) for group in optimizer.param_groups]


def _loss_name(step: Any) -> str:
    loss = step.objective.loss if isinstance(step, TrainStep) else None
    return getattr(loss, "__qualname__", type(loss).__name__)


def _was_over(loop: Mapping[str, Any]) -> bool:
    """Whether a saved run had made all its epochs."""
    return bool(loop["epoch_over"]) and loop["epoch"] >= loop["epochs"]


def _join_rates(rates: list[float] | None) -> str:
    if rates is None:
        return "none"
    return ", ".join(f"{rate:g}" for rate in rates)


def _is_inside_update(step: Any, loop: Loop) -> bool:
    """Whether an error left an update half done: a full or flushed cycle is still open."""
    if not isinstance(step, TrainStep):
        return False
    open_micro_batches = step.state.cycle.micro
    is_full = open_micro_batches >= step.options.accumulate
    return is_full or (loop.flushing and open_micro_batches > 0)


def _start_new_pass(saved: dict[str, Any], data: list[str], feed: Feed) -> None:
    """The data is another: the epoch continues with a new pass over it, and a notice says so."""
    pairs = zip([*saved["config"]["data"], "nothing"], [*data, "nothing"], strict=False)
    line_before, line_now = next((a, b) for a, b in pairs if a != b)
    pass_number = saved["feed"]["epoch"]
    if saved["feed"]["step"]:
        pass_number += 1
    _notice(
        f"the data had {line_before!r} and has {line_now!r}: "
        f"the epoch goes on with a new pass, number {pass_number}, from its start"
    )
    feed.go_to_pass(pass_number)


def _notice(text: str) -> None:
    warnings.warn(f"resume: {text}", Notice, stacklevel=user_stacklevel())
