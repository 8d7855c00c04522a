"""Speed for a step: optional, and apart from the transaction.

Each file says what it buys and how to switch it off. Without this folder a TrainStep takes the
plain forms in step/plain_paths.py and computes the same. Only step/train_step.py imports it, and
step/compiled.py, which re-exports two functions for users.
"""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep.kernels.foreach import fused_step_in_pieces
from halfstep.precision import Precision
from halfstep.step.fast.channels_last import ChannelsLast
from halfstep.step.fast.compiled_forward import CompiledForward
from halfstep.step.fast.fused_update import FusedUpdate
from halfstep.step.fast.update_graph import UpdateGraph
from halfstep.step.objective import Objective
from halfstep.step.options import AutoFlag
from halfstep.step.plain_paths import DeviceUpdate, ForwardPath, MemoryFormatPath
from halfstep.step.update import Update


class FastPaths:
    """Builds the fast form of each path of a step."""

    def forward_path(
        self,
        objective: Objective,
        requested: AutoFlag,
        device: torch.device,
        *,
        deterministic: bool,
    ) -> ForwardPath:
        return CompiledForward(objective, requested, device, deterministic=deterministic)

    def memory_format(
        self,
        net: nn.Module,
        optimizer: Optimizer,
        requested: AutoFlag,
        precision: Precision,
        device: torch.device,
    ) -> MemoryFormatPath:
        return ChannelsLast(net, optimizer, requested, precision, device)

    def device_update(self, update: Any) -> DeviceUpdate:
        """Update.on_device as a CUDA graph where one fits; and its fused kernels, for captures."""
        assert isinstance(update, Update)
        update.fused_update = FusedUpdate(update)
        update.commit.fused_step_in_pieces = fused_step_in_pieces
        return UpdateGraph(update)
