"""Which precision should I use? The same network, data, seeds and order in each, and a verdict that is proved."""

from halfstep.compare.comparison import compare
from halfstep.experiment.settings import Settings

__all__ = ["Settings", "compare"]
