"""Deprecated: `kept()` and `look()` do nothing. They will be removed with the next version.

Version 0.1 raised the thresholds of glibc's malloc during a run. Measured again, it saved 1 to 3 %
of a step's CPU time (docs/guide/cpu.md), too little for what it touched.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

REASON = "halfstep no longer changes malloc's thresholds: it saved less than 5 % of a step"


@dataclass(frozen=True)
class Memory:
    """Whether freed memory is kept during a run, and why or why not, in words."""

    kept: bool
    reason: str


@contextmanager
def kept() -> Iterator[Memory]:
    """Does nothing, with a DeprecationWarning."""
    warnings.warn(f"halfstep.engine.memory.kept(): {REASON}", DeprecationWarning, stacklevel=3)
    yield Memory(kept=False, reason=REASON)


def look() -> Memory:
    """Says that kept() does nothing, with a DeprecationWarning."""
    warnings.warn(f"halfstep.engine.memory.look(): {REASON}", DeprecationWarning, stacklevel=2)
    return Memory(kept=False, reason=REASON)
