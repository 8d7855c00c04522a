"""Looking at a step: its saved state, its fingerprints, its report."""

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.errors import Notice
from halfstep.precision.observe import Observed
from halfstep.step.fingerprint import fingerprint
from halfstep.step.state import load, save

if TYPE_CHECKING:
    from halfstep.step.train import TrainStep


def save_step(step: "TrainStep") -> dict[str, Any]:
    """Everything that decides the next step: network, optimizer, counters, scale, averages, the open cycle."""
    return {
        "net": {k: v.detach().clone() for k, v in step.net.state_dict().items()},
        "optimizer": step.optimizer.state_dict(),
        "state": save(step.state),
        "precision": step.precision.state_dict(),
    }


def load_step(step: "TrainStep", saved: dict[str, Any]) -> None:
    """Puts `saved` back, bit for bit; a change of precision is announced and keeps this step's own loss scale."""
    expected = ("net", "optimizer", "state", "precision")
    if set(saved) != set(expected):
        raise ValueError(f"TrainStep.load_state_dict: expected {', '.join(expected)}, received {', '.join(saved)}")
    scale = step.state.scale, step.state.growth
    step.net.load_state_dict(saved["net"])
    step.load_optimizer(saved["optimizer"])
    load(step.state, saved["state"], step.device)
    if saved["precision"] != step.precision.state_dict():
        was, now = saved["precision"]["name"], step.precision.name
        if saved["precision"]["scale"] != step.precision.state_dict()["scale"]:
            step.state.scale, step.state.growth = scale
        warnings.warn(
            f"the saved step ran in {was!r}, this one runs in {now!r}: weights and optimizer continue",
            Notice,
            stacklevel=3,
        )


def named_state(step: "TrainStep") -> dict[str, Tensor]:
    """Every tensor that decides the next step, by name."""
    named = {f"net.{k}": v for k, v in step.net.state_dict().items() if isinstance(v, Tensor)}
    for name, p in zip(step.names, step.params, strict=True):
        for key, value in step.optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                named[f"optimizer.{name}.{key}"] = value
    return {**named, **_flatten("state", save(step.state))}


def fingerprints(step: "TrainStep") -> dict[str, Tensor]:
    """A 64-bit fingerprint per tensor of the state, computed where it lives, all on the step's device."""
    return {name: fingerprint(t).to(step.device) for name, t in named_state(step).items()}


def _flatten(prefix: str, value: Any) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {prefix: value}
    if isinstance(value, int):
        return {prefix: torch.tensor(value)}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {name: t for key, v in items for name, t in _flatten(f"{prefix}.{key}", v).items()}


@dataclass(frozen=True)
class Report:
    """The dtypes really used, module by module, and every choice made for the user."""

    choices: dict[str, str]
    modules: dict[str, Observed]

    def __str__(self) -> str:
        lines = [f"{key:>12}: {value}" for key, value in self.choices.items()]
        if not self.modules:
            return "\n".join([*lines, "     modules: run one step, then the dtypes of each module are listed here"])
        rows = [("module", "kind", "input", "weight", "output")]
        rows += [(name or "(network)", *seen) for name, seen in self.modules.items()]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        table = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, "", *table])


def report(step: "TrainStep") -> Report:
    """What was chosen and what was seen."""
    p, where = step.precision, "device" if step.on_device else "host"
    kernels = "round(fp32 product) on this CPU" if step.applied.fast else "torch's own"
    choices = {
        "precision": f"{p.name}: parameters {p.params}, compute {p.compute}, norms {p.norms}, output {p.output}",
        "loss scale": repr(p.loss_scale),
        "half kernels": kernels,
        "optimizer": f"{type(step.optimizer).__name__}, {step.kind}; updates decided on the {where}",
        "non-finite": step.options.nonfinite or "ignore",
        "cycle": f"{step.options.accumulate} batches per update",
    }
    if step.applied.converted:
        choices["converted"] = f"{len(step.applied.converted)} parameters to {p.params}, in place"
    if step.notices:
        choices["notices"] = "; ".join(step.notices)
    return Report({k: v.replace("torch.", "") for k, v in choices.items()}, dict(step.applied.observed))
