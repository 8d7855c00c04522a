"""Every sample of a data set read into memory once, as small as the pipeline's first transforms make it."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfstep.data.pipeline.maps import Chain, Done, Function, Map
from halfstep.data.pipeline.maps__parts import Batch, stacked
from halfstep.data.pipeline.plan import Plan
from halfstep.data.pipeline.seeding import seeded
from halfstep.data.pipeline.source import Columns
from halfstep.data.transforms import spec

_CHUNK = 64  # samples read at a time: images that are resized are not in memory all at once


class _Uneven(Exception):
    """A column, by name, whose samples do not stack."""


def loaded(plan: Plan) -> Plan:
    """The same pipeline over tensors in memory. Of the transforms without random numbers that come first on a column,
    as many are applied as make its samples equal and smallest; the others stay."""
    if isinstance(plan.source, Columns):
        return plan
    tries = _tries(plan)
    while True:
        maps = {at: _first(plan.maps[at], counts[0]) for at, counts in tries.items()}
        try:
            tensors = _read(plan, list(maps.values()))
        except _Uneven as uneven:
            _go_on(tries, plan, str(uneven))
            continue
        rest = tuple(_done(m, tries[at][0]) if at in tries else m for at, m in enumerate(plan.maps))
        return plan.with_source(Columns(tensors, str(plan.source)), rest)


def _tries(plan: Plan) -> dict[int, list[int]]:
    """For each chain that comes first on its columns: how many of its transforms to apply, the best number first."""
    probe = _fetched(plan, 0, min(_CHUNK, plan.source.size))
    found: dict[int, list[int]] = {}
    seen: set[str] = set()
    for at, change in enumerate(plan.maps):
        if isinstance(change, Function):
            break
        if isinstance(change, Chain) and not seen & set(change.columns):
            found[at] = _counts(change, probe)
            seen.update(change.columns)
    return found


def _counts(chain: Chain, probe: Batch) -> list[int]:
    """Numbers of transforms after which the samples that were looked at are equal, the fewest bytes first."""
    lead = next((i for i, each in enumerate(chain.transforms) if each.draws), len(chain.transforms))
    bytes_after = {}
    for count in range(lead + 1):
        made = [_specs(chain, count, probe[name]) for name in chain.columns]
        if all(len(specs) == 1 for specs in made):
            bytes_after[count] = sum(
                shape.numel() * dtype.itemsize for specs in made for shape, dtype in specs
            )
    return sorted(bytes_after, key=lambda count: (bytes_after[count], -count)) or [lead]


def _specs(chain: Chain, count: int, column: Any) -> set[tuple[torch.Size, torch.dtype]]:
    tensors = [torch.as_tensor(part) for part in column]
    given = {(part.shape, part.dtype) for part in tensors}
    made = (spec(chain.transforms[:count], (1, *shape), dtype) for shape, dtype in given)
    return {(torch.Size(shape[1:]), dtype) for shape, dtype in made}


def _first(map: Map, count: int) -> Chain:
    assert isinstance(map, Chain)
    return replace(map, transforms=map.transforms[:count])


def _done(map: Map, count: int) -> Map:
    assert isinstance(map, Chain)
    done = tuple(each if isinstance(each, Done) else Done(each) for each in map.transforms[:count])
    return replace(map, transforms=(*done, *map.transforms[count:]))


def _go_on(tries: dict[int, list[int]], plan: Plan, column: str) -> None:
    """The next number of transforms for the chain of a column that did not stack; an error where there is none."""
    for at, counts in tries.items():
        change = plan.maps[at]
        if isinstance(change, Chain) and column in change.columns and len(counts) > 1:
            del counts[0]
            return
    raise ValueError(
        f"load: expected samples that stack to tensors, got others in [{column!r}]. Make them equal with a transform "
        "that comes first on the column, for instance .map(hs.data.Resize((224, 224)), ...), and call .load() after it."
    )


def _read(plan: Plan, chains: list[Chain]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for start in range(0, plan.source.size, _CHUNK):
        numbers = torch.arange(start, min(start + _CHUNK, plan.source.size))
        batch = _fetched(plan, start, len(numbers))
        for chain in chains:
            batch = chain(batch, torch.zeros_like(numbers), numbers)
        for name, column in batch.items():
            piece = stacked(name, column)
            if not isinstance(piece, Tensor):
                raise _Uneven(name)
            room = whole.setdefault(name, piece.new_empty((plan.source.size, *piece.shape[1:])))
            if (piece.shape[1:], piece.dtype) != (room.shape[1:], room.dtype):
                raise _Uneven(name)
            room[start : start + len(piece)] = piece
    return whole


def _fetched(plan: Plan, start: int, count: int) -> Batch:
    with seeded(plan.seed, 0, start):
        return plan.source.fetch(torch.arange(start, start + count))
