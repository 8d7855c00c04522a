"""Where speed is plugged into a step, and the plain form that is there without it.

`step/fast/` holds a faster form of each: forward and loss compiled, convolutions channels-last, the
update in few kernels or as one CUDA graph. That folder can be deleted: a TrainStep then takes the
plain forms of this file, and computes the same.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.precision import Applied, Precision
from halfstep.step.objective import Batch, BatchLoss, Objective
from halfstep.step.state import Cycle, RecordTarget, StepState, UpdateResult

NOT_THERE = "the folder halfstep/step/fast is not there"


class ForwardPath(Protocol):
    """A batch → its loss and count. `on`: compiled, for the reason given."""

    on: bool
    reason: str
    inside_whole_step: bool  # forward and loss are part of a compiled program of the whole step

    @property
    def forward_and_loss(self) -> Callable[..., BatchLoss]: ...

    def __call__(self, on: bool, why: str = "asked for") -> bool: ...
    def compiled_shapes(self) -> dict[str, bool]: ...
    def load_compiled_shapes(self, shapes: dict[str, bool]) -> None: ...


class MemoryFormatPath(Protocol):
    """The order in which images and the weights of convolutions lie in memory."""

    on: bool
    reason: str

    def convert_batch(self, batch: Batch) -> Batch: ...
    def match_optimizer_state(self, optimizer: Optimizer) -> None: ...
    def match_step_state(
        self, state: StepState, optimizer: Optimizer, params: list[Tensor]
    ) -> None: ...


class FusedPath(Protocol):
    """Update.on_device in few kernels, for the updates that fit."""

    def remember(self, cycle: Cycle, grad_indices: list[int]) -> None: ...
    def prepare_remembered(self) -> None: ...
    def fits(self, state: StepState, grad_indices: list[int]) -> bool: ...
    def __call__(
        self, state: StepState, grad_indices: list[int], record_target: RecordTarget | None
    ) -> UpdateResult: ...


DeviceUpdate = Callable[[StepState, list[int]], UpdateResult]


class Paths(Protocol):
    """Builds the paths of one step. FastPaths and PlainPaths have the same methods."""

    def forward_path(
        self,
        objective: Objective,
        requested: Any,
        device: torch.device,
        *,
        deterministic: bool,
    ) -> ForwardPath: ...

    def memory_format(
        self,
        net: nn.Module,
        optimizer: Optimizer,
        requested: Any,
        precision: Precision,
        device: torch.device,
    ) -> MemoryFormatPath: ...

    def device_update(self, update: Any) -> DeviceUpdate: ...


class PlainForward:
    """Forward and loss as they are."""

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.on = False
        self.reason = NOT_THERE
        self.inside_whole_step = False

    def forward_and_loss(self, applied: Applied, batch: Batch, *, weighted: bool) -> BatchLoss:
        return self.objective(applied, batch, weighted=weighted)

    def __call__(self, on: bool, why: str = "asked for") -> bool:
        """Stays uncompiled, whatever is asked for."""
        return False

    def compiled_shapes(self) -> dict[str, bool]:
        """None: nothing is compiled."""
        return {}

    def load_compiled_shapes(self, shapes: dict[str, bool]) -> None:
        """Compiles nothing, as before."""


class PlainMemoryFormat:
    """Tensors as they come."""

    on = False
    reason = NOT_THERE

    def convert_batch(self, batch: Batch) -> Batch:
        return batch

    def match_optimizer_state(self, optimizer: Optimizer) -> None:
        """Nothing was converted, so nothing has to match."""

    def match_step_state(
        self, state: StepState, optimizer: Optimizer, params: list[Tensor]
    ) -> None:
        """Nothing was converted, so nothing has to match."""


class PlainPaths:
    """The plain form of every path. An explicit request for a fast one is refused."""

    def forward_path(
        self,
        objective: Objective,
        requested: Any,
        device: torch.device,
        *,
        deterministic: bool,
    ) -> ForwardPath:
        if requested is True:
            raise RuntimeError(f"compile=True: {NOT_THERE}; use compile=False")
        return PlainForward(objective)

    def memory_format(
        self,
        net: nn.Module,
        optimizer: Optimizer,
        requested: Any,
        precision: Precision,
        device: torch.device,
    ) -> MemoryFormatPath:
        if requested is True:
            raise RuntimeError(f"channels_last=True: {NOT_THERE}; use channels_last=False")
        return PlainMemoryFormat()

    def device_update(self, update: Any) -> DeviceUpdate:
        on_device: DeviceUpdate = update.on_device
        return on_device
