"""Precisions: what one word means for every dtype, and how it is put on a network."""

from halfstep.precision.applied import Applied
from halfstep.precision.policy import TABLE, Precision
from halfstep.precision.scale import DynamicScale, FixedScale, NoScale

__all__ = ["TABLE", "Applied", "DynamicScale", "FixedScale", "NoScale", "Precision"]
