"""Residency: a data set kept on the device as it was read, or streamed there, and the reason for either."""

import re
from dataclasses import dataclass

import torch

from halfstep.data.pipeline.plan import Plan
from halfstep.data.pipeline.source import Columns

_CPU = torch.device("cpu")
_SHARE = 0.5  # of the free device memory when no budget is given: the network and its activations need the rest
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Placement:
    """Where batches come out and how they get there."""

    kind: str = (
        "host"  # or "resident": gathered on the device, or "stream": copied there batch by batch
    )
    device: torch.device = _CPU
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.kind} on {self.device}" + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Placed:
    plan: Plan
    placement: Placement
    honoured: bool = True  # False: residency was asked for and cannot be had


def found(plan: Plan) -> Placement:
    """Where the data is before anybody moves it."""
    device = plan.source.device
    return (
        Placement()
        if device.type == "cpu"
        else Placement("resident", device, "its tensors were there")
    )


def place(plan: Plan, device: torch.device, budget: int | float | str | None) -> Placed:
    """Columns on the device when they fit the budget and every map can run there; otherwise a stream that says why."""
    obstacle = _obstacle(plan, device, budget)
    if obstacle:
        return Placed(plan, Placement("stream", device, obstacle), honoured=False)
    assert isinstance(plan.source, Columns)
    size, have = readable(plan.source.nbytes), budget_bytes(budget, device)
    reason = size if have is None else f"{size} of a budget of {readable(have)}"
    return Placed(plan.with_source(plan.source.to(device)), Placement("resident", device, reason))


def _obstacle(plan: Plan, device: torch.device, budget: int | float | str | None) -> str:
    if not isinstance(plan.source, Columns):
        return "its samples are read one by one by a Dataset; .load() reads them into memory first"
    if plan.per_sample:
        return f"{plan.per_sample} works on single samples on the host; use a transform, or map after batch()"
    need, have = plan.source.nbytes, budget_bytes(budget, device)
    there = plan.source.device.type == device.type != "cpu"  # then it takes no more
    if have is not None and need > have and not there:
        return f"it takes {readable(need)} and the budget is {readable(have)}; budget= changes that"
    return ""


def budget_bytes(budget: int | float | str | None, device: torch.device) -> int | None:
    """Bytes from a number of them, a string such as "8GB", or a fraction (a float up to 1) of the free memory.

    None is half of what is free, and on the CPU no limit: the data is in memory already."""
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", budget, re.IGNORECASE)
        if match:
            return int(float(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0:
        return budget
    elif budget is None or (isinstance(budget, float) and 0 < budget <= 1):
        free = _free(device)
        return None if free is None else int(free * (_SHARE if budget is None else budget))
    raise ValueError(
        f"budget: expected bytes, a size such as '8GB' or a fraction of the free memory such as 0.5, got {budget!r}"
    )


def readable(count: int) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024  # type: ignore[assignment]
    return f"{count:.4g} TiB"


def _free(device: torch.device) -> int | None:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return (
        None if device.type == "cpu" else 8 << 30
    )  # other backends do not tell: 4 GiB with the usual share
