"""One training step as a value: forward, backward, unscale, check, clip, update — or, on overflow, no step at all."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep.precision import Applied, NoScale, Precision
from halfstep.precision.backend_flags import backend, check_deterministic
from halfstep.precision.low_params import Widened
from halfstep.step import (
    commit__ema as ema,
)
from halfstep.step import (
    optimizer as optim,
)
from halfstep.step import (
    options__checks as checks,
)
from halfstep.step import (
    overflow as trouble,
)
from halfstep.step import (
    state_dict as inspect,
)
from halfstep.step.accumulate import Accumulate
from halfstep.step.commit import Commit
from halfstep.step.commit__select import Buffers
from halfstep.step.eval_step import EvalStep
from halfstep.step.fast import channels_last as layout
from halfstep.step.fast import compiled_forward as compiled
from halfstep.step.fast.update_graph import UpdateGraph
from halfstep.step.fingerprint import combine
from halfstep.step.objective import Objective, to_device
from halfstep.step.optimizer__rates import LearningRates
from halfstep.step.options import StepOptions
from halfstep.step.state import StepState
from halfstep.step.state__host import HostReads
from halfstep.step.state__record import Record, UpdateResult
from halfstep.step.update import Update
from halfstep.utils.device_values import AsyncHostRead


class TrainStep:
    """`record = step(*batch)`: one batch of one update cycle, as one transaction over network and optimizer.

    The loss is `loss(net(*inputs), target)`, the network's own when `loss` is None, or whatever `forward=` says.
    Options are those of StepOptions.
    """

    def __init__(
        self,
        net: nn.Module,
        loss: Any,
        optimizer: torch.optim.Optimizer,
        *,
        precision: str | Precision = "fp32",
        **options: Any,
    ) -> None:
        self.options = StepOptions.parse(options)
        optim.check_optimizer(optimizer)
        self.net, self.optimizer = net, optimizer
        self.names, self.params = checks.find_parameters(net, loss, optimizer)
        self.device = checks.find_device(net, self.params)
        if self.options.deterministic:
            check_deterministic(self.device)
        self.objective = Objective(net, loss, self.options.forward, self.options.count)
        self.notices = checks.check_cycle(self.objective, net, self.options.accumulate)
        self.host_reads, self.device_watch, self.buffers = (
            HostReads(),
            AsyncHostRead(every_calls=16),
            Buffers(net, loss),
        )
        self.optimizer_kind = optim.classify_optimizer(
            optimizer, tensor_lr=self.options.lr is not None
        )
        self._decides_on_device = (
            checks.where_to_decide(self.options.decide, self.optimizer_kind, self.device)
            == "device"
        )
        self.learning_rates = LearningRates(
            optimizer,
            self.options.lr,
            self.device,
            self.host_reads,
            tensors=self.optimizer_kind != "host",
        )
        self._params_with_state: set[int] = (
            set()
        )  # parameters that a committed update has moved, so that their state exists
        self._optimizer_guard = optim.OptimizerGuard(optimizer)
        self._requested_nonfinite, self._holds_averages, self._ema_buffers = (
            self.options.nonfinite,
            False,
            list[Tensor](),
        )
        trouble.check_fallback(Precision.parse(precision))
        wish, kept = self.options.compile, self.options.deterministic
        self.compiled = compiled.CompiledForward(
            self.objective, wish, self.device, deterministic=kept
        )
        self.channels_last = layout.ChannelsLast(
            net, optimizer, self.options.channels_last, Precision.parse(precision), self.device
        )
        self._set_precision(Precision.parse(precision))
        self.state = StepState.start(
            self.device, self.precision.loss_scale.start(self.device), len(self.params)
        )
        self.state.ema = ema.start(self.params) if self.options.ema is not None else []
        self.state.residue = self._fp32_update.residue() if self._fp32_update is not None else []
        self._zero = torch.zeros((), device=self.device)
        self._no, self._no_print = self._zero.bool(), self._zero.long()

    def __call__(self, *batch: Any) -> Record:
        """Runs one batch; every `accumulate` batches the gradients become one update. Nothing waits for the device."""
        self._check_weights()
        with backend(self.precision, self.device, **self.options.backend_flags):
            loss = self.accumulator(
                self.state, self.channels_last.convert_batch(to_device(batch, self.device))
            )
            self.state.steps += 1
            open_still = self.state.cycle.micro < self.options.accumulate
            return self._with_fingerprint(
                self.record_open_cycle(loss) if open_still else self._end_cycle(loss)
            )

    def flush(self) -> Record | None:
        """Ends the open cycle: a tail shorter than `accumulate` is an update of its own, weighted by what it holds."""
        self._check_weights()
        if self.state.cycle.micro == 0:
            return None
        with backend(self.precision, self.device, **self.options.backend_flags):
            return self._with_fingerprint(self._end_cycle(self.accumulator.zero_loss))

    def check(self) -> None:
        """Waits for the device and raises what it has run into: for decide="device", where steps do not wait."""
        trouble.raise_or_fall_back(
            self,
            int(self.host_reads.read(self.state.halted)),
            int(self.host_reads.read(self.state.streak)),
        )

    def evaluator(self) -> EvalStep:
        """The evaluation counterpart, sharing this step's precision and low copies."""
        return EvalStep(
            self.net, self.objective.loss, precision=self.precision, forward=self.options.forward,
            count=self.options.count, _applied=lambda: self.applied, _benchmark=self.options.measures_algorithms,
        )  # fmt: skip

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the network holds the moving average of its weights, to evaluate; afterwards its weights again."""
        self._check_weights()
        if not self.state.ema:
            raise ValueError("averaged: this step keeps no moving average; build it with ema=0.999")
        self._holds_averages = True
        try:
            with ema.averages_as_weights(self.params, self.state.ema, self._ema_buffers):
                yield
        finally:
            self._holds_averages = False

    def switch(self, precision: str | Precision) -> None:
        """Goes on in another precision: same weights, same optimizer state, a fresh loss scale."""
        self._check_weights()
        new = Precision.parse(precision)
        checks.check_switch(self.precision, new, self.state.cycle.micro)
        self._set_precision(new)
        self.state.scale, self.state.growth = new.loss_scale.start(self.device)

    def set_learning_rates(self, table: Tensor) -> None:
        """Another table of learning rates, where the step was built with one or with none; positions stay."""
        self.optimizer_kind = optim.classify_optimizer(self.optimizer, tensor_lr=True)
        self._decides_on_device = (
            checks.where_to_decide(self.options.decide, self.optimizer_kind, self.device)
            == "device"
        )
        self.options = replace(self.options, lr=table)
        self.learning_rates = LearningRates(
            self.optimizer,
            table,
            self.device,
            self.host_reads,
            tensors=self.optimizer_kind != "host",
        )
        self._set_precision(self.precision)

    def report(self) -> inspect.Report:
        """The dtypes really used, module by module, and every choice made for the user; print it."""
        return inspect.report(self)

    def fingerprints(self) -> dict[str, Tensor]:
        """A 64-bit fingerprint of each tensor that decides the next step, by name."""
        return inspect.fingerprints(self)

    def state_dict(self) -> dict[str, Any]:
        """What decides the next step, as plain dicts, numbers and tensors; torch's random state is the caller's."""
        self._check_weights()
        return inspect.step_to_dict(self)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continues exactly where `saved` was taken, inside a cycle too; restore torch's random state beside it."""
        self._check_weights()
        inspect.load_step(self, saved)

    def load_optimizer_state(self, saved: dict[str, Any]) -> None:
        """The optimizer's state, unrounded: torch would cast it to its parameter's dtype."""
        with self._fp32_update.as_wide() if self._fp32_update is not None else nullcontext():
            self.optimizer.load_state_dict(saved)
        self.channels_last.match_optimizer_state(self.optimizer)

    def _set_precision(self, precision: Precision) -> None:
        """Puts the network under a precision and builds the two halves of the step for it."""
        scaled = not isinstance(precision.loss_scale, NoScale)
        self.precision = precision
        self.options = replace(
            self.options, nonfinite=self._requested_nonfinite or ("skip" if scaled else "raise")
        )
        checks.check_optimizer_precision(self.optimizer, precision, self.device)
        self.applied = Applied(self.net, precision, self.device)
        self._fp32_update = (
            Widened(self.params, precision.rounding) if precision.rounding != "nearest" else None
        )
        if self.optimizer.state and (self.applied.converted or self._fp32_update is not None):
            self.load_optimizer_state(
                self.optimizer.state_dict()
            )  # torch casts state to its parameter's dtype
        commit = Commit(
            self.optimizer,
            self.optimizer_kind,
            self.params,
            self.buffers,
            self.learning_rates,
            self.options.ema,
            self._fp32_update,
        )
        self.accumulator = Accumulate(
            self.objective, self.applied, self.params, self.options, self.buffers
        )
        objective = self.objective
        self.update = Update(
            self.params,
            precision,
            self.options,
            commit,
            self.host_reads,
            is_sum=objective.is_sum,
            ignores_targets=objective.ignores_targets,
        )
        self._update_graph = UpdateGraph(self.update)
        self.cycles_ended = 0
        self.last_steps: dict[
            int, int
        ] = {}  # cycle → its last step, of late: the device tells where it stopped

    def record_open_cycle(self, loss: Tensor) -> Record:
        """The record of a batch that does not end its cycle."""
        cycle = self.state.cycle
        assert cycle.loss is not None
        assert cycle.weight is not None
        mean = (cycle.loss / torch.where(cycle.weight > 0, cycle.weight, 1)).to(
            self.precision.output
        )
        scale = self.state.scale.clone()
        return Record(
            loss,
            mean,
            self.learning_rates.current(),
            scale,
            self._no,
            self._zero,
            self._no,
            self._no_print,
        )

    def record_update(self, loss: Tensor, outcome: UpdateResult) -> Record:
        """The record of a batch that ends its cycle, by what became of the update."""
        own = loss if self.options.accumulate > 1 else outcome.loss
        rest = (
            outcome.loss,
            outcome.lr,
            outcome.scale,
            outcome.skipped,
            outcome.norm,
            outcome.updated,
        )
        return Record(own, *rest, self._no_print)

    def _end_cycle(self, loss: Tensor) -> Record:
        """The update that ends a cycle, by the device where it can, and its record."""
        cycle, state = self.state.cycle, self.state
        live = [i for i, g in enumerate(cycle.grads) if g is not None]
        if self.decides_on_device and self.has_optimizer_state(cycle.grads, live):
            outcome = self._update_graph(state, live)
        else:
            outcome = self.update.on_host(state, live)
            if outcome.updated is self.update.true:
                self._params_with_state.update(live)
        self.count_cycle()
        cycle.close()
        trouble.check_after_update(self, outcome)
        return self.record_update(loss, outcome)

    def count_cycle(self) -> None:
        """One more cycle is over: the device tells by this number where it stopped."""
        self.cycles_ended += 1
        self.last_steps[self.cycles_ended] = self.state.steps
        self.last_steps.pop(self.cycles_ended - (1 << 14), None)

    def after_load(self) -> None:
        """After a load: what was known of the state before it no longer holds."""
        self._params_with_state.clear()
        self.channels_last.match_step_state(self)
        self.device_watch = AsyncHostRead(every_calls=16)

    def _check_weights(self) -> None:
        if self._holds_averages:
            raise ValueError(
                "step: inside averaged() the network holds averages, to evaluate; leave the block first"
            )
        self._optimizer_guard.check()

    @property
    def decides_on_device(self) -> bool:
        """Whether the device decides updates: by code that can be replayed, or that is part of a program."""
        return self._decides_on_device or self.compiled.inside_whole_step

    @property
    def ready_for_capture(self) -> bool:
        """Whether it may by now: an update has gone through, so that optimizer state exists."""
        return self.decides_on_device and bool(self._params_with_state)

    def has_optimizer_state(self, grads: list[Tensor | None], live: list[int]) -> bool:
        """Whether the device may decide: every parameter has moved before, and no gradient is sparse."""
        if self._optimizer_guard.settings_switched():
            self._params_with_state.clear()
        dense = not any(g is not None and g.is_sparse for g in grads)
        return bool(live) and dense and self._params_with_state.issuperset(live)

    def _with_fingerprint(self, record: Record) -> Record:
        every = self.options.fingerprint_every
        return (
            record._replace(fingerprint=self.state_fingerprint())
            if every and self.state.steps % every == 0
            else record
        )

    def state_fingerprint(self) -> Tensor:
        """One fingerprint of the whole state."""
        return combine(self.fingerprints().values())
