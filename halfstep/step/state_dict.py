"""A step's saved state: everything that decides the next step, as plain dicts, numbers, tensors.

Loading is in two halves: `check_saved_step` refuses what does not fit, before anything is changed;
`apply_saved_step` loads. Where that fails all the same, load_backup.py takes it back.
"""

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep.errors import Notice
from halfstep.precision import Precision
from halfstep.step.lanes import Lanes
from halfstep.step.load_backup import StepBackup, undone_on_error
from halfstep.step.optimizer_schema import check_optimizer_state
from halfstep.step.overflow import fallback_precision
from halfstep.step.state import load_state, state_to_dict
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.saved_state import SavedValue

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

# The keys of a saved step. "beside" holds what lies outside the network's own state_dict.
SAVED_PARTS = ("net", "beside", "optimizer", "state", "precision")
LANES_PART = "lanes"  # only of a step that divides its batches

OWNER = "TrainStep.load_state_dict"  # how messages begin, outside fit


def step_to_dict(step: "TrainStep") -> dict[str, Any]:
    """Network, optimizer, counters, scale, averages, the open cycle; not torch's random state."""
    extra_tensors = find_extra_tensors(step)
    lanes = {} if step.lanes is None else {LANES_PART: _describe_lanes(step, step.lanes)}
    return {
        **lanes,
        "net": _clone_tensors(step.net.state_dict()),
        "beside": {name: tensor.detach().clone() for name, tensor in extra_tensors.items()},
        "optimizer": _clone_tensors(step.optimizer.state_dict()),
        "state": state_to_dict(step.state),
        "precision": step.precision.state_dict(),
    }


def load_step(step: "TrainStep", saved: dict[str, Any]) -> None:
    """Restores a saved step, bit for bit, or raises and leaves the step as it was.

    A change of precision is announced, and the step keeps its own loss scale.
    """
    check_saved_step(step, SavedValue(saved, OWNER))
    with undone_on_error(StepBackup(step)):
        apply_saved_step(step, saved)


def check_saved_step(step: "TrainStep", saved: SavedValue) -> None:
    """ValueError for a state that this step could not continue from. Changes nothing.

    The schema is what this step would save now, and for the optimizer what a twin of it would.
    """
    # The parts, and the precision that they were saved in.
    parts = saved.entries()
    if set(parts) - {LANES_PART} != set(SAVED_PARTS):
        received = ", ".join(map(str, parts))
        raise ValueError(f"{saved.where}: expected {', '.join(SAVED_PARTS)}, received {received}")
    _check_lanes(step, saved.optional_field(LANES_PART))
    saved_precision = _check_precision(parts["precision"])
    precision = step.precision
    fallback = fallback_precision(precision)
    if fallback is not None and saved_precision == fallback:
        precision = fallback
    exact = saved_precision == precision

    _check_same_tensors(step, saved, exact=exact)
    check_optimizer_state(
        parts["optimizer"], step.optimizer, state_dtypes=_state_dtypes(step), exact=exact
    )
    _check_state(step, parts["state"], exact=exact)
    _check_can_continue(step, saved, precision)


def apply_saved_step(step: "TrainStep", saved: dict[str, Any]) -> None:
    """Loads a state that was checked. Where the user's own code fails, a ValueError names it."""
    # Skips had gone on too long in the saved run, and it continued in its fallback.
    fallback = fallback_precision(step.precision)
    if fallback is not None and saved["precision"] == fallback.state_dict():
        step.switch(fallback)

    scale_before = step.state.scale
    growth_before = step.state.growth
    with _named_errors(f"the load_state_dict of {type(step.net).__name__}"):
        step.net.load_state_dict(saved["net"])
    with torch.no_grad():
        for name, tensor in find_extra_tensors(step).items():
            tensor.copy_(saved["beside"][name])
    with _named_errors(f"the load_state_dict of {type(step.optimizer).__name__}"):
        # A copy: torch keeps the given tensors.
        step.load_optimizer_state(copy.deepcopy(saved["optimizer"]))
    load_state(step.state, saved["state"], step.device)
    _load_lanes(step, saved.get(LANES_PART))
    step.after_load()

    # Another precision: its loss scale is this step's own.
    precision = step.precision.state_dict()
    if saved["precision"] != precision:
        continues = "weights and optimizer continue"
        if saved["precision"]["scale"] != precision["scale"]:
            step.state.scale = scale_before
            step.state.growth = growth_before
            continues = f"{continues}, the loss scale is this one's own"
        warnings.warn(
            f"the saved step ran in {saved['precision']['name']!r}, this one runs in "
            f"{step.precision.name!r}: {continues}",
            Notice,
            stacklevel=user_stacklevel(),
        )


def _describe_lanes(step: "TrainStep", lanes: Lanes) -> dict[str, Any]:
    """What decides the random numbers and the sums of later steps, beside the state itself."""
    return {"seed": step.lane_seed, "exact": lanes.exact, "count": lanes.count}


def _check_lanes(step: "TrainStep", saved: SavedValue | None) -> None:
    """Refuses bits that could not be continued: those of another number of lanes."""
    if saved is None:
        return
    saved.field("seed").whole_number()
    was_exact = saved.field("exact").flag()
    count = saved.field("count").whole_number(minimum=1)
    lanes = step.lanes
    if was_exact and lanes is not None and lanes.exact and lanes.count != count:
        raise ValueError(
            f"{saved.where}: the run was trained with exact='bits' in {count} logical "
            f"micro-batches, this step has logical={lanes.count}; give logical={count}"
        )


def _load_lanes(step: "TrainStep", saved: dict[str, Any] | None) -> None:
    """Goes on with the saved seed. Says where the sums will not have the bits that they had."""
    is_exact = step.lanes is not None and step.lanes.exact
    was_exact = saved is not None and saved["exact"]
    if saved is not None and step.lanes is not None:
        step.set_lane_seed(saved["seed"])
    if was_exact != is_exact:
        names = {True: "exact='bits'", False: "ordinary sums"}
        warnings.warn(
            f"the saved step had {names[was_exact]}, this one has {names[is_exact]}: it goes on, "
            "but not with the bits that the other would have given",
            Notice,
            stacklevel=user_stacklevel(),
        )


def reset_averages(step: "TrainStep") -> None:
    """After weights were set from outside: averages start at them, and no rounding is owed."""
    with torch.no_grad():
        for average, p in zip(step.state.ema, step.params, strict=False):
            average.copy_(p)
        for residue in step.state.residue:
            residue.zero_()


def find_extra_tensors(step: "TrainStep") -> dict[str, Tensor]:
    """Tensors that decide the next step and are not in the network's state_dict.

    Buffers that are not saved, the loss's tensors, parameters outside the network.
    """
    in_state_dict = {id(value) for value in step.net.state_dict(keep_vars=True).values()}
    named = [*step.net.named_buffers(), *zip(step.names, step.params, strict=True)]
    loss = step.objective.loss
    if isinstance(loss, nn.Module):
        for name, tensor in (*loss.named_parameters(), *loss.named_buffers()):
            named.append((f"loss.{name}", tensor))
    return {name: tensor for name, tensor in named if id(tensor) not in in_state_dict}


def _clone_tensors(tree: Any) -> Any:
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, dict(tree))


@contextmanager
def _named_errors(what: str) -> Iterator[None]:
    """An error of code that is not ours becomes a ValueError that says whose it is."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"{OWNER}: {what} failed: {type(error).__name__}: {error}. Nothing was loaded"
        ) from error


def _check_precision(saved: SavedValue) -> Precision:
    """The precision that a state was saved in."""
    entries = saved.entries()
    saved.field("name").text()
    saved.field("scale").entries()
    try:
        return Precision(**{str(name): entry.value for name, entry in entries.items()})
    except (TypeError, ValueError, KeyError, AttributeError):
        saved.refuse("the settings of a precision")


def _check_same_tensors(step: "TrainStep", saved: SavedValue, *, exact: bool) -> None:
    """Refuses the tensors of another network or another loss, and parameters of another dtype."""
    # Hooks may rename a network's tensors while it loads: then names prove nothing.
    net = saved.field("net")
    saved_net = net.entries()
    renames = any(module._load_state_dict_pre_hooks for module in step.net.modules())
    if not renames:
        net_tensors = step.net.state_dict(keep_vars=True)
        saved_only = saved_net if net_tensors else ()
        _compare_shapes(saved, net_tensors, net.value, [*net_tensors, *saved_only])
        _compare_dtypes(net_tensors, saved_net, exact=exact)
    extra_tensors = find_extra_tensors(step)
    saved_extra = saved.field("beside").entries()
    _compare_shapes(saved, extra_tensors, saved.value["beside"], list(extra_tensors))
    _compare_dtypes(extra_tensors, saved_extra, exact=exact)


def _compare_shapes(
    saved: SavedValue, present: dict[str, Any], received: dict[str, Any], names: list[str]
) -> None:
    for name in names:
        expected_shape = _describe_shape(present.get(name, MISSING))
        received_shape = _describe_shape(received.get(name, MISSING))
        if expected_shape != received_shape:
            raise ValueError(
                f"{saved.where}: {name}: expected {expected_shape}, received {received_shape}; "
                "build the network and the loss as they were when it was saved. Nothing was loaded"
            )


def _compare_dtypes(present: dict[str, Any], saved: dict[str, SavedValue], *, exact: bool) -> None:
    """Parameters have their dtype, unless another precision saved them; buffers its kind."""
    for name, tensor in present.items():
        if isinstance(tensor, Tensor):
            same_dtype = exact and isinstance(tensor, nn.Parameter)
            saved[name].tensor_like(tensor, same_dtype=same_dtype)


def _describe_shape(value: Any) -> str:
    if value is MISSING:
        return "no such tensor"
    if isinstance(value, Tensor):
        return f"shape {list(value.shape)}"
    return "a value"


def _state_dtypes(step: "TrainStep") -> dict[int, torch.dtype]:
    """By a parameter's position in the optimizer, the dtype of its state: float32 where parameters
    are updated as float32 copies."""
    params = [p for group in step.optimizer.param_groups for p in group["params"]]
    updated_as_fp32 = step.updated_as_fp32
    return {
        position: torch.float32 if id(p) in updated_as_fp32 else p.dtype
        for position, p in enumerate(params)
    }


def _check_state(step: "TrainStep", saved: SavedValue, *, exact: bool) -> None:
    """Counters, scale, averages and the open cycle, field by field."""
    present = step.state
    entries = _fields_of(saved, present)

    # Counters and the scale.
    entries["steps"].whole_number()
    for name in ("updates", "skips", "streak", "growth", "halted"):
        entries[name].count_tensor(getattr(present, name))
    entries["bad"].tensor_like(present.bad)
    scale = float(entries["scale"].tensor_like(present.scale))
    if not 0 < scale < math.inf:
        entries["scale"].refuse("a finite scale above 0")

    # Averages and residues.
    for name, option in (("ema", "ema="), ("residue", "rounding=")):
        present_tensors: list[Tensor] = getattr(present, name)
        items = entries[name].items()
        if len(present_tensors) != len(items):
            raise ValueError(
                f"{saved.where}: expected {len(present_tensors)} tensors of {name}, "
                f"received {len(items)}; build the step with the {option} it was saved with"
            )
        for item, tensor in zip(items, present_tensors, strict=True):
            item.tensor_like(tensor, same_dtype=exact)

    _check_cycle(step, entries["cycle"])


def _check_cycle(step: "TrainStep", saved: SavedValue) -> None:
    """The open cycle. Of a closed one only the kinds count: nothing reads it."""
    entries = _fields_of(saved, step.state.cycle)
    is_open = entries["micro"].whole_number() > 0
    has_grads = is_open or entries["grads"].value != []
    grads = entries["grads"].items(len(step.params) if has_grads else 0)
    for i, grad in enumerate(grads):
        if grad.value is not None:
            dtype = step.accumulator.sum_dtypes[i] if is_open else None
            grad.tensor(dtype, step.params[i].shape)
    for name in ("weight", "nominal", "loss"):
        if is_open:
            entries[name].tensor(torch.float64, ())
        elif entries[name].value is not None:
            entries[name].tensor()

    copies = entries["buffers"].items()
    for item in copies:
        item.tensor()
    if is_open and copies:
        buffers = step.buffers.tensors()
        for item, buffer in zip(entries["buffers"].items(len(buffers)), buffers, strict=True):
            item.tensor_like(buffer, same_dtype=False)


def _fields_of(saved: SavedValue, present: Any) -> dict[str, SavedValue]:
    """The entries of a saved dataclass, which are its fields and no others."""
    names = [f.name for f in fields(present)]
    entries = saved.entries()
    if sorted(names) != sorted(map(str, entries)):
        raise ValueError(
            f"{saved.where}: expected the fields {', '.join(names)}; "
            f"received {', '.join(map(str, entries))}"
        )
    return entries


def _check_can_continue(step: "TrainStep", saved: SavedValue, precision: Precision) -> None:
    """Refuses an open cycle that could not be continued."""
    open_micro_batches = saved.value["state"]["cycle"]["micro"]
    same_scale = saved.value["precision"]["scale"] == precision.state_dict()["scale"]
    if open_micro_batches and not same_scale:
        raise ValueError(
            f"{saved.where}: the saved update cycle is open and its gradients carry "
            "another loss scale; call flush() before saving, or load it with the same scale"
        )
    if open_micro_batches and step.lanes is not None:
        raise ValueError(
            f"{saved.where}: {open_micro_batches} batches of the saved update cycle are open, "
            "summed by one process, and cannot be divided over ranks or lanes; go on from a step "
            "that ends a cycle, or in one process without exact= up to such a step"
        )
    if open_micro_batches and open_micro_batches >= step.options.accumulate:
        raise ValueError(
            f"{saved.where}: {open_micro_batches} batches of the saved update cycle "
            f"are open, expected fewer than accumulate={step.options.accumulate}; "
            "call flush() before saving, or give the accumulate= it had"
        )
