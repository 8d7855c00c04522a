"""Looking back at runs: one step again, bit for bit, and where two runs part."""

from halfstep.replay.again import Replayed, replay
from halfstep.replay.build import builder
from halfstep.replay.diff import Difference, diff

__all__ = ["Difference", "Replayed", "builder", "diff", "replay"]
