"""TrainStep: one training step as a value.

Forward, backward, unscale, check, clip, update; or, on overflow, no step at all. The two halves
stand in files of their own and read like the formula: accumulate.py (one micro-batch) and update.py
(the end of a cycle). This file wires them together.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from halfstep.distributed import Ranks, find_ranks
from halfstep.errors import NonFiniteError, Notice
from halfstep.precision import Applied, Precision, PrecisionName
from halfstep.precision.backend_flags import check_deterministic, set_backend_flags
from halfstep.precision.low_params import Fp32Update
from halfstep.step import overflow
from halfstep.step.accumulate import Accumulate, MicroBatch
from halfstep.step.commit import Commit, averages_as_weights, start_averages
from halfstep.step.eval_step import EvalStep
from halfstep.step.fingerprint import combine, fingerprints
from halfstep.step.lane_accumulate import LaneAccumulate
from halfstep.step.lanes import new_seed, plan_lanes, use_one_thread
from halfstep.step.network_guard import NetworkGuard
from halfstep.step.objective import Objective, to_device
from halfstep.step.optimizer import (
    LearningRates,
    OptimizerGuard,
    check_optimizer,
    classify_optimizer,
)
from halfstep.step.options import (
    FOREIGN_OPTIONS,
    AutoFlag,
    CountFunction,
    Decider,
    Exactness,
    LearningRateTable,
    NonFinite,
    StepOptions,
    Strategy,
    check_cycle,
    check_optimizer_precision,
    check_switch,
    find_device,
    find_parameters,
    unreached_message,
    where_to_decide,
)
from halfstep.step.plain_paths import Paths, PlainPaths
from halfstep.step.rank_startup import (
    check_equal_states,
    refuse_wrapped,
    start_alike,
)
from halfstep.step.rollback import Buffers
from halfstep.step.state import HostReads, Record, StepState, UpdateResult, with_extras
from halfstep.step.state_dict import find_extra_tensors, load_step, step_to_dict
from halfstep.step.step_copy import deep_copy_step, refuse_copy
from halfstep.step.step_report import Report, report_step
from halfstep.step.update import Update
from halfstep.utils.device_values import AsyncHostRead
from halfstep.utils.keywords import suggest_keywords, user_stacklevel
from halfstep.utils.optional_folders import is_left_out

MAX_REMEMBERED_CYCLES = 1 << 14  # how far back a device that stopped can say at which step it was


def choose_paths() -> Paths:
    """The fast form of each path, or the plain one where the folders of speed are left out."""
    try:
        from halfstep.step.fast import FastPaths
    except ModuleNotFoundError as error:
        # Any other error inside these folders is a fault, and not hidden behind slower steps.
        if not is_left_out(error):
            raise
        return PlainPaths()
    return FastPaths()


class TrainStep:
    """`record = step(*batch)`: one batch of one update cycle, as one transaction.

    The loss is `loss(net(*inputs), target)`, the network's own when `loss` is None, or whatever
    `forward=` says. StepOptions, in step/options.py, says what each option is.
    """

    @suggest_keywords("TrainStep", names={**FOREIGN_OPTIONS, "schedule": "lr"})
    def __init__(
        self,
        net: nn.Module,
        loss: Any,
        optimizer: torch.optim.Optimizer,
        *,
        precision: PrecisionName | Precision = "fp32",
        accumulate: int = 1,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        lr: LearningRateTable | None = None,
        ema: float | None = None,
        count: CountFunction | None = None,
        forward: Callable[..., Any] | None = None,
        sens: float | Tensor = 1.0,
        nonfinite: NonFinite | None = None,
        deterministic: bool = False,
        fingerprint_every: int = 0,
        decide: Decider = "auto",
        compile: AutoFlag = "auto",
        channels_last: AutoFlag = "auto",
        polish: AutoFlag = "auto",
        cudnn_benchmark: AutoFlag = "auto",
        strategy: Strategy = "auto",
        exact: Exactness | None = None,
        logical: int = 12,
    ) -> None:
        # Check everything that can be refused.
        self.options = StepOptions.from_arguments(locals())
        check_optimizer(optimizer)
        self.net = net
        self.optimizer = optimizer
        self.names, self.params = find_parameters(net, loss, optimizer)
        self.device = find_device(net, self.params)
        self.options = self.options.settled_for(self.device)
        if self.options.deterministic:
            check_deterministic(self.device)
        self.objective = Objective(net, loss, self.options.forward, self.options.count)

        # The processes that train together, and the slices of a batch that each computes.
        self.ranks: Ranks | None = None
        if self.options.strategy != "none":
            self.ranks = find_ranks(self.device)
        if self.ranks is not None:
            refuse_wrapped(net)
        is_exact = self.options.exact == "bits"
        self.lanes = plan_lanes(self.ranks, exact=is_exact, logical=self.options.logical)
        if is_exact and self.device.type == "cpu":
            use_one_thread()
        self.lane_seed = new_seed(self.ranks) if self.lanes is not None else 0
        self.notices = check_cycle(
            self.objective,
            net,
            self.options.accumulate,
            lane_count=1 if self.lanes is None else self.lanes.count,
        )

        # Host reads, buffers to roll back, learning rates.
        self.host_reads = HostReads()
        self.device_watch = AsyncHostRead(every_calls=overflow.POLL_EVERY_UPDATES)
        self.skips_at_visit = 0  # in a row, when the host last looked in
        self.postponed_streak: overflow.SkipStreak | None = None
        self.buffers = Buffers(net, loss)
        self._classify_optimizer(lr_table=self.options.lr)
        self._params_with_state: set[int] = set()  # moved by a committed update
        self._optimizer_guard = OptimizerGuard(optimizer)
        self.requested_nonfinite = self.options.nonfinite
        self._holds_averages = False
        self._unreached_is_known = False  # a loss that reached no parameter was announced
        self._ema_buffers: list[Tensor] = []

        # Paths: compiled or not, channels-last or not.
        precision = Precision.parse(precision)
        overflow.check_fallback(precision)
        self._paths = choose_paths()
        self.compiled = self._paths.forward_path(
            self.objective,
            self.options.compile,
            self.device,
            deterministic=self.options.deterministic,
        )
        self.channels_last = self._paths.memory_format(
            net, optimizer, self.options.channels_last, precision, self.device
        )

        # Precision and state.
        self._set_precision(precision)
        self._network_guard = NetworkGuard(net, loss, self.params)
        self._network_guard.passed(self.applied)
        scale_state = self.precision.loss_scale.start(self.device)
        self.state = StepState.start(self.device, scale_state, len(self.params))
        if self.options.ema is not None:
            self.state.ema = start_averages(self.params)
        if self._fp32_update is not None:
            self.state.residue = self._fp32_update.new_residues()

        # Constants on the device, so that no step has to copy them there.
        self._zero = torch.zeros((), device=self.device)
        self._false = self._zero.bool()
        self._no_fingerprint = self._zero.long()

        if self.ranks is not None:
            start_alike(self, self.ranks)

    def __call__(self, *batch: Any) -> Record:
        """Runs one batch; every `accumulate` batches become one update.

        It waits for the device only where the host decides about updates.
        """
        self._check_usable()
        with set_backend_flags(self.precision, self.device, **self._backend_flags):
            batch = self.channels_last.convert_batch(to_device(batch, self.device))
            try:
                micro_batch = self.accumulator(self.state, batch)
            except Exception as error:
                self._explain_new_layers(error)
                raise
            self._check_after_forward()
            self.state.steps += 1
            if self.state.cycle.micro < self.options.accumulate:
                record = self.record_open_cycle(micro_batch)
            else:
                record = self._end_cycle(micro_batch)
            return self._with_fingerprint(record)

    def flush(self) -> Record | None:
        """Ends the open cycle: a short tail is an update of its own, weighted by what it holds."""
        self._check_usable()
        if isinstance(self.accumulator, LaneAccumulate):
            self.accumulator.drop_torn_cycle(self.state)
        if self.state.cycle.micro == 0:
            return None
        with set_backend_flags(self.precision, self.device, **self._backend_flags):
            record = self._end_cycle(self.accumulator.no_batch)
            return self._with_fingerprint(record)

    def check(self) -> None:
        """Waits for the device and raises what it has run into.

        For decide="device", where steps do not wait.
        """
        counters = (self.state.halted, self.state.streak, self.update.cycles_ended)
        halted_cycle, skips_in_a_row, cycles_ended = (
            int(self.host_reads.read(counter)) for counter in counters
        )
        overflow.raise_for_counters(self, halted_cycle, skips_in_a_row, cycles_ended)

    def evaluator(self) -> EvalStep:
        """The evaluation counterpart, sharing this step's precision and low copies."""
        return EvalStep(
            self.net,
            self.objective.loss,
            precision=self.precision,
            forward=self.options.forward,
            count=self.options.count,
            _applied=self.follow_network,
            _benchmark=self.options.measures_algorithms,
        )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, the network holds the moving average of its weights, to evaluate."""
        self._check_usable()
        if not self.state.ema:
            raise ValueError("averaged: this step keeps no moving average; build it with ema=0.999")
        self._holds_averages = True
        try:
            with averages_as_weights(self.params, self.state.ema, self._ema_buffers):
                yield
        finally:
            self._holds_averages = False

    @contextmanager
    def evaluation_buffers(self) -> Iterator[None]:
        """Inside, the buffers are those to evaluate with, the same on all ranks.

        In the middle of a cycle each lane has its own: then they are those of before the cycle.
        """
        if self.lanes is None or self.state.cycle.micro == 0 or not self.buffers:
            yield
            return
        own = [buffer.detach().clone() for buffer in self.buffers.tensors()]
        self.buffers.restore(self.state.cycle.buffers)
        try:
            yield
        finally:
            self.buffers.restore(own)

    @property
    def can_be_saved(self) -> bool:
        """Whether this process holds the whole state: an open cycle in lanes is spread over all."""
        return self.lanes is None or self.state.cycle.micro == 0

    def drop_cycle(self) -> None:
        """Forgets the batches of the open update cycle."""
        if self.lanes is not None and self.state.cycle.micro and self.buffers:
            self.buffers.restore(self.state.cycle.buffers)  # each lane has its own
        self.state.cycle.close()

    def switch(self, precision: PrecisionName | Precision) -> None:
        """Continues in another precision: same weights and optimizer state, a fresh loss scale."""
        self._check_usable()
        precision = Precision.parse(precision)
        check_switch(self.precision, precision, self.state.cycle.micro)
        self._set_precision(precision)
        scale_state = precision.loss_scale.start(self.device)
        self.state.scale = scale_state.scale
        self.state.growth = scale_state.growth

    def set_learning_rates(self, table: Tensor) -> None:
        """Replaces the table of learning rates, or gives one; the position in it stays."""
        self._classify_optimizer(lr_table=table)
        self.options = replace(self.options, lr=table)
        self._set_precision(self.precision)

    def report(self) -> Report:
        """The dtypes really used, module by module, and every choice made for the user."""
        return report_step(self)

    def fingerprints(self) -> dict[str, Tensor]:
        """A 64-bit fingerprint of each tensor that decides the next step, by name."""
        with self.evaluation_buffers():  # the same on all ranks, in the middle of a cycle too
            return fingerprints(self)

    def state_dict(self) -> dict[str, Any]:
        """What decides the next step, as plain dicts, numbers and tensors.

        torch's random state is the caller's to save.
        """
        self._check_usable()
        if not self.can_be_saved:
            raise ValueError(
                "state_dict: the update cycle is open, and its sums are spread over lanes and "
                "ranks; save after a step that updates, or call flush() first"
            )
        return step_to_dict(self)

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Continues exactly where `saved` was taken, inside a cycle too.

        torch's random state is the caller's to restore.
        """
        self._check_usable()
        load_step(self, saved)
        if self.ranks is not None:
            check_equal_states(self, self.ranks)

    def __deepcopy__(self, memo: dict[int, Any]) -> "TrainStep":
        """A step over copies of network, loss and optimizer, which trains on by itself."""
        self._check_usable()
        return deep_copy_step(self, memo)

    def __copy__(self) -> NoReturn:
        """Two steps over one network and one optimizer would undo each other's work."""
        refuse_copy("a TrainStep", "copied without its network", "copy.deepcopy(step) copies both")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """A step holds functions and entries of its network, which no pickle holds."""
        refuse_copy(
            "a TrainStep",
            "pickled",
            "save step.state_dict(), build the step anew and load that with load_state_dict",
        )

    # What a new precision, table of rates or saved state changes in the parts of the step.

    def _classify_optimizer(self, *, lr_table: Any) -> None:
        """Decides how this optimizer can skip, where that is decided, and its learning rates."""
        has_table = lr_table is not None
        self.optimizer_kind = classify_optimizer(self.optimizer, tensor_lr=has_table)
        decider = where_to_decide(self.options.decide, self.optimizer_kind, self.device)
        self._decides_on_device = decider == "device"
        self.learning_rates = LearningRates(
            self.optimizer,
            lr_table,
            self.device,
            self.host_reads,
            as_tensors=self.optimizer_kind != "host",
        )

    def _set_precision(self, precision: Precision) -> None:
        """Puts the network under a precision and builds the two halves of the step for it."""
        self.precision = precision
        default_nonfinite: NonFinite = "skip" if precision.loss_scale.is_active else "raise"
        self.options = replace(
            self.options, nonfinite=self.requested_nonfinite or default_nonfinite
        )
        self._backend_flags = self.options.backend_flags
        check_optimizer_precision(self.optimizer, precision, self.device)
        self.applied = Applied(self.net, precision, self.device)
        self._fp32_update: Fp32Update | None = None
        if precision.rounding != "nearest":
            self._fp32_update = Fp32Update(self.params, precision.rounding)

        # torch casts optimizer state to its parameter's dtype when it loads it.
        params_changed = self.applied.converted_names or self._fp32_update is not None
        if self.optimizer.state and params_changed:
            self.load_optimizer_state(self.optimizer.state_dict())

        self._forward_was_checked = False
        accumulator = Accumulate(
            objective=self.objective,
            forward_path=self.compiled,
            applied=self.applied,
            params=self.params,
            options=self.options,
            buffers=self.buffers,
            in_lanes=self.lanes is not None,
        )
        before = getattr(self, "accumulator", None)
        self.accumulator: Accumulate | LaneAccumulate = accumulator
        if self.lanes is not None:
            self.accumulator = LaneAccumulate(
                accumulator,
                self.lanes,
                self.ranks or Ranks(),
                self.buffers,
                self.lane_seed,
                cycle_length=self.options.accumulate,
            )
            if isinstance(before, LaneAccumulate):
                self.accumulator.take_over(before)
        commit = Commit(
            optimizer=self.optimizer,
            optimizer_kind=self.optimizer_kind,
            params=self.params,
            buffers=self.buffers,
            learning_rates=self.learning_rates,
            ema_decay=self.options.ema,
            fp32_update=self._fp32_update,
        )
        self.update = Update(
            self.params,
            precision,
            self.options,
            commit,
            self.host_reads,
            is_sum=self.objective.is_sum,
            ignores_targets=self.objective.ignores_targets,
            in_lanes=self.lanes is not None,
        )
        self._update_on_device = self._paths.device_update(self.update)

        # Cycles are counted by the Update that ran them: a device that stopped says at which one.
        self.cycles_ended = 0
        self.last_steps: dict[int, int] = {}  # cycle → its last step

    def set_lane_seed(self, seed: int) -> None:
        """The random numbers of the lanes go on as those of the step that this seed is from."""
        self.lane_seed = seed
        if isinstance(self.accumulator, LaneAccumulate):
            self.accumulator.seed = seed

    def load_optimizer_state(self, saved: dict[str, Any]) -> None:
        """Loads the optimizer's state unrounded: torch would cast it to its parameter's dtype."""
        unrounded: AbstractContextManager[None] = nullcontext()
        if self._fp32_update is not None:
            unrounded = self._fp32_update.fp32_params_for_loading()
        with unrounded:
            self.optimizer.load_state_dict(saved)
        self.channels_last.match_optimizer_state(self.optimizer)

    @property
    def updated_as_fp32(self) -> set[int]:
        """The ids of the low parameters that are updated as float32 copies, with such state."""
        if self._fp32_update is None:
            return set()
        return {id(p) for p in self._fp32_update.params}

    def after_load(self) -> None:
        """Forgets what was known of the state before a load."""
        self._params_with_state.clear()
        self.channels_last.match_step_state(self.state, self.optimizer, self.params)
        self.device_watch = AsyncHostRead(every_calls=overflow.POLL_EVERY_UPDATES)
        self.skips_at_visit = int(self.state.streak.item())
        self.postponed_streak = None

    # Changes of the network between two steps, and inside a forward.

    def check_network(self, *, for_replays: bool = False) -> None:
        """Follows a change of the network, or refuses it where the optimizer cannot follow.

        Graphs and programs run no Python: for them each forward must be the one that they know.
        """
        self._optimizer_guard.check()
        guard = self._network_guard
        every_forward = for_replays or self.compiled.on
        if guard.is_current(self.applied, every_forward=every_forward):
            return
        guard.check()
        self.names = guard.current_names(self.names)
        guard.passed(self.follow_network(every_forward=every_forward))

    def follow_network(self, *, every_forward: bool = False) -> Applied:
        """The network under the precision, planned anew if the network is not what it was."""
        if not self.applied.is_current(every_forward=every_forward):
            self.buffers.collect_again()
            self._set_precision(self.precision)
        return self.applied

    def _check_after_forward(self) -> None:
        """Refuses layers that forward has made: after the first one, and when some were added."""
        if self._forward_was_checked and not self.applied.layout.has_new_children():
            return
        self._network_guard.check(after_forward=True)
        self._forward_was_checked = True

    def _explain_new_layers(self, error: Exception) -> None:
        """A layer that is new inside forward has no casts: says so, and not which dtypes met."""
        if self.applied.is_current():
            return
        try:
            self._network_guard.check(after_forward=True)
        except ValueError as refusal:
            raise refusal from error

    # The end of a batch and of a cycle. Captured steps use these too.

    def record_open_cycle(self, micro_batch: MicroBatch) -> Record:
        """The record of a batch that does not end its cycle."""
        cycle = self.state.cycle
        assert cycle.loss is not None
        assert cycle.weight is not None
        mean_loss = cycle.loss / torch.where(cycle.weight > 0, cycle.weight, 1)
        record = Record(
            loss=micro_batch.loss,
            cycle_loss=mean_loss.to(self.precision.output),
            lr=self.learning_rates.current(),
            scale=self.state.scale.clone(),
            skipped=self._false,
            grad_norm=self._zero,
            updated=self._false,
            fingerprint=self._no_fingerprint,
        )
        return with_extras(record, micro_batch.parts, micro_batch.counts)

    def record_update(self, micro_batch: MicroBatch, result: UpdateResult) -> Record:
        """The record of a batch that ends its cycle, by what became of the update."""
        batch_loss = result.cycle_loss
        if self.options.accumulate > 1:
            batch_loss = micro_batch.loss
        record = Record(
            loss=batch_loss,
            cycle_loss=result.cycle_loss,
            lr=result.lr,
            scale=result.scale,
            skipped=result.skipped,
            grad_norm=result.grad_norm,
            updated=result.updated,
            fingerprint=self._no_fingerprint,
        )
        return with_extras(record, micro_batch.parts, micro_batch.counts)

    def _end_cycle(self, micro_batch: MicroBatch) -> Record:
        """The update that ends a cycle, decided by the device where it can, and its record."""
        state = self.state
        if isinstance(self.accumulator, LaneAccumulate):
            self.accumulator.end_cycle(state)
        grad_indices = [i for i, grad in enumerate(state.cycle.grads) if grad is not None]
        if not grad_indices:
            self._check_reach()
        can_decide = self.decides_on_device
        if can_decide and self.has_optimizer_state(state.cycle.grads, grad_indices):
            result = self._update_on_device(state, grad_indices)
        else:
            result = self.update.on_host(state, grad_indices)
            if result.updated is self.update.true:  # the host's own constant: no read
                self._params_with_state.update(grad_indices)
        self.count_cycle()
        state.cycle.close()
        record = self.record_update(micro_batch, result)
        try:
            overflow.check_after_update(self, result)
        except NonFiniteError as error:
            error.record = self._with_fingerprint(record)  # the step is over, and has one
            raise
        return record

    def _check_reach(self) -> None:
        """Of a loss that gave no parameter a gradient: an error at first, later a Notice, once."""
        weight = self.state.cycle.weight
        has_terms = weight is None or self.host_reads.read(weight) > 0
        if not has_terms or self._unreached_is_known:
            return
        self._unreached_is_known = True
        message = unreached_message(self.names, self.params, self.state.steps)
        is_frozen = not any(p.requires_grad for p in self.params)
        if is_frozen or self.host_reads.read(self.state.updates) > 0:
            warnings.warn(f"{message}; nothing is updated", Notice, stacklevel=user_stacklevel())
            return
        self._unreached_is_known = False
        self.state.cycle.close()
        raise ValueError(message)

    def count_cycle(self) -> None:
        """Notes that one more cycle has ended, and at which step."""
        self.cycles_ended += 1
        self.last_steps[self.cycles_ended] = self.state.steps
        self.last_steps.pop(self.cycles_ended - MAX_REMEMBERED_CYCLES, None)

    @property
    def decides_on_device(self) -> bool:
        """Whether the device decides updates: alone, or as part of a compiled program."""
        return self._decides_on_device or self.compiled.inside_whole_step

    @property
    def ready_for_capture(self) -> bool:
        """Whether an update has been committed, so that optimizer state exists."""
        return self.decides_on_device and bool(self._params_with_state)

    def has_optimizer_state(self, grads: list[Tensor | None], grad_indices: list[int]) -> bool:
        """Whether the device may decide: each parameter has moved before, no gradient is sparse."""
        if self._optimizer_guard.settings_switched():
            self._params_with_state.clear()
        has_sparse = any(grad is not None and grad.is_sparse for grad in grads)
        all_moved = self._params_with_state.issuperset(grad_indices)
        return bool(grad_indices) and not has_sparse and all_moved

    def extra_tensors(self) -> dict[str, Tensor]:
        """Tensors that decide the next step and are not in the network's state_dict, by name."""
        return find_extra_tensors(self)

    def state_fingerprint(self) -> Tensor:
        """One fingerprint of the whole state."""
        return combine(self.fingerprints().values())

    def _with_fingerprint(self, record: Record) -> Record:
        every_steps = self.options.fingerprint_every
        if every_steps and self.state.steps % every_steps == 0:
            return record._replace(fingerprint=self.state_fingerprint())
        return record

    def _check_usable(self) -> None:
        if self._holds_averages:
            raise ValueError(
                "step: inside averaged() the network holds averages, to evaluate; "
                "leave the block first"
            )
        self.check_network()
