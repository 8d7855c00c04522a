"""Whether a run can go on from a checkpoint: all of it is checked before any of it is loaded.

Each part says by itself what it can load: the step (step/state_dict.py), the loop and the data
(engine/), the callbacks (`Callback.check_state`), the random states (utils/rng.py).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from halfstep.engine import Callback, Feed, Loop
from halfstep.model.custom_step import CustomStep
from halfstep.model.schedule_unit import UNITS
from halfstep.model.valid_sets import ONE_SET
from halfstep.model.weights import Account, compare_tensors, only_tensors
from halfstep.step import TrainStep
from halfstep.step.state_dict import check_saved_step
from halfstep.utils import rng
from halfstep.utils.saved_state import SavedValue

VERSION = 1

MAX_EPOCHS_BEFORE = 10**7  # a scheduler of torch's is run ahead over them

# In place of a generator's name: the generators of several validation sets, by the sets' names.
SETS_KEY = "sets"


def check_snapshot(
    tree: Any,
    step: Any,
    loop: Loop,
    feed: Feed,
    callbacks: Mapping[str, Callback],
    path: Path,
    valid_feeds: Mapping[str, Feed] | None = None,
) -> None:
    """Raises an error that names what this run could not go on from. Changes nothing."""
    received: Any = type(tree).__name__
    if isinstance(tree, dict):
        received = tree.get("halfstep_run")
    if type(received) is not int or received != VERSION:
        raise ValueError(
            f"resume: {path}: expected a run of version {VERSION}, got {received!r} as halfstep_run"
        )
    saved = SavedValue(tree, f"resume: {path}")

    with named_part(saved, "config"):
        _check_config(saved.field("config"))
    with named_part(saved, "step"):
        _check_step(saved, step, loop, path)
    with named_part(saved, "loop"):
        loop.check_state(saved.field("loop"))
    with named_part(saved, "feed"):
        if tree["config"]["data"] == loop.config["data"]:
            feed.check_state(saved.field("feed"))
        else:  # a new pass begins
            saved.field("feed").field("epoch").whole_number()
            saved.field("feed").field("step").whole_number()
    with named_part(saved, "rng"):
        rng.check(saved.field("rng"))
    generators = saved.optional_field("valid_generators")
    for name, valid_feed in (valid_feeds or {}).items():
        if generators is not None:
            with named_part(saved, "valid_generators"):
                states = generators_of_set(generators.value, name)
                valid_feed.check_generators(replace(generators, value=states))
    compiled_shapes = saved.optional_field("compiled")
    if compiled_shapes is not None:
        for is_compiled in compiled_shapes.entries().values():
            is_compiled.flag()

    states = {**saved.field("callbacks").entries(), **saved.field("writers").entries()}
    for name, state in states.items():
        state.entries()
        if name in callbacks:
            with named_part(saved, f"{state.path[0]}.{name}"):
                callbacks[name].check_state(loop.run, state)


def generators_of_set(saved: Any, set_name: str) -> Any:
    """The saved generators of one validation set; none where the run that saved had no such set."""
    has_sets = isinstance(saved, dict) and SETS_KEY in saved
    if set_name == ONE_SET:
        return {} if has_sets else saved
    return saved[SETS_KEY].get(set_name, {}) if has_sets else {}


@contextmanager
def named_part(saved: SavedValue, part: str) -> Iterator[None]:
    """Errors inside that do not say what they are about become a ValueError that names the part."""
    try:
        yield
    except (ValueError, OSError, Warning):
        raise
    except Exception as error:
        raise ValueError(
            f"{saved.owner}: {part} cannot be loaded: {type(error).__name__}: {error}. "
            f"{saved.advice}; resume from another checkpoint"
        ) from error


def _check_config(saved: SavedValue) -> None:
    """What the run was made of, in words that are compared with those of this run."""
    saved.field("optimizer").text()
    for group in saved.field("groups").items():
        for value in group.entries().values():
            value.plain()
    saved.field("accumulate").whole_number(minimum=1)
    saved.field("data").texts()
    rates = saved.field("rates")
    if rates.value is not None:
        for rate in rates.items():
            rate.number()

    # Runs of earlier versions lack these.
    options = saved.optional_field("options")
    if options is not None:
        options.entries()
        options.plain()
    loss = saved.optional_field("loss")
    if loss is not None:
        loss.text()
    names = saved.optional_field("names")
    if names is not None:
        names.texts()
    updates_before = saved.optional_field("began")
    if updates_before is not None:
        updates_before.whole_number()
    limit = saved.optional_field("limit_batches")
    if limit is not None:
        limit.number(minimum=0)
    schedule = saved.optional_field("schedule")
    if schedule is not None:
        if schedule.field("every").text() not in UNITS:
            schedule.field("every").refuse("'epoch' or 'update'")
        schedule.field("kind").text()
        epochs_before = schedule.optional_field("epochs_before")
        if epochs_before is not None:
            epochs_before.whole_number(maximum=MAX_EPOCHS_BEFORE)


def _check_step(saved: SavedValue, step: Any, loop: Loop, path: Path) -> None:
    state = saved.field("step")
    if isinstance(step, CustomStep):
        step.check_state(state)
        return
    if not isinstance(step, TrainStep):
        return
    is_same_optimizer = saved.value["config"]["optimizer"] == loop.config["optimizer"]
    if "net" in state.entries():
        _check_network(saved, step, path, is_same_optimizer=is_same_optimizer)
    check_saved_step(step, with_optimizer_of(step, state, same=is_same_optimizer))
    # More updates than the fit before it had in all.
    began = saved.value["config"].get("began", 0)
    updates = int(saved.value["step"]["state"]["updates"])
    if began > updates:
        saved.field("config").field("began").refuse(f"a whole number, 0 to {updates}")


def with_optimizer_of(step: TrainStep, state: SavedValue, *, same: bool) -> SavedValue:
    """The saved step; with the optimizer's present state where it was another optimizer's."""
    if same or "optimizer" not in state.entries():
        return state
    return replace(state, value={**state.value, "optimizer": step.optimizer.state_dict()})


def _check_network(
    saved: SavedValue, step: TrainStep, path: Path, *, is_same_optimizer: bool
) -> None:
    """Refuses a checkpoint of another network or of other parameter groups, with what to do."""
    state = saved.value["step"]
    new_run_advice = (
        f"or begin a new run from what fits: model.load({str(path)!r}, strict=False), "
        "then fit without resume="
    )
    for part in ("net", "beside"):
        saved.field("step").field(part).entries()
    for account in _compare_networks(state, step):
        if not account.complete:
            raise ValueError(
                f"resume: {path} was saved from another network: {account.differences()}. "
                f"Build the network as it was, {new_run_advice}, "
                "and with a Checkpoint of another folder."
            )
    groups = saved.field("step").field("optimizer").field("param_groups").items()
    saved_sizes = " + ".join(str(len(group.field("params").items())) for group in groups)
    sizes = " + ".join(str(len(group["params"])) for group in step.optimizer.param_groups)
    if is_same_optimizer and saved_sizes != sizes:
        raise ValueError(
            f"resume: {path} holds an optimizer with {saved_sizes} parameters in its groups, "
            f"this one has {sizes}. Build the optimizer as it was, {new_run_advice}."
        )


def _compare_networks(state: dict[str, Any], step: TrainStep) -> Iterator[Account]:
    """The network's tensors; then those beside it, of which the saved run may have had more."""
    # Hooks may rename tensors while a network loads them.
    renames = any(module._load_state_dict_pre_hooks for module in step.net.modules())
    if not renames:
        yield compare_tensors(only_tensors(step.net.state_dict()), only_tensors(state["net"]))
    extra_tensors = compare_tensors(step.extra_tensors(), only_tensors(state["beside"]))
    yield replace(extra_tensors, unexpected=())
