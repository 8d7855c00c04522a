"""Precisions: what one word means for every dtype, and how it is applied to a network."""

from halfstep.precision.apply import Applied
from halfstep.precision.loss_scale import DynamicScale, FixedScale, NoScale
from halfstep.precision.policy import TABLE, Precision, PrecisionName

__all__ = [
    "TABLE",
    "Applied",
    "DynamicScale",
    "FixedScale",
    "NoScale",
    "Precision",
    "PrecisionName",
]
