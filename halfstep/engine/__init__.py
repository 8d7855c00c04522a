"""The loop around a step: feeds, visits, rows, events; and the same loop from CUDA graphs."""

from typing import TYPE_CHECKING, Any

from halfstep.engine.events import Callback
from halfstep.engine.feed import Feed
from halfstep.engine.loop import Loop
from halfstep.engine.run import Row, Run, Timing

if TYPE_CHECKING:
    from halfstep.engine.captured.sink import sink

__all__ = ["Callback", "Feed", "Loop", "Row", "Run", "Timing", "sink"]


def __getattr__(name: str) -> Any:
    """`sink` is imported when it is first used: without engine/captured the rest still works."""
    if name != "sink":
        raise AttributeError(f"module 'halfstep.engine' has no attribute {name!r}")
    from halfstep.engine.captured.sink import sink

    globals()["sink"] = sink
    return sink
