"""Callbacks: what watches a run, saves it and ends it."""

from typing import TYPE_CHECKING

from halfstep.callbacks.checkpoint import Checkpoint
from halfstep.callbacks.history import History, Lambda
from halfstep.callbacks.logs import CSVLog, JSONLLog
from halfstep.callbacks.monitors import (
    LossMonitor,
    LRMonitor,
    ProgressLines,
    StepTimer,
    StepTimes,
    TimeMonitor,
)
from halfstep.callbacks.plateau import EarlyStopping, ReduceLROnPlateau
from halfstep.callbacks.progress_bar import ProgressBar
from halfstep.callbacks.tensorboard import TensorBoard
from halfstep.utils.foreign_names import missing_names

__all__ = [
    "CSVLog",
    "Checkpoint",
    "EarlyStopping",
    "History",
    "JSONLLog",
    "LRMonitor",
    "Lambda",
    "LossMonitor",
    "ProgressBar",
    "ProgressLines",
    "ReduceLROnPlateau",
    "StepTimer",
    "StepTimes",
    "TensorBoard",
    "TimeMonitor",
]

if not TYPE_CHECKING:  # type checkers know every other name as wrong
    __getattr__ = missing_names(__name__, __all__)
