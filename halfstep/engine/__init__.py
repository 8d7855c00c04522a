"""The loop around a step: feeds, visits, rows, events."""

from halfstep.engine.callback import Callback
from halfstep.engine.feed import Feed
from halfstep.engine.loop import Loop
from halfstep.engine.rows import Row
from halfstep.engine.run import Run
from halfstep.engine.sunk.sink import sink
from halfstep.engine.timing import Timing

__all__ = ["Callback", "Feed", "Loop", "Row", "Run", "Timing", "sink"]
