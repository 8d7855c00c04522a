"""Both parts of a run's data, with what was chosen for the user while they were read."""

from dataclasses import dataclass, field
from typing import Any

from halfstep.data import Dataset, TableEncoding


@dataclass(frozen=True)
class DataParts:
    """Unbatched samples as they were read.

    `chosen`: settings that were chosen by the data. `facts`: what is noted with the run, as plain
    values, so that it can be recognised and used again. `encoding`: of a table.
    """

    train: Dataset
    test: Dataset
    chosen: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    encoding: TableEncoding | None = None
