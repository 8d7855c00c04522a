"""Learning rates by update number: formulas, tables, functions and torch's own schedulers."""

from typing import TYPE_CHECKING

from halfstep.schedules.formulas import (
    constant,
    cosine,
    function,
    linear,
    one_cycle,
    per_epoch,
    poly,
    sequence,
    steps,
    warmup_cosine,
)
from halfstep.schedules.group_schedules import resolve
from halfstep.schedules.schedule import Schedule, tables
from halfstep.schedules.torch_schedulers import from_torch
from halfstep.utils.foreign_names import missing_names

__all__ = [
    "Schedule",
    "constant",
    "cosine",
    "from_torch",
    "function",
    "linear",
    "one_cycle",
    "per_epoch",
    "poly",
    "resolve",
    "sequence",
    "steps",
    "tables",
    "warmup_cosine",
]

if not TYPE_CHECKING:  # type checkers know every other name as wrong
    __getattr__ = missing_names(__name__, __all__)
