"""What decides the next step, what a step reports, and the counted way to read device values.

Saved checkpoints, graph guards and fingerprints take their fields from StepState itself, so a field
added there is saved, guarded and fingerprinted without another list.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from halfstep.precision.loss_scale import ScaleState


@dataclass
class Cycle:
    """The open update cycle: the micro-batches since the last update.

    The names of the fields are keys of saved checkpoints.
    """

    micro: int = 0  # micro-batches so far
    grads: list[Tensor | None] = field(default_factory=list)  # G: sums, one for each parameter
    weight: Tensor | None = None  # N: sum of the micro-batches' weights
    nominal: Tensor | None = None  # number of terms that counts as weight 1
    loss: Tensor | None = None  # weighted sum of the losses
    buffers: list[Tensor] = field(default_factory=list)  # as they were when the cycle began

    def close(self) -> None:
        """No open cycle. The memory of `buffers` is used again by the next one."""
        self.micro = 0
        self.grads = []
        self.weight = None
        self.nominal = None
        self.loss = None


@dataclass
class StepState:
    """Counters, loss scale, averages and the open cycle.

    The network's and the optimizer's own state stand beside it. The names of the fields are keys of
    saved checkpoints.
    """

    steps: int  # batches
    updates: Tensor  # optimizer steps: the position in the learning-rate schedule
    skips: Tensor  # updates that were skipped for a non-finite gradient
    streak: Tensor  # skips in a row
    scale: Tensor  # the loss scale
    growth: Tensor  # finite updates in a row, since the scale last grew or a gradient overflowed
    halted: Tensor  # cycle at which nonfinite="raise" stopped everything; 0: none
    bad: Tensor  # for each parameter: was its gradient non-finite at the last skip?
    ema: list[Tensor]  # moving averages of the weights
    residue: list[Tensor]  # what Kahan rounding still owes the weights
    cycle: Cycle = field(default_factory=Cycle)

    @classmethod
    def start(cls, device: torch.device, scale: ScaleState, param_count: int) -> "StepState":
        """The state before the first step."""

        def counter() -> Tensor:
            return torch.zeros((), dtype=torch.int64, device=device)

        return cls(
            steps=0,
            updates=counter(),
            skips=counter(),
            streak=counter(),
            scale=scale.scale,
            growth=scale.growth,
            halted=counter(),
            bad=torch.zeros(param_count, dtype=torch.bool, device=device),
            ema=[],
            residue=[],
        )

    def tensors(self) -> list[Tensor]:
        """Every tensor outside the open cycle. A graph of a step is stale when one has moved."""
        tensors: list[Tensor] = []
        for state_field in fields(self):
            value = getattr(self, state_field.name)
            if isinstance(value, Tensor):
                tensors.append(value)
            elif isinstance(value, list):
                tensors.extend(value)
        return tensors


def state_to_dict(state: Any) -> Any:
    """Plain dicts, lists, numbers and cloned tensors, field by field."""
    if is_dataclass(state) and not isinstance(state, type):
        return {f.name: state_to_dict(getattr(state, f.name)) for f in fields(state)}
    if isinstance(state, Tensor):
        return state.detach().clone()
    if isinstance(state, list):
        return [state_to_dict(value) for value in state]
    return state


def load_state(state: Any, saved: dict[str, Any], device: torch.device) -> None:
    """Sets every field of `state` from `saved`, which check_saved_step has checked."""
    names = [f.name for f in fields(state)]
    assert sorted(names) == sorted(saved), "not the fields of this state"
    for name in names:
        present_value = getattr(state, name)
        if is_dataclass(present_value):
            load_state(present_value, saved[name], device)
        else:
            setattr(state, name, _copy_to(saved[name], device))


def _copy_to(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_copy_to(item, device) for item in value]
    return value


NOTHING: Mapping[str, Any] = MappingProxyType({})


class Record(NamedTuple):
    """What one step reports, as device tensors: reading one is up to the caller, and waits."""

    loss: Tensor  # of this batch
    cycle_loss: Tensor  # weighted mean of the open cycle; on a step that updates, the full batch's
    lr: Tensor  # one number, or one for each parameter group when there are several
    scale: Tensor  # the loss scale that this step used
    skipped: Tensor  # the update was dropped for a non-finite gradient
    grad_norm: Tensor  # after unscaling, before clipping; 0 on steps that do not end a cycle
    updated: Tensor  # the weights moved
    fingerprint: Tensor  # of the whole state; 0 unless this step recorded one

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """What the loss returned beside itself, by name: one number each."""
        parts: Mapping[str, Tensor] = getattr(self, "_parts", NOTHING)
        return parts

    @property
    def counts(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """Of each metric on training data what this batch adds to its total and its count."""
        counts: Mapping[str, tuple[Tensor, Tensor]] = getattr(self, "_counts", NOTHING)
        return counts

    def extra_numbers(self) -> list[Tensor]:
        """Parts and counts, in the order in which tables of records have them."""
        return [*self.parts.values(), *(n for pair in self.counts.values() for n in pair)]


class RecordWithExtras(Record):
    """A record with parts or counts. As a tuple it is a record like any other."""

    def _replace(self, **fields: Any) -> Record:  # type: ignore[override]
        return with_extras(Record(*self)._replace(**fields), self.parts, self.counts)


def with_extras(
    record: Record,
    parts: Mapping[str, Tensor],
    counts: Mapping[str, tuple[Tensor, Tensor]] = NOTHING,
) -> Record:
    """The record, with parts of the loss and counts of metrics where there are some."""
    if not parts and not counts:
        return record
    extended = RecordWithExtras(*record)
    extended._parts = parts  # type: ignore[attr-defined]
    extended._counts = counts  # type: ignore[attr-defined]
    return extended


# A record as one row of float64 numbers: these fields in this order, then the learning rates, one
# for each parameter group. The fingerprint, 64 bits of integer, does not fit and goes beside it.
# Whoever reads or writes a row takes its columns from here, by `row_columns`: engine/run.py, and
# the kernels, whose list of fields is RECORD_FIELDS in kernels/update_triton.py.
ROW_FIELDS = ("loss", "cycle_loss", "scale", "grad_norm", "skipped", "updated")


def row_columns(names: Sequence[str]) -> tuple[int, ...]:
    """The column of each of these fields in a row. All fields must be named: rows are whole."""
    assert sorted(names) == sorted(ROW_FIELDS), f"{names} are not the fields of a row"
    return tuple(ROW_FIELDS.index(name) for name in names)


class RecordTarget(Protocol):
    """A table of rows on the device, and the number of the next row, [1], on the device too."""

    @property
    def table(self) -> Tensor: ...

    @property
    def next_row(self) -> Tensor: ...


class UpdateResult(NamedTuple):
    """What became of an update: the cycle's loss, the values it used, and whether it happened.

    The order counts: fast/update_graph.py packs `tensors()` into bytes without gaps, so the wide
    dtypes stand first, and builds the result again by position.
    """

    lr: Tensor
    cycle_loss: Tensor
    grad_norm: Tensor
    scale: Tensor
    skipped: Tensor
    updated: Tensor
    record_written: bool = False  # the row is in the RecordTarget already

    def tensors(self) -> tuple[Tensor, ...]:
        return (self.lr, self.cycle_loss, self.grad_norm, self.scale, self.skipped, self.updated)


class HostReads:
    """The one way in which a step reads device values. Each read waits, and is counted."""

    def __init__(self) -> None:
        self.reads = 0

    def read(self, value: Tensor) -> float:
        """A device value as a number."""
        self.reads += 1
        return value.item()

    def read_all(self, values: Tensor) -> list[float]:
        """A small device vector as numbers: one wait."""
        self.reads += 1
        numbers: list[float] = values.tolist()
        return numbers
