"""halfstep trains PyTorch models in any numeric precision.

Start with `Model` (fit, evaluate, predict), or with `TrainStep` for a loop of your own.
"""

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
    from halfstep.preflight import find_lr, summary
    from halfstep.reproduce import diff, replay
    from halfstep.step import EvalStep, Record, TrainStep
    from halfstep.utils.rng import seed_everything

__version__ = "0.1.0"
__all__ = [
    "CSVLog",
    "Callback",
    "Checkpoint",
    "DynamicScale",
    "EarlyStopping",
    "EvalStep",
    "FixedScale",
    "GradManager",
    "GradOperation",
    "History",
    "JSONLLog",
    "LRMonitor",
    "Lambda",
    "LossMonitor",
    "Model",
    "NoScale",
    "NonFiniteError",
    "Notice",
    "Precision",
    "ProgressBar",
    "ProgressLines",
    "Record",
    "ReduceLROnPlateau",
    "Row",
    "Run",
    "StepTimer",
    "TensorBoard",
    "TimeMonitor",
    "TrainStep",
    "UncapturableError",
    "amp",
    "callbacks",
    "checkpoint",
    "data",
    "diff",
    "find_lr",
    "losses",
    "metrics",
    "nets",
    "replay",
    "schedules",
    "seed_everything",
    "sink",
    "summary",
]

# A name is imported when it is first used: the help of the command and the completion of a shell
# need no torch, which takes two seconds to import.
_SUBPACKAGES = (
    "amp",
    "callbacks",
    "checkpoint",
    "data",
    "losses",
    "metrics",
    "nets",
    "schedules",
)
_NAMES_BY_MODULE = {
    "engine": ("Callback", "Row", "Run", "sink"),
    "errors": ("NonFiniteError", "Notice", "UncapturableError"),
    "grads": ("GradManager", "GradOperation"),
    "model": ("Model",),
    "precision": ("DynamicScale", "FixedScale", "NoScale", "Precision"),
    "preflight": ("find_lr", "summary"),
    "reproduce": ("diff", "replay"),
    "step": ("EvalStep", "Record", "TrainStep"),
    "utils.rng": ("seed_everything",),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}


if not TYPE_CHECKING:  # type checkers read the imports above, and know every other name as wrong

    def __getattr__(name: str) -> Any:
        if name in _SUBPACKAGES:
            return importlib.import_module(f"halfstep.{name}")
        if name not in __all__:
            from halfstep.utils.foreign_names import missing_name_message

            raise AttributeError(missing_name_message(name, __all__))
        # What is not in the table above is a callback.
        module = importlib.import_module(f"halfstep.{_MODULE_OF_NAME.get(name, 'callbacks')}")
        value = getattr(module, name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
