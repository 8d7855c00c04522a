"""When things happen in a run."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """When things happen. `valid_epochs` says whether an epoch ends with an evaluation; steps 0: never by steps."""

    epochs: int
    epoch_steps: int | None
    sink: int | None
    valid_epochs: Callable[[int], bool]
    valid_steps: int = 0
