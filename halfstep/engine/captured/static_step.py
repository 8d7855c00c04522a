"""A step over storage that stays where it is, so that a graph of it can be replayed."""

from contextlib import AbstractContextManager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from halfstep.cuda_graphs.capture import rng_generation
from halfstep.cuda_graphs.guards import addresses, module_guards, optimizer_guards
from halfstep.precision.backend_flags import set_backend_flags
from halfstep.step.optimizer import capturable_optimizer
from halfstep.step.rollback import foreach_copy
from halfstep.step.state import Cycle, Record, RecordTarget
from halfstep.step.train_step import TrainStep


class MissingOptimizerState(Exception):
    """A parameter has a gradient and no optimizer state yet: its first update is decided by the host."""


class StaticStep:
    """The device half of a TrainStep, and the host's bookkeeping of it, apart: a replay runs only the first.

    A cycle of several batches lives in tensors of its own here. `adopt` takes in what eager steps left open, `settle`
    gives it back, so that a checkpoint, a fingerprint or an eager step finds the state as it would be without graphs.
    """

    def __init__(self, step: TrainStep) -> None:
        self.step, self.micro = step, step.state.cycle.micro
        self.many = step.options.accumulate > 1
        self._grads: list[Tensor | None] = []
        self._sums: dict[str, Tensor] = {}  # weight, nominal, loss
        self.live: frozenset[int] = frozenset()  # gradients that the open cycle has

    @property
    def position(self) -> tuple[bool, bool]:
        """Whether the next batch opens its cycle, and whether it closes it."""
        return self.micro == 0, self.micro + 1 == self.step.options.accumulate

    def body(
        self,
        batch: tuple[Any, ...] | None,
        *,
        first: bool,
        last: bool,
        record_target: RecordTarget | None = None,
    ) -> tuple[Record, bool]:
        """The step as the device sees it: no host decision, no counter of the host's.

        Without a batch: the flush. Returns the record, and whether a kernel has written it into
        `record_target` already.
        """
        step, cycle = self.step, self.step.state.cycle
        before = {f.name: getattr(cycle, f.name) for f in fields(Cycle) if f.name != "buffers"}
        allow = capturable_optimizer(step.optimizer, step.optimizer_kind)
        try:
            with backend_of(step), allow:
                self._enter(first)
                loss = step.accumulator.zero_loss
                if batch is not None:
                    loss = step.accumulator(step.state, step.channels_last.convert_batch(batch))
                if not last:
                    record = step.record_open_cycle(loss)
                    self._keep()
                    return record, False
                live = [i for i, g in enumerate(cycle.grads) if g is not None]
                self._check(live)
                result = step.update.on_device(step.state, live, record_target)
                return step.record_update(loss, result), result.record_written
        finally:
            for name, value in before.items():
                setattr(cycle, name, value)

    def count_replay(self, *, last: bool, steps: int = 1) -> None:
        """The host's side of a replay."""
        self.step.state.steps += steps
        self.micro += steps
        if last:
            self.step.count_cycle()
            self.micro = 0

    def take_over_cycle(self) -> None:
        """After eager steps: an open cycle moves into this storage."""
        cycle = self.step.state.cycle
        self.micro = cycle.micro
        if self.many and cycle.micro:
            self._keep()
            self._fill()

    def give_back_cycle(self) -> None:
        """Before anybody looks at the state: the cycle as the replays left it."""
        if self.micro and self.many:
            self._fill()
        else:
            self.step.state.cycle.close()

    def _check(self, live: list[int]) -> None:
        grads, names = self.step.state.cycle.grads, self.step.names
        sparse = [names[i] for i in live if (g := grads[i]) is not None and g.is_sparse]
        if sparse:
            raise RuntimeError(f"sparse gradient of {sparse[0]}: a graph holds dense ones only")
        if not self.step.has_optimizer_state(grads, live):
            raise MissingOptimizerState

    def _enter(self, first: bool) -> None:
        if first:
            self.step.state.cycle.close()
        else:
            self._fill()

    def _fill(self) -> None:
        cycle = self.step.state.cycle
        cycle.micro = max(self.micro, 1)
        cycle.grads = [g if i in self.live else None for i, g in enumerate(self._grads)]
        for name, tensor in self._sums.items():
            setattr(cycle, name, tensor)

    def _keep(self) -> None:
        """The cycle's tensors into this storage, where they are not it already."""
        cycle = self.step.state.cycle
        self.prepare()
        for i, (mine, g) in enumerate(zip(self._grads, cycle.grads, strict=True)):
            if g is not None and (g.is_sparse or (mine is not None and mine.is_sparse)):
                self._grads[i] = (
                    g  # as it is: a sparse one has no memory of its own to be copied into
                )
        pairs = [
            (i, mine, g)
            for i, (mine, g) in enumerate(zip(self._grads, cycle.grads, strict=True))
            if g is not None
        ]
        self.live = frozenset(i for i, _, _ in pairs)
        moved = [(mine, g) for _, mine, g in pairs if mine is not None and mine is not g]
        moved += [
            (mine, now)
            for name, mine in self._sums.items()
            if (now := getattr(cycle, name)) is not mine
        ]
        foreach_copy([mine for mine, _ in moved], [g for _, g in moved])

    def prepare(self) -> None:
        """The storage, before a capture: what is allocated inside one belongs to its graph."""
        if self._sums or not self.many:
            return
        acc = self.step.accumulator
        wide = zip(acc.params, acc.sum_dtypes, strict=True)
        self._grads = [torch.zeros_like(p, dtype=d, requires_grad=False) for p, d in wide]
        sums = ("weight", "nominal", "loss")
        self._sums = {name: torch.zeros_like(acc.zero_loss, dtype=torch.float64) for name in sums}


def backend_of(step: TrainStep) -> AbstractContextManager[None]:
    """The kernels that a step asks for: its precision's, and deterministic ones where it is."""
    return set_backend_flags(step.precision, step.device, **step.options.backend_flags)


def step_guards(step: TrainStep) -> tuple[Any, ...]:
    """Everything a graph of this step holds fast; when it differs, the graph is another step's."""
    roots = (step.net, step.objective.loss)
    held = (*step.state.tensors(), *step.params)
    objects = (step.applied, step.update, step.compiled.on, rng_generation(step.device))
    return (*objects, *addresses(held), *module_guards(*roots), *optimizer_guards(step.optimizer))
