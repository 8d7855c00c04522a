"""What a load may change in a step, copied before it, so that a load that fails is taken back.

Loading is checked first (state_dict.py). What can still fail is code that is not ours: hooks of
modules and optimizers, optimizers of the user, and memory.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep.step.state import StepState


class TensorBackup:
    """Tensors, their memory, and a copy of their values, on the host."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        unique = {id(tensor): tensor for tensor in tensors}
        self._entries: list[tuple[Tensor, Tensor, Tensor]] = []
        for tensor in unique.values():
            if tensor.is_meta or tensor.layout != torch.strided:
                continue  # nothing writes into these
            memory = tensor.detach()
            self._entries.append((tensor, memory, memory.to("cpu", copy=True)))

    def put_back(self) -> None:
        """The same values in the same memory, also where a tensor was given other memory."""
        with torch.no_grad():
            for tensor, memory, values in self._entries:
                if not torch.equal(memory.cpu(), values):  # NaN counts as different
                    memory.copy_(values)
                moved = tensor.data_ptr() != memory.data_ptr() or tensor.dtype != memory.dtype
                if moved or tensor.stride() != memory.stride():
                    tensor.data = memory


class ModuleBackup:
    """The parameters and buffers of modules: which tensors they are, and their values."""

    def __init__(self, *roots: Any) -> None:
        modules = [m for root in roots if isinstance(root, nn.Module) for m in root.modules()]
        self._slots: list[tuple[dict[str, Any], dict[str, Any]]] = []
        tensors: list[Tensor] = []
        for module in modules:
            for slots in (module._parameters, module._buffers):
                self._slots.append((slots, dict(slots)))
                tensors += [tensor for tensor in slots.values() if tensor is not None]
        self._tensors = TensorBackup(tensors)
        self._extra_states = [
            (module, module.get_extra_state())
            for module in modules
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]

    def put_back(self) -> None:
        for slots, before in self._slots:
            # The same dict, so that whoever holds it sees what was put back.
            slots.clear()
            slots.update(before)
        self._tensors.put_back()
        for module, extra_state in self._extra_states:
            module.set_extra_state(extra_state)


class OptimizerBackup:
    """An optimizer's attributes, settings and state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._attributes = dict(vars(optimizer))
        self._groups = [
            (group, {**group, "params": list(group["params"])}) for group in optimizer.param_groups
        ]
        self._state = {
            key: dict(values) if isinstance(values, dict) else values
            for key, values in optimizer.state.items()
        }
        self._state_object = optimizer.state
        self._groups_object = optimizer.param_groups
        tensors = []
        for values in (*self._state.values(), *(before for _, before in self._groups)):
            if isinstance(values, dict):
                tensors += [value for value in values.values() if isinstance(value, Tensor)]
        self._tensors = TensorBackup(tensors)

    def put_back(self) -> None:
        attributes = vars(self._optimizer)
        attributes.clear()
        attributes.update(self._attributes)
        for group, before in self._groups:
            group.clear()
            group.update(before)
        self._groups_object[:] = [group for group, _ in self._groups]
        self._state_object.clear()
        self._state_object.update(
            {k: dict(v) if isinstance(v, dict) else v for k, v in self._state.items()}
        )
        self._tensors.put_back()


class StepBackup:
    """All that `load_step` may change in a TrainStep."""

    def __init__(self, step: Any) -> None:
        self._step = step
        self._attributes = dict(vars(step))
        self._params_with_state = set(step._params_with_state)
        self._compiled = dict(vars(step.compiled))
        self._state = _fields_of(step.state)
        self._cycle = _fields_of(step.state.cycle)
        self._modules = ModuleBackup(step.net, step.objective.loss)
        self._optimizer = OptimizerBackup(step.optimizer)
        self._tensors = TensorBackup(
            [*step.params, *step.state.tensors(), *_tensors_of(self._cycle)]
        )

    def put_back(self) -> None:
        """The step, the network, the loss and the optimizer as they were, bit for bit."""
        attributes = vars(self._step)
        attributes.clear()
        attributes.update(self._attributes)
        vars(self._step.compiled).clear()
        vars(self._step.compiled).update(self._compiled)
        state: StepState = self._step.state
        _set_fields(state, self._state)
        _set_fields(state.cycle, self._cycle)
        self._modules.put_back()
        self._optimizer.put_back()
        self._tensors.put_back()
        self._step._params_with_state.clear()
        self._step._params_with_state.update(self._params_with_state)


@contextmanager
def undone_on_error(*backups: Any) -> Iterator[None]:
    """Puts everything back, in the order of the backups, if the block raises."""
    try:
        yield
    except BaseException:
        for backup in backups:
            backup.put_back()
        raise


def _fields_of(state: Any) -> dict[str, Any]:
    """The fields of a state; its lists as copies."""
    return {
        name: list(value) if isinstance(value, list) else value
        for name, value in vars(state).items()
    }


def _set_fields(state: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(state, name, list(value) if isinstance(value, list) else value)


def _tensors_of(values: dict[str, Any]) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values.values():
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Tensor):
                tensors.append(item)
    return tensors
