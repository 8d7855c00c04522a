"""Finished runs again: one step bit for bit, and the first step in which two runs differ."""

from halfstep.experiment.builders import import_function as builder
from halfstep.reproduce.diff_runs import Difference, diff
from halfstep.reproduce.replay_step import Replayed, replay

__all__ = ["Difference", "Replayed", "builder", "diff", "replay"]
