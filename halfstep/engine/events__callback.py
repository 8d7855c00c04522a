"""Callbacks: six events, and what they may look at.

begin
  epoch_begin
    step  step  step …   every step's row, in order, at the host's visit
    visit                host and network stand at the same step: weights may be read, checkpoints saved
  epoch_end              before the epoch's last visit, after its evaluation
end                      always, also after an error or a stop
"""

from typing import Any

from halfstep.engine.run import Run
from halfstep.engine.run__rows import Row


class Callback:
    """Override what you need. `exact`: `step` reads weights, so every step is a visit unless sink= says otherwise."""

    exact = False
    last = False  # called after the others: it saves what they know
    writes = False  # leaves files or lines behind: left out when a run is repeated to look at it

    def begin(self, run: Run) -> None: ...

    def epoch_begin(self, run: Run) -> None: ...

    def step(self, run: Run, row: Row) -> None: ...

    def visit(self, run: Run) -> None: ...

    def epoch_end(self, run: Run) -> None: ...

    def end(self, run: Run) -> None: ...

    def next_stop(self, run: Run) -> int | None:
        """The next global step at which this callback needs a visit; None: wherever the host looks in."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What it must remember over a resume."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__}: expected no saved state, got {sorted(state)}")
