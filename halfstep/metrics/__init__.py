"""What a model is measured by: counters on the device, torchmetrics, or any function."""

from halfstep.metrics.adapt import Metric, as_metric
from halfstep.metrics.counters import Accuracy, Average, Loss
from halfstep.metrics.metric_group import Metrics
from halfstep.metrics.regression import MeanAbsoluteError, R2Score

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
