"""halfstep trains PyTorch models in any numeric precision, and proves that nothing was lost on the way."""

from halfstep import amp, data, losses, metrics, nets, schedules
from halfstep.errors import NonFiniteError, Notice
from halfstep.grads import GradManager, GradOperation
from halfstep.precision import DynamicScale, FixedScale, NoScale, Precision
from halfstep.step import EvalStep, Record, TrainStep

__version__ = "0.1.0"
__all__ = [
    "DynamicScale", "EvalStep", "FixedScale", "GradManager", "GradOperation", "NoScale", "NonFiniteError", "Notice",
    "Precision", "Record", "TrainStep", "amp", "data", "losses", "metrics", "nets", "schedules",
]  # fmt: skip
