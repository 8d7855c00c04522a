"""halfstep trains PyTorch models in any numeric precision, and proves that nothing was lost on the way."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from halfstep import amp, callbacks, checkpoint, data, losses, metrics, nets, schedules
    from halfstep.callbacks import (
        Checkpoint,
        CSVLog,
        EarlyStopping,
        History,
        JSONLLog,
        Lambda,
        LossMonitor,
        LRMonitor,
        ProgressBar,
        ProgressLines,
        ReduceLROnPlateau,
        StepTimer,
        TensorBoard,
        TimeMonitor,
    )
    from halfstep.engine import Callback, Row, Run, sink
    from halfstep.errors import NonFiniteError, Notice, UncapturableError
    from halfstep.grads import GradManager, GradOperation
    from halfstep.model import Model
    from halfstep.precision import DynamicScale, FixedScale, NoScale, Precision
    from halfstep.reproduce import diff, replay
    from halfstep.step import EvalStep, Record, TrainStep

__version__ = "0.1.0"
__all__ = [
    "CSVLog", "Callback", "Checkpoint", "DynamicScale", "EarlyStopping", "EvalStep", "FixedScale", "GradManager",
    "GradOperation", "History", "JSONLLog", "LRMonitor", "Lambda", "LossMonitor", "Model", "NoScale", "NonFiniteError",
    "Notice", "Precision", "ProgressBar", "ProgressLines", "Record", "ReduceLROnPlateau", "Row", "Run", "StepTimer",
    "TensorBoard", "TimeMonitor", "TrainStep", "UncapturableError", "amp", "callbacks", "checkpoint", "data", "diff",
    "losses", "metrics", "nets", "replay", "schedules", "sink",
]  # fmt: skip

# Loaded when first used: the command's help and a shell's completion need no torch, which takes two seconds to import.
_ROOMS = {"amp", "callbacks", "checkpoint", "data", "losses", "metrics", "nets", "schedules"}
_HOMES = {
    "Callback": "engine", "Row": "engine", "Run": "engine", "sink": "engine", "Model": "model", "diff": "reproduce",
    "replay": "reproduce", "NonFiniteError": "errors", "Notice": "errors", "UncapturableError": "errors",
    "GradManager": "grads", "GradOperation": "grads", "DynamicScale": "precision", "FixedScale": "precision",
    "NoScale": "precision", "Precision": "precision", "EvalStep": "step", "Record": "step", "TrainStep": "step",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"halfstep.{name}")
    if name not in __all__:
        raise AttributeError(f"module 'halfstep' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"halfstep.{_HOMES.get(name, 'callbacks')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
