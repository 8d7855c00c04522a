"""What cannot be sunk, and what is said about it."""

import warnings
from typing import Any, Literal, TypeAlias

import torch

from halfstep.cuda_graphs.guards import has_step_hooks
from halfstep.errors import Notice, UncapturableError
from halfstep.step import TrainStep

OnUncapturable: TypeAlias = Literal["raise", "eager"]


def why_not_capturable(step: Any, device: torch.device) -> str:
    """Why a step cannot be sunk; "" when it can."""
    mine = isinstance(step, TrainStep)
    if device.type != "cuda" and not (device.type == "cpu" and mine and step.compiled.on):
        return f"{device.type} has no graphs to capture"
    if not mine:
        return "the step is a cell of your own; hs.sink(cell, data) captures it"
    if not step.decides_on_device and (
        device.type == "cuda" or step.optimizer_kind == "host" or step.options.decide == "host"
    ):
        name = type(step.optimizer).__name__
        return f"{name} ({step.optimizer_kind}) reads values on the host at every update; fused=True or capturable=True does not"
    return (
        "the optimizer has step hooks, which a replay would not run"
        if has_step_hooks(step.optimizer)
        else ""
    )


def raise_or_warn(
    reason: str, policy: OnUncapturable | Literal["parts"], cause: BaseException | None = None
) -> None:
    """Raises, or says that the step runs launch by launch, or that it is compiled in part only."""
    if policy == "parts":
        text = f"this step cannot be one compiled program:\n  {reason}\nForward and loss are, the rest runs eagerly."
        return warnings.warn(text, Notice, stacklevel=4)
    said = f"this step cannot be captured as a CUDA graph:\n  {reason}"
    if policy == "raise":
        advice = "Keep values on the device, or give on_uncapturable='eager'."
        raise UncapturableError(f"{said}\n{advice}") from cause
    warnings.warn(f"{said}\nIt runs eagerly, launch by launch.", Notice, stacklevel=4)
