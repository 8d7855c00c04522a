"""Looking at a step: its saved state, its fingerprints, its report."""

import copy
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from halfstep.errors import Notice
from halfstep.precision.casting import Observed
from halfstep.step import overflow as trouble
from halfstep.step.fingerprint import fingerprint
from halfstep.step.state import load_state, state_to_dict

if TYPE_CHECKING:
    from halfstep.step.train_step import TrainStep

_SCHEDULERS = (
    "initial_",
    "max_",
    "min_",
    "base_",
)  # settings that torch's schedulers leave in groups


def step_to_dict(step: "TrainStep") -> dict[str, Any]:
    """What decides the next step: network, optimizer, counters, scale, averages, the open cycle; not torch's RNG."""
    return {
        "net": _cloned(step.net.state_dict()),
        "beside": {k: v.detach().clone() for k, v in extra_tensors(step).items()},
        "optimizer": _cloned(step.optimizer.state_dict()),
        "state": state_to_dict(step.state),
        "precision": step.precision.state_dict(),
    }


def load_step(step: "TrainStep", saved: dict[str, Any]) -> None:
    """Puts `saved` back, bit for bit; a change of precision is announced and keeps this step's own loss scale."""
    expected = ("net", "beside", "optimizer", "state", "precision")
    if set(saved) != set(expected):
        raise ValueError(
            f"TrainStep.load_state_dict: expected {', '.join(expected)}, received {', '.join(saved)}"
        )
    _check_same_tensors(step, saved)
    fallen = trouble.fallback_precision(step.precision)
    if fallen is not None and saved["precision"] == fallen.state_dict():
        step.switch(
            fallen
        )  # skips had gone on too long in the saved run, and it went on in this one
    _check_can_continue(step, saved)
    scale = step.state.scale, step.state.growth
    step.net.load_state_dict(saved["net"])
    with torch.no_grad():
        for name, tensor in extra_tensors(step).items():
            tensor.copy_(saved["beside"][name])
    step.load_optimizer_state(
        copy.deepcopy(saved["optimizer"])
    )  # torch would keep the caller's tensors
    load_state(step.state, saved["state"], step.device)
    step.after_load()
    if saved["precision"] != step.precision.state_dict():
        was, now = saved["precision"]["name"], step.precision.name
        if saved["precision"]["scale"] != step.precision.state_dict()["scale"]:
            step.state.scale, step.state.growth = scale
        warnings.warn(
            f"the saved step ran in {was!r}, this one runs in {now!r}: weights and optimizer continue",
            Notice,
            stacklevel=3,
        )


def reset_averages(step: "TrainStep") -> None:
    """After weights were put in from outside: the averages start at them, and no rounding of theirs is owed."""
    with torch.no_grad():
        for average, p in zip(step.state.ema, step.params, strict=False):
            average.copy_(p)
        for residue in step.state.residue:
            residue.zero_()


def _cloned(tree: Any) -> Any:
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, dict(tree))


def _check_same_tensors(step: "TrainStep", saved: dict[str, Any]) -> None:
    """Refuses, before anything is loaded, the tensors of another network and the groups of another optimizer."""
    renamed = any(
        module._load_state_dict_pre_hooks for module in step.net.modules()
    )  # by hooks, while it loads
    for part, mine in (
        ("net", {} if renamed else step.net.state_dict()),
        ("beside", extra_tensors(step)),
    ):
        for name in [*mine, *(saved[part] if part == "net" and mine else ())]:
            expected, came = (_shape(tensors.get(name)) for tensors in (mine, saved[part]))
            if expected != came:
                raise ValueError(
                    f"TrainStep.load_state_dict: {name}: expected {expected}, received {came}; build the network and "
                    f"the loss as they were when it was saved. Nothing was loaded"
                )
    groups = step.optimizer.param_groups, saved["optimizer"]["param_groups"]
    sizes = [[len(group["params"]) for group in each] for each in groups]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"TrainStep.load_state_dict: expected an optimizer with {sizes[0]} parameters in its groups, received "
            f"{sizes[1]}; build the optimizer as it was when it was saved. Nothing was loaded"
        )
    _check_kind(step.optimizer, groups[1])


def _check_kind(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Another kind of optimizer has settings that this one lacks, and lacks some; another version only one of both."""
    for mine, group in zip(optimizer.param_groups, groups, strict=True):
        lacks = [name for name in optimizer.defaults if name not in group]
        foreign = [name for name in group if name not in mine and not name.startswith(_SCHEDULERS)]
        if lacks and foreign:
            raise ValueError(
                f"TrainStep.load_state_dict: expected the state of {type(optimizer).__name__}, received one without "
                f"{', '.join(lacks)} and with {', '.join(foreign)}; build the optimizer that it was saved with. "
                "Nothing was loaded"
            )


def _shape(value: Any) -> str:
    if value is None:
        return "no such tensor"
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else "a value"


def _check_can_continue(step: "TrainStep", saved: dict[str, Any]) -> None:
    """Refuses, before anything is loaded, what could not continue."""
    if (
        saved["precision"]["scale"] != step.precision.state_dict()["scale"]
        and saved["state"]["cycle"]["micro"]
    ):
        raise ValueError(
            "TrainStep.load_state_dict: the saved update cycle is open and its gradients carry another loss scale; "
            "call flush() before saving, or load it with the same scale"
        )
    micro = saved["state"]["cycle"]["micro"]
    if micro and micro >= step.options.accumulate:
        raise ValueError(
            f"TrainStep.load_state_dict: {micro} batches of the saved update cycle are open, expected fewer than "
            f"accumulate={step.options.accumulate}; call flush() before saving, or give the accumulate= it had"
        )
    for field, option in (("ema", "ema="), ("residue", "rounding=")):
        expected, came = len(getattr(step.state, field)), len(saved["state"][field])
        if expected != came:
            raise ValueError(
                f"TrainStep.load_state_dict: expected {expected} tensors of {field}, received {came}; "
                f"build the step with the {option} it was saved with"
            )


def extra_tensors(step: "TrainStep") -> dict[str, Tensor]:
    """What decides the next step outside the network's state_dict: unsaved buffers, the loss's tensors, free ones."""
    known = {id(v) for v in step.net.state_dict(keep_vars=True).values()}
    parts = [*step.net.named_buffers(), *zip(step.names, step.params, strict=True)]
    loss = step.objective.loss
    if isinstance(loss, nn.Module):
        parts += [(f"loss.{k}", v) for k, v in (*loss.named_parameters(), *loss.named_buffers())]
    return {name: t for name, t in parts if id(t) not in known}


def named_state(step: "TrainStep") -> dict[str, Tensor]:
    """Every tensor that decides the next step, by name."""
    named = {f"net.{k}": v for k, v in step.net.state_dict().items() if isinstance(v, Tensor)}
    named |= {f"beside.{k}": v for k, v in extra_tensors(step).items()}
    for name, p in zip(step.names, step.params, strict=True):
        for key, value in step.optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                named[f"optimizer.{name}.{key}"] = value
    return {**named, **_flatten("state", state_to_dict(step.state), step.device)}


def fingerprints(step: "TrainStep") -> dict[str, Tensor]:
    """A 64-bit fingerprint per tensor of the state, computed where it lives, all on the step's device."""
    return {name: fingerprint(t).to(step.device) for name, t in named_state(step).items()}


def _flatten(prefix: str, value: Any, device: torch.device) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {prefix: value}
    if isinstance(value, int):
        return {prefix: torch.full((), value, device=device)}  # a fill, not a copy from the host
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return {
        name: t for key, v in items for name, t in _flatten(f"{prefix}.{key}", v, device).items()
    }


@dataclass(frozen=True)
class Report:
    """The dtypes really used, module by module, and every choice made for the user."""

    choices: dict[str, str]
    modules: dict[str, Observed]

    def adding(self, **choices: str) -> "Report":
        """The same with more choices in it."""
        return replace(self, choices={**self.choices, **choices})

    def __str__(self) -> str:
        lines = [f"{key:>15}: {value}" for key, value in self.choices.items()]
        if not self.modules:
            return "\n".join(
                [
                    *lines,
                    "        modules: run one step, then the dtypes of each module are listed here",
                ]
            )
        rows = [("module", "kind", "input", "weight", "output")]
        rows += [(name or "(network)", *seen) for name, seen in self.modules.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        table = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        return "\n".join([*lines, "", *table])


def _speed(step: "TrainStep") -> dict[str, str]:
    """The choices that make a step fast, each with its reason."""
    o, order, cuda = (
        step.options,
        "channels-last" if step.channels_last.on else "as given",
        step.device.type == "cuda",
    )
    choices = {
        "compiled": f"{'yes' if step.compiled.on else 'no'}: {step.compiled.reason}",
        "memory format": f"{order}: {step.channels_last.reason}",
        "cudnn benchmark": f"no: there is no cuDNN on this {step.device.type}",
    }
    if cuda:
        named = f"cudnn_benchmark={o.cudnn_benchmark}"
        auto = (
            "deterministic=True"
            if o.deterministic
            else "the fastest algorithm is measured for each shape"
        )
        choices["cudnn benchmark"] = (
            f"{'yes' if o.measures_algorithms else 'no'}: {auto if 'auto' in named else named}"
        )
        on = step.precision.name == "tf32"
        choices["tf32"] = (
            "yes: precision 'tf32'"
            if on
            else f"no: {step.precision.name!r} keeps float32 products exact"
        )
    return choices


def report(step: "TrainStep") -> Report:
    """What was chosen and what was seen."""
    p, where = step.precision, "device" if step.decides_on_device else "host"
    kernels = "round(fp32 product) on this CPU" if step.applied.fast else "torch's own"
    choices = {
        "precision": f"{p.name}: parameters {p.params}, compute {p.compute}, norms {p.norms}, output {p.output}",
        "loss scale": repr(p.loss_scale),
        "half kernels": kernels,
        "optimizer": f"{type(step.optimizer).__name__}, {step.optimizer_kind}; updates decided on the {where}",
        "non-finite": step.options.nonfinite or "ignore",
        "cycle": f"{step.options.accumulate} batches per update",
        **_speed(step),
    }
    if step.applied.converted:
        choices["converted"] = f"{len(step.applied.converted)} parameters to {p.params}, in place"
    if step.notices:
        choices["notices"] = "; ".join(step.notices)
    return Report(
        {k: v.replace("torch.", "") for k, v in choices.items()}, dict(step.applied.observed)
    )
