"""The step: one batch as one transaction over network, optimizer, loss scale and schedule."""

from halfstep.step.eval_step import EvalRecord, EvalStep
from halfstep.step.state import Record
from halfstep.step.train_step import TrainStep

__all__ = ["EvalRecord", "EvalStep", "Record", "TrainStep"]
