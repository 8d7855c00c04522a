"""Looking back at runs: one step again, bit for bit, and where two runs part."""

from halfstep.again.build import builder
from halfstep.again.compare import Difference, diff
from halfstep.again.rerun import Replayed, replay

__all__ = ["Difference", "Replayed", "builder", "diff", "replay"]
