"""Learning rates by update number, as a table; without one the optimizer's own rates are left alone."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep.kernels.launch import is_capturing
from halfstep.step.state__host import HostReads


class LearningRates:
    """The rates of each parameter group at each update. The position is the number of real updates.

    `tensors`: rates go to the optimizer as device tensors, so that the host need not know the position.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        table: Any,
        device: torch.device,
        host: HostReads,
        *,
        tensors: bool,
    ) -> None:
        self.optimizer, self.device, self.host = optimizer, device, host
        self.table = None if table is None else _table(table, len(self.groups), device)
        self.tensors = tensors
        self._shown: tuple[list[Any], Tensor] = ([], torch.zeros(()))
        self._baked: list[Tensor] = []

    @property
    def groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups  # load_state_dict replaces them

    def set(self, update: Tensor) -> None:
        """The rates of the coming update, into the optimizer's groups. Past the table's end its last column holds."""
        if self.table is None:
            return
        column = self.table.index_select(
            1, update.clamp(max=self.table.shape[1] - 1).view(1)
        ).squeeze(1)
        numbers = [] if self.tensors else self.host.read_all(column)
        for i, group in enumerate(self.groups):
            if not self.tensors:
                group["lr"] = numbers[i]
            elif isinstance(group["lr"], Tensor) and _alike(group["lr"], column):
                group["lr"].copy_(column[i])
            else:
                group["lr"] = column[i].clone()

    def current(self) -> Tensor:
        """The rates in force, for the record: one number, or one per group; made anew only when one changed."""
        now = [g["lr"] for g in self.groups]
        if any(isinstance(v, Tensor) for v in now):
            rates = torch.stack([self._tensor(v) for v in now])
            return rates if len(now) > 1 else rates[0]
        if now == self._shown[0]:
            if is_capturing():
                self._baked.append(self._shown[1])  # a graph reads it for as long as there is one
            return self._shown[1]
        each = [self._tensor(v) for v in now]
        rates = torch.stack(each) if len(each) > 1 else each[0]
        if not is_capturing():  # what a capture allocates is its graph's
            self._shown = (now, rates)
        return rates

    def _tensor(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self.device, torch.float64).reshape(())
        return torch.full(
            (), value, dtype=torch.float64, device=self.device
        )  # a fill, not a copy from the host


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether a loaded rate lives where this step's rates do, in their dtype."""
    return a.device == b.device and a.dtype == b.dtype


def _table(table: Any, groups: int, device: torch.device) -> Tensor:
    try:
        rows = torch.as_tensor(table, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"lr: expected a table of rates, received {type(table).__name__}; of a schedule, a function or a scheduler "
            "hs.schedules.tables(hs.schedules.resolve(it, optimizer, updates=n), n) makes one, and Model(schedule=…) "
            "takes them as they are"
        ) from error
    rows = rows.expand(groups, -1) if rows.dim() == 1 else rows
    if rows.dim() != 2 or rows.shape[0] != groups or rows.shape[1] == 0:
        expected = f"one row of rates, or {groups} rows (one per parameter group)"
        number = "; a rate that stays is the optimizer's own" if rows.dim() == 0 else ""
        raise ValueError(
            f"lr: expected {expected}, received shape {tuple(torch.as_tensor(table).shape)}{number}"
        )
    if not bool(torch.isfinite(rows).all()) or bool((rows < 0).any()):
        bad = rows[~torch.isfinite(rows) | (rows < 0)][0].item()
        raise ValueError(f"lr: expected finite rates of 0 or more, received {bad}")
    return rows.to(device, torch.float64 if device.type == "cpu" else torch.float32)
