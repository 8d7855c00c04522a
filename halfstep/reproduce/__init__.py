"""Looking back at runs: one step again, bit for bit, and where two runs part."""

from halfstep.experiment.builders__build import builder
from halfstep.reproduce.diff_runs import Difference, diff
from halfstep.reproduce.replay_step import Replayed, replay

__all__ = ["Difference", "Replayed", "builder", "diff", "replay"]
