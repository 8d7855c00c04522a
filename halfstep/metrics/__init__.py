"""What a model is measured by: device counters of our own, torchmetrics, or any function."""

from halfstep.metrics.adapt import Metric, as_metric
from halfstep.metrics.adapt__group import Metrics
from halfstep.metrics.counters import Accuracy, Average, Loss

__all__ = ["Accuracy", "Average", "Loss", "Metric", "Metrics", "as_metric"]
