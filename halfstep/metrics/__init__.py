"""What a model is measured by: counters on the device, torchmetrics, or any function."""

from halfstep.metrics.adapt import Metric, as_metric
from halfstep.metrics.counters import Accuracy, Average, Loss
from halfstep.metrics.metric_group import Metrics

__all__ = ["Accuracy", "Average", "Loss", "Metric", "Metrics", "as_metric"]
