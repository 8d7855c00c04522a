"""A TrainStep over tensors that stay where they are, so that a graph of it can be replayed."""

from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.cuda_graphs.capture import rng_generation
from halfstep.cuda_graphs.guards import addresses, module_guards, optimizer_guards
from halfstep.precision.backend_flags import set_backend_flags
from halfstep.step.accumulate import Accumulate
from halfstep.step.optimizer import capturable_optimizer
from halfstep.step.rollback import foreach_copy
from halfstep.step.state import Cycle, Record, RecordTarget
from halfstep.step.train_step import TrainStep

# The sums of an open cycle that are one number each: fields of Cycle.
CYCLE_SUMS = ("weight", "nominal", "loss")


class MissingOptimizerState(Exception):
    """A parameter has a gradient, but no optimizer state yet: the host decides its first update."""


class CyclePosition(NamedTuple):
    """Where a batch stands in its update cycle."""

    first: bool
    last: bool


class StaticStep:
    """The device's half of a TrainStep, and the host's half of it, apart.

    A captured graph holds `run_on_device`. Its replay runs no Python, so the host's counters are
    moved by `count_replay`.

    The sums of an open cycle have tensors of their own here, which graphs read and write. The
    cycle moves in by `take_over_cycle` and back into the step's state by `give_back_cycle`, so that
    a checkpoint, a fingerprint or an eager step finds the state that eager steps would have left.
    """

    def __init__(self, step: TrainStep) -> None:
        self.step = step
        self.accumulates = step.options.accumulate > 1
        # The cycle of a step whose batches are divided stays with it: it always runs eagerly.
        self.keeps_cycle = step.lanes is not None
        self.micro = step.state.cycle.micro  # batches in the open cycle
        self.grad_indices: frozenset[int] = frozenset()  # parameters with a gradient in the cycle
        self._grad_sums: list[Tensor] = []  # one for each parameter
        self._cycle_sums: dict[str, Tensor] = {}  # by CYCLE_SUMS

    @property
    def position(self) -> CyclePosition:
        """That of the next batch."""
        return CyclePosition(
            first=self.micro == 0, last=self.micro + 1 == self.step.options.accumulate
        )

    def run_on_device(
        self,
        batch: tuple[Any, ...] | None,
        position: CyclePosition,
        record_target: RecordTarget | None = None,
    ) -> tuple[Record, bool]:
        """The step without any decision or counter of the host. Without a batch: the flush.

        Returns the record, and whether a kernel has written it into `record_target` already.
        """
        step = self.step
        cycle = step.state.cycle
        may_capture = capturable_optimizer(step.optimizer, step.optimizer_kind)

        # In a capture nothing is computed: the cycle must be afterwards what it was before.
        names = [field.name for field in fields(Cycle) if field.name != "buffers"]
        cycle_before = {name: getattr(cycle, name) for name in names}
        try:
            with step_backend_flags(step), may_capture:
                if position.first:
                    cycle.close()
                else:
                    self._fill_cycle()

                micro_batch = step.accumulator.no_batch
                if batch is not None:
                    batch = step.channels_last.convert_batch(batch)
                    micro_batch = step.accumulator(step.state, batch)
                if not position.last:
                    record = step.record_open_cycle(micro_batch)
                    self._store_cycle()
                    return record, False

                grad_indices = [i for i, grad in enumerate(cycle.grads) if grad is not None]
                self._check_gradients(grad_indices)
                result = step.update.on_device(step.state, grad_indices, record_target)
                return step.record_update(micro_batch, result), result.record_written
        finally:
            for name, value in cycle_before.items():
                setattr(cycle, name, value)

    def count_replay(self, *, last: bool, batches: int = 1) -> None:
        """Counts what a replay has done; `last`: it has ended the cycle. A flush has no batch."""
        self.step.state.steps += batches
        self.micro += batches
        if last:
            self.step.count_cycle()
            self.micro = 0

    def take_over_cycle(self) -> None:
        """After eager steps: moves an open cycle into the static tensors."""
        self.micro = self.step.state.cycle.micro
        if self.accumulates and self.micro > 0 and not self.keeps_cycle:
            self._store_cycle()
            self._fill_cycle()

    def give_back_cycle(self) -> None:
        """After replays: makes the step's own cycle the one that they have left."""
        if self.keeps_cycle:
            return
        if self.accumulates and self.micro > 0:
            self._fill_cycle()
        else:
            self.step.state.cycle.close()

    def allocate(self) -> None:
        """Allocates the static tensors, before a capture: its own memory belongs to its graph."""
        if self._cycle_sums or not self.accumulates:
            return
        accumulator = self.step.accumulator
        assert isinstance(accumulator, Accumulate), "batches in lanes are not captured"
        for p, dtype in zip(accumulator.params, accumulator.sum_dtypes, strict=True):
            self._grad_sums.append(torch.zeros_like(p, dtype=dtype, requires_grad=False))
        for name in CYCLE_SUMS:
            zero = torch.zeros_like(accumulator.zero_loss, dtype=torch.float64)
            self._cycle_sums[name] = zero

    def _fill_cycle(self) -> None:
        """Makes the static tensors those of the step's cycle."""
        cycle = self.step.state.cycle
        # In a graph of many steps the host has not counted the ones before: at least one has run.
        cycle.micro = max(self.micro, 1)
        cycle.grads = [
            grad if i in self.grad_indices else None for i, grad in enumerate(self._grad_sums)
        ]
        for name, tensor in self._cycle_sums.items():
            setattr(cycle, name, tensor)

    def _store_cycle(self) -> None:
        """Copies the tensors of the step's cycle into the static ones, where they are others."""
        self.allocate()
        cycle = self.step.state.cycle
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for i, grad in enumerate(cycle.grads):
            if grad is None:
                continue
            grad_sum = self._grad_sums[i]
            if grad.is_sparse or grad_sum.is_sparse:
                # A sparse tensor has no memory to copy into. It is never part of a graph.
                self._grad_sums[i] = grad
            elif grad_sum is not grad:
                targets.append(grad_sum)
                sources.append(grad)
        self.grad_indices = frozenset(i for i, grad in enumerate(cycle.grads) if grad is not None)

        for name, cycle_sum in self._cycle_sums.items():
            tensor = getattr(cycle, name)
            if tensor is not cycle_sum:
                targets.append(cycle_sum)
                sources.append(tensor)
        foreach_copy(targets, sources)

    def _check_gradients(self, grad_indices: list[int]) -> None:
        """Raises where a graph cannot hold this update."""
        grads = self.step.state.cycle.grads
        for i in grad_indices:
            grad = grads[i]
            if grad is not None and grad.is_sparse:
                name = self.step.names[i]
                raise RuntimeError(f"sparse gradient of {name}: a graph holds dense ones only")
        if not self.step.has_optimizer_state(grads, grad_indices):
            raise MissingOptimizerState


def step_backend_flags(step: TrainStep) -> AbstractContextManager[None]:
    """Inside, torch chooses kernels as the step's precision and options ask for."""
    return set_backend_flags(step.precision, step.device, **step.options.backend_flags)


def step_guards(step: TrainStep) -> tuple[Any, ...]:
    """Everything that a graph of this step has read in Python: addresses, settings, objects.

    A graph is stale when these differ from what they were at its capture.
    """
    return (
        step.applied,
        step.update,
        step.compiled.on,
        step.objective.observer,
        getattr(step.objective.observer, "labels", None),
        rng_generation(step.device),
        *addresses([*step.state.tensors(), *step.params]),
        *module_guards(step.net, step.objective.loss),
        *optimizer_guards(step.optimizer),
    )
