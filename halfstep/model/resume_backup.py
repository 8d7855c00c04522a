"""What a resume changes, copied before it, so that a resume that is refused leaves no trace.

A checkpoint is checked before anything is loaded (resume_check.py). What can refuse it after that
is code that is not ours, and the `begin` of a callback, which sees the run as it goes on.
"""

import copy
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from halfstep.engine import Callback
from halfstep.model.custom_step import CustomStep
from halfstep.step import TrainStep
from halfstep.step.load_backup import ModuleBackup, OptimizerBackup, StepBackup
from halfstep.utils import rng


class ResumeBackup:
    """Everything that a resume may change, until training begins."""

    def __init__(self) -> None:
        self._undo_functions: list[Callable[[], object]] = []

    def add_model(self, model: Any) -> None:
        """The step, the network, the optimizer, the schedule and the random states."""
        random_states = rng.save()
        tables = model._schedule_tables
        table_attributes = dict(vars(tables))
        training_modes = [(module, module.training) for module in model.net.modules()]

        def put_back_rest() -> None:
            vars(tables).clear()
            vars(tables).update(table_attributes)
            for module, mode in training_modes:
                module.training = mode
            rng.load(random_states)

        # The last to be put back: what comes before may draw.
        self._undo_functions.append(put_back_rest)
        if isinstance(model.step, TrainStep):
            self._undo_functions.append(StepBackup(model.step).put_back)
            return
        self._undo_functions.append(ModuleBackup(model.net).put_back)
        if model.optimizer is not None:
            self._undo_functions.append(OptimizerBackup(model.optimizer).put_back)
        if isinstance(model.step, CustomStep) and model.step.saves:
            self._undo_functions.append(StateBackup(model.step.step).put_back)

    def add_callbacks(self, callbacks: Iterable[Callback]) -> None:
        """What the callbacks know."""
        for callback in callbacks:
            self._undo_functions.append(StateBackup(callback).put_back)

    def add(self, undo: Callable[[], object]) -> None:
        """Anything else, by the function that puts it back."""
        self._undo_functions.append(undo)

    def forget(self) -> None:
        """Training has begun: what was loaded stays, and the copies are freed."""
        self._undo_functions.clear()

    def put_back(self) -> None:
        """Everything as it was, the last that was added first; nothing after `forget`."""
        while self._undo_functions:
            self._undo_functions.pop()()


class StateBackup:
    """An object of the user's: its attributes, and what its state_dict says."""

    def __init__(self, owner: Any) -> None:
        self._owner = owner
        self._attributes = dict(vars(owner)) if hasattr(owner, "__dict__") else None
        self._state = copy.deepcopy(owner.state_dict())

    def put_back(self) -> None:
        """The attributes; where that is not enough, its own load_state_dict does the rest."""
        if self._attributes is not None:
            vars(self._owner).clear()
            vars(self._owner).update(self._attributes)
        # What refused the checkpoint may refuse this too.
        with suppress(Exception):
            if not _are_equal(self._owner.state_dict(), self._state):
                self._owner.load_state_dict(self._state)


def _are_equal(a: Any, b: Any) -> bool:
    """Whether two trees are the same, bit for bit."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_are_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    return bool(a == b)
