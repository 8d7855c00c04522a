"""A training step of the user's own as the step of a Model."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.step import Record
from halfstep.step.optimizer_schema import check_optimizer_state
from halfstep.utils.saved_state import SavedValue, same_kind


class CustomStep:
    """Calls `step(*batch)`, which returns a Record or its loss.

    What it does not report is 0 in the record. Records are copies: a step that replays a CUDA graph
    writes every loss into the same memory. `state_dict` and `load_state_dict` are the step's own;
    without them it trains, and a checkpoint is refused.
    """

    def __init__(self, step: Any) -> None:
        if not callable(step):
            raise TypeError(
                f"step: expected a function of a batch that trains on it, got {type(step).__name__}"
            )
        self.step = step
        self.saves = hasattr(step, "state_dict") and hasattr(step, "load_state_dict")

    def __call__(self, *batch: Any) -> Record:
        result = self.step(*batch)
        if isinstance(result, Record):
            return _copy_record(result)
        loss = result[0] if isinstance(result, tuple) and result else result
        if not isinstance(loss, Tensor):
            raise TypeError(
                "step: expected the step to return its loss, a tuple that starts with it, "
                f"or a Record; got {type(result).__name__}"
            )
        loss = loss.detach().sum() if loss.dim() else loss.detach().clone()
        zero = torch.zeros_like(loss)
        false = torch.zeros_like(loss, dtype=torch.bool)
        return Record(
            loss=loss,
            cycle_loss=loss,
            lr=zero,
            scale=torch.ones_like(loss),
            skipped=false,
            grad_norm=zero,
            updated=~false,
            fingerprint=torch.zeros_like(loss, dtype=torch.int64),
        )

    def flush(self) -> Record | None:
        """The tail of a pass, where the step has a notion of it."""
        flush = getattr(self.step, "flush", None)
        result = flush() if flush else None
        return _copy_record(result) if isinstance(result, Record) else None

    def state_dict(self) -> dict[str, Any]:
        """The step's own state; a TypeError where it has none to save."""
        if not self.saves:
            raise TypeError(
                f"checkpoint: {type(self.step).__name__} has no state_dict and load_state_dict, "
                "so a run with it cannot go on where it stopped. "
                "Give the step both, or leave the Checkpoint out."
            )
        return {"own": self.step.state_dict()}

    def check_state(self, saved: SavedValue) -> None:
        """Refuses values of another kind than the step would save now. Changes nothing.

        torch loads whatever an optimizer is given, so an optimizer's state is checked for it.
        """
        own = saved.field("own")
        own_state = self.state_dict()["own"]
        same_kind(own, own_state)
        for name, value in own_state.items() if isinstance(own_state, dict) else ():
            optimizer = self._optimizer_of(value)
            if optimizer is not None and own.optional_field(name) is not None:
                check_optimizer_state(own.field(name), optimizer, state_dtypes={}, exact=False)

    def _optimizer_of(self, state: Any) -> Optimizer | None:
        """The optimizer among the step's attributes that has this state; None if none has."""
        if not isinstance(state, dict) or not {"state", "param_groups"} <= state.keys():
            return None
        attributes = list(getattr(self.step, "__dict__", {}).values())
        optimizers = [value for value in attributes if isinstance(value, Optimizer)]
        fitting = [o for o in optimizers if o.state_dict()["param_groups"] == state["param_groups"]]
        return fitting[0] if len(fitting) == 1 else None

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        name = type(self.step).__name__
        try:
            self.step.load_state_dict(saved["own"])
        except (OSError, Warning):
            raise
        except Exception as error:
            raise ValueError(
                f"resume: step.own: {name}.load_state_dict failed: "
                f"{type(error).__name__}: {error}. The resume is taken back"
            ) from error


def _copy_record(record: Record) -> Record:
    return Record(*[field.detach().clone() for field in record])
