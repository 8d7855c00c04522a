"""The loop around a step: feeds, visits, rows, events."""

from halfstep.engine.captured.sink import sink
from halfstep.engine.events__callback import Callback
from halfstep.engine.feed import Feed
from halfstep.engine.loop import Loop
from halfstep.engine.run import Run
from halfstep.engine.run__rows import Row
from halfstep.engine.run__timing import Timing

__all__ = ["Callback", "Feed", "Loop", "Row", "Run", "Timing", "sink"]
