"""Before training: a learning rate to begin with, and what a network is made of."""

from halfstep.preflight.lr_range_test import find_lr
from halfstep.preflight.net_summary import summary

__all__ = ["find_lr", "summary"]
