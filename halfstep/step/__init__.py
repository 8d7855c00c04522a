"""The step: one batch as one transaction over network, optimizer, loss scale and schedule."""

from halfstep.step.evaluate import EvalRecord, EvalStep
from halfstep.step.record import Record
from halfstep.step.train import TrainStep

__all__ = ["EvalRecord", "EvalStep", "Record", "TrainStep"]
