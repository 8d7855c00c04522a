"""What a model is measured by: counters on the device, torchmetrics, or any function."""

from typing import TYPE_CHECKING

from halfstep.metrics.adapt import Metric, as_metric
from halfstep.metrics.counters import Accuracy, Average, Loss
from halfstep.metrics.metric_group import Metrics
from halfstep.metrics.regression import MeanAbsoluteError, R2Score
from halfstep.utils.foreign_names import missing_names

__all__ = [
    "Accuracy",
    "Average",
    "Loss",
    "MeanAbsoluteError",
    "Metric",
    "Metrics",
    "R2Score",
    "as_metric",
]

if not TYPE_CHECKING:  # type checkers know every other name as wrong
    __getattr__ = missing_names(__name__, __all__)
