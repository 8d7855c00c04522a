"""A step's saved state: everything that decides the next step, as plain dicts, numbers, tensors.

Loading checks first: what does not fit is refused before anything is changed.
"""

import copy
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from halfstep.errors import Notice
from halfstep.step.overflow import fallback_precision
from halfstep.step.state import load_state, state_to_dict

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

# The keys of a saved step. "beside" holds what lies outside the network's own state_dict.
SAVED_PARTS = ("net", "beside", "optimizer", "state", "precision")

# Settings that torch's schedulers leave in the groups of an optimizer.
SCHEDULER_PREFIXES = ("initial_", "max_", "min_", "base_")


def step_to_dict(step: "TrainStep") -> dict[str, Any]:
    """Network, optimizer, counters, scale, averages, the open cycle; not torch's random state."""
    extra_tensors = find_extra_tensors(step)
    return {
        "net": _clone_tensors(step.net.state_dict()),
        "beside": {name: tensor.detach().clone() for name, tensor in extra_tensors.items()},
        "optimizer": _clone_tensors(step.optimizer.state_dict()),
        "state": state_to_dict(step.state),
        "precision": step.precision.state_dict(),
    }


def load_step(step: "TrainStep", saved: dict[str, Any]) -> None:
    """Restores a saved step, bit for bit.

    A change of precision is announced, and the step keeps its own loss scale.
    """
    # Check everything before anything is loaded.
    if set(saved) != set(SAVED_PARTS):
        raise ValueError(
            f"TrainStep.load_state_dict: expected {', '.join(SAVED_PARTS)}, "
            f"received {', '.join(saved)}"
        )
    _check_same_tensors(step, saved)
    _check_same_optimizer(step.optimizer, saved["optimizer"]["param_groups"])

    # Skips had gone on too long in the saved run, and it continued in its fallback.
    fallback = fallback_precision(step.precision)
    if fallback is not None and saved["precision"] == fallback.state_dict():
        step.switch(fallback)
    _check_can_continue(step, saved)

    # Load.
    scale_before = step.state.scale
    growth_before = step.state.growth
    step.net.load_state_dict(saved["net"])
    with torch.no_grad():
        for name, tensor in find_extra_tensors(step).items():
            tensor.copy_(saved["beside"][name])
    step.load_optimizer_state(copy.deepcopy(saved["optimizer"]))  # torch keeps the given tensors
    load_state(step.state, saved["state"], step.device)
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
            stacklevel=3,
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


def _check_same_tensors(step: "TrainStep", saved: dict[str, Any]) -> None:
    """Refuses the tensors of another network or another loss."""
    # Hooks may rename a network's tensors while it loads: then names prove nothing.
    renames = any(module._load_state_dict_pre_hooks for module in step.net.modules())
    if not renames:
        net_tensors = step.net.state_dict()
        saved_only = saved["net"] if net_tensors else ()
        _compare_shapes(net_tensors, saved["net"], [*net_tensors, *saved_only])
    extra_tensors = find_extra_tensors(step)
    _compare_shapes(extra_tensors, saved["beside"], list(extra_tensors))


def _compare_shapes(present: dict[str, Any], saved: dict[str, Any], names: list[str]) -> None:
    for name in names:
        expected = _describe_shape(present.get(name))
        received = _describe_shape(saved.get(name))
        if expected != received:
            raise ValueError(
                f"TrainStep.load_state_dict: {name}: expected {expected}, received {received}; "
                "build the network and the loss as they were when it was saved. Nothing was loaded"
            )


def _describe_shape(value: Any) -> str:
    if value is None:
        return "no such tensor"
    if isinstance(value, Tensor):
        return f"shape {list(value.shape)}"
    return "a value"


def _check_same_optimizer(optimizer: Optimizer, saved_groups: list[dict[str, Any]]) -> None:
    """Refuses the state of an optimizer with other groups, or of another kind."""
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(
            f"TrainStep.load_state_dict: expected an optimizer with {sizes} parameters in its "
            f"groups, received {saved_sizes}; build the optimizer as it was when it was saved. "
            "Nothing was loaded"
        )

    # Another kind of optimizer has settings that this one lacks, and lacks some of this one's.
    # Another version of the same kind differs in one direction only.
    for group, saved_group in zip(optimizer.param_groups, saved_groups, strict=True):
        missing = [name for name in optimizer.defaults if name not in saved_group]
        foreign = [name for name in saved_group if name not in group]
        foreign = [name for name in foreign if not name.startswith(SCHEDULER_PREFIXES)]
        if missing and foreign:
            raise ValueError(
                "TrainStep.load_state_dict: expected the state of "
                f"{type(optimizer).__name__}, received one without {', '.join(missing)} and with "
                f"{', '.join(foreign)}; build the optimizer that it was saved with. "
                "Nothing was loaded"
            )


def _check_can_continue(step: "TrainStep", saved: dict[str, Any]) -> None:
    """Refuses an open cycle that could not be continued, and missing averages or residues."""
    open_micro_batches = saved["state"]["cycle"]["micro"]
    same_scale = saved["precision"]["scale"] == step.precision.state_dict()["scale"]
    if open_micro_batches and not same_scale:
        raise ValueError(
            "TrainStep.load_state_dict: the saved update cycle is open and its gradients carry "
            "another loss scale; call flush() before saving, or load it with the same scale"
        )
    if open_micro_batches and open_micro_batches >= step.options.accumulate:
        raise ValueError(
            f"TrainStep.load_state_dict: {open_micro_batches} batches of the saved update cycle "
            f"are open, expected fewer than accumulate={step.options.accumulate}; "
            "call flush() before saving, or give the accumulate= it had"
        )
    for field, option in (("ema", "ema="), ("residue", "rounding=")):
        expected = len(getattr(step.state, field))
        received = len(saved["state"][field])
        if expected != received:
            raise ValueError(
                f"TrainStep.load_state_dict: expected {expected} tensors of {field}, "
                f"received {received}; build the step with the {option} it was saved with"
            )
