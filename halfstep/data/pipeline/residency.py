"""Residency: a data set kept on the device as it was read, or streamed there, and why.

Also `read_into_memory`: samples that are read one by one become columns that can be resident.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from halfstep.data.pipeline.collate import Batch, stack_column
from halfstep.data.pipeline.function_map import FunctionMap
from halfstep.data.pipeline.maps import AlreadyApplied, Map, MixMap, TransformMap
from halfstep.data.pipeline.plan import Plan
from halfstep.data.pipeline.seeding import seeded_generators
from halfstep.data.pipeline.source import ColumnSource
from halfstep.data.pipeline.torchvision_maps import TorchvisionMap
from halfstep.data.transforms import spec
from halfstep.utils.text import format_bytes

Budget = int | float | str | None

_CPU = torch.device("cpu")

# Share of the free device memory without a budget: the network and its activations need the rest.
_DEFAULT_SHARE = 0.5

# Backends other than CUDA do not say how much memory is free. With the usual share: 4 GiB.
_ASSUMED_FREE_BYTES = 8 << 30

_BYTES_OF_UNIT = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}

# Samples read at a time: images that are resized are not in memory all at once.
_CHUNK = 64


@dataclass(frozen=True)
class Placement:
    """Where batches come out and how they get there.

    `kind` is "host", "resident" (gathered on the device) or "stream" (copied there batch by batch).
    """

    kind: str = "host"
    device: torch.device = _CPU
    reason: str = ""

    def __str__(self) -> str:
        text = f"{self.kind} on {self.device}"
        return f"{text}: {self.reason}" if self.reason else text


@dataclass(frozen=True)
class PlacedPlan:
    """A plan on its device. Without `is_resident`, residency was requested and is not possible."""

    plan: Plan
    placement: Placement
    is_resident: bool = True


def initial_placement(plan: Plan) -> Placement:
    """Where the data is before anybody moves it."""
    device = plan.source.device
    if device.type == "cpu":
        return Placement()
    return Placement("resident", device, "its tensors were there")


def place_on(plan: Plan, device: torch.device, budget: Budget) -> PlacedPlan:
    """Columns on the device where they fit the budget and every map can run there.

    Otherwise a stream, with the reason in its placement.
    """
    obstacle = _why_not_resident(plan, device, budget)
    if obstacle:
        return PlacedPlan(plan, Placement("stream", device, obstacle), is_resident=False)
    assert isinstance(plan.source, ColumnSource)
    reason = format_bytes(plan.source.nbytes)
    available = budget_bytes(budget, device)
    if available is not None:
        reason = f"{reason} of a budget of {format_bytes(available)}"
    resident_plan = plan.with_source(plan.source.to(device))
    return PlacedPlan(resident_plan, Placement("resident", device, reason))


def _why_not_resident(plan: Plan, device: torch.device, budget: Budget) -> str:
    """The reason in words; an empty text where the data can be resident."""
    if not isinstance(plan.source, ColumnSource):
        return "its samples are read one by one by a Dataset; .load() reads them into memory first"
    function = plan.sample_function
    if isinstance(function, TorchvisionMap):
        return f"{function} is torchvision's, on single samples on the host; hs.data has transforms"
    if function:
        return (
            f"{function} works on single samples on the host; use a transform, or map after batch()"
        )
    needed = plan.source.nbytes
    available = budget_bytes(budget, device)
    is_there_already = plan.source.device.type == device.type != "cpu"  # then it takes no more
    if available is not None and needed > available and not is_there_already:
        return (
            f"it takes {format_bytes(needed)} and the budget is {format_bytes(available)}; "
            "budget= changes that"
        )
    return ""


def budget_bytes(budget: Budget, device: torch.device) -> int | None:
    """Bytes from a number of them, a text such as "8GB", or a fraction of the free memory.

    A float up to 1 is a fraction. None is half of what is free, and on the CPU no limit: the data
    is in memory already.
    """
    if isinstance(budget, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)i?B?\s*", budget, re.IGNORECASE)
        if match:
            return int(float(match[1]) * _BYTES_OF_UNIT[match[2].upper()])
    elif isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0:
        return budget
    elif budget is None or (isinstance(budget, float) and 0 < budget <= 1):
        free_bytes = _free_memory(device)
        if free_bytes is None:
            return None
        share = _DEFAULT_SHARE if budget is None else budget
        return int(free_bytes * share)
    raise ValueError(
        "budget: expected bytes, a size such as '8GB' or a fraction of the free memory such as "
        f"0.5, got {budget!r}"
    )


def _free_memory(device: torch.device) -> int | None:
    """Free bytes on the device; None for the CPU, where data takes no more than it does."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return None if device.type == "cpu" else _ASSUMED_FREE_BYTES


# Reading every sample into memory


class _UnevenColumn(Exception):
    """A column, by name, whose samples do not stack."""


def read_into_memory(plan: Plan) -> Plan:
    """The same pipeline over tensors in memory.

    Of the transforms without random numbers that come first on a column, as many are applied as
    make its samples equal and smallest; the others stay in the pipeline.
    """
    if isinstance(plan.source, ColumnSource):
        return plan
    counts_by_map = _transform_counts(plan)
    while True:
        chains = [_leading_part(plan.maps[i], counts[0]) for i, counts in counts_by_map.items()]
        try:
            tensors = _read_columns(plan, chains)
        except _UnevenColumn as column:
            _try_next_count(counts_by_map, plan, str(column))
            continue
        remaining = list(plan.maps)
        for i, counts in counts_by_map.items():
            remaining[i] = _mark_applied(plan.maps[i], counts[0])
        return plan.with_source(ColumnSource(tensors, str(plan.source)), tuple(remaining))


def _transform_counts(plan: Plan) -> dict[int, list[int]]:
    """How many transforms to apply of each chain that comes first on its columns.

    By the chain's place among the maps; of the numbers that are possible, the best comes first.
    """
    probe = _fetch_range(plan, 0, min(_CHUNK, plan.source.size))
    counts_by_map: dict[int, list[int]] = {}
    seen_columns: set[str] = set()
    for i, operation in enumerate(plan.maps):
        if isinstance(operation, FunctionMap | MixMap):
            break
        if isinstance(operation, TransformMap) and not seen_columns & set(operation.columns):
            counts_by_map[i] = _counts_by_bytes(operation, probe)
            seen_columns.update(operation.columns)
    return counts_by_map


def _counts_by_bytes(chain: TransformMap, probe: Batch) -> list[int]:
    """Numbers of transforms after which the probed samples are equal, the fewest bytes first.

    Of two numbers with as many bytes, the larger one comes first.
    """
    leading = 0
    while leading < len(chain.transforms) and not chain.transforms[leading].draws:
        leading += 1

    bytes_after: dict[int, int] = {}
    for count in range(leading + 1):
        specs_of_columns = [_specs_after(chain, count, probe[name]) for name in chain.columns]
        if all(len(specs) == 1 for specs in specs_of_columns):
            bytes_after[count] = sum(
                shape.numel() * dtype.itemsize
                for specs in specs_of_columns
                for shape, dtype in specs
            )
    counts = sorted(bytes_after, key=lambda count: (bytes_after[count], -count))
    return counts or [leading]


def _specs_after(
    chain: TransformMap, count: int, column: Any
) -> set[tuple[torch.Size, torch.dtype]]:
    """The shapes and dtypes of the column's samples after the first `count` transforms."""
    samples = [torch.as_tensor(sample) for sample in column]
    specs = set()
    for shape, dtype in {(sample.shape, sample.dtype) for sample in samples}:
        new_shape, new_dtype = spec(chain.transforms[:count], (1, *shape), dtype)
        specs.add((torch.Size(new_shape[1:]), new_dtype))
    return specs


def _leading_part(operation: Map, count: int) -> TransformMap:
    """The chain of the first `count` transforms."""
    assert isinstance(operation, TransformMap)
    return replace(operation, transforms=operation.transforms[:count])


def _mark_applied(operation: Map, count: int) -> Map:
    """The chain, in which the first `count` transforms do nothing any more."""
    assert isinstance(operation, TransformMap)
    applied = [
        transform if isinstance(transform, AlreadyApplied) else AlreadyApplied(transform)
        for transform in operation.transforms[:count]
    ]
    return replace(operation, transforms=(*applied, *operation.transforms[count:]))


def _try_next_count(counts_by_map: dict[int, list[int]], plan: Plan, column: str) -> None:
    """Drops the best number of transforms for the chain of a column that did not stack.

    Raises a ValueError where no other number is left.
    """
    for i, counts in counts_by_map.items():
        operation = plan.maps[i]
        if isinstance(operation, TransformMap) and column in operation.columns and len(counts) > 1:
            del counts[0]
            return
    raise ValueError(
        f"load: expected samples that stack to tensors, got others in [{column!r}]. Make them "
        "equal with a transform that comes first on the column, for instance "
        ".map(hs.data.Resize((224, 224)), ...), and call .load() after it."
    )


def _read_columns(plan: Plan, chains: list[TransformMap]) -> dict[str, Tensor]:
    """All samples of the source after the chains, as one tensor for each column."""
    size = plan.source.size
    columns: dict[str, Tensor] = {}
    for start in range(0, size, _CHUNK):
        numbers = torch.arange(start, min(start + _CHUNK, size))
        batch = _fetch_range(plan, start, len(numbers))
        for chain in chains:
            batch = chain(batch, torch.zeros_like(numbers), numbers)
        for name, samples in batch.items():
            chunk = stack_column(name, samples)
            if not isinstance(chunk, Tensor):
                raise _UnevenColumn(name)
            if name not in columns:
                columns[name] = chunk.new_empty((size, *chunk.shape[1:]))
            column = columns[name]
            if (chunk.shape[1:], chunk.dtype) != (column.shape[1:], column.dtype):
                raise _UnevenColumn(name)
            column[start : start + len(chunk)] = chunk
    return columns


def _fetch_range(plan: Plan, start: int, count: int) -> Batch:
    """Samples start..start+count−1 as they are read."""
    with seeded_generators(plan.seed, 0, start):
        return plan.source.fetch(torch.arange(start, start + count))
