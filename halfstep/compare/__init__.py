"""Which precision should I use? One network trained in several, and a verdict that is proved."""

from halfstep.compare.comparison import compare
from halfstep.experiment.settings import Settings

__all__ = ["Settings", "compare"]
