"""One batch in lanes: each lane a micro-batch of its own, summed over the lanes of all ranks.

A lane's gradients G and weight N add up as accumulate.py says. At the end of the cycle

    G = Σ over lanes of G_lane · nominal_lane        N = Σ over lanes of n_lane

on every rank, and update.py goes on as for one large batch: all ranks unscale, check, clip and
update the same numbers, so that they skip together and stay equal bit for bit.
"""

import copy
import warnings
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep.distributed import AllReduceSum, GradientSum, Ranks, TreeSum
from halfstep.errors import Notice
from halfstep.step.accumulate import Accumulate, MicroBatch
from halfstep.step.lanes import Lanes, lane_random_numbers, lanes_of_ranks, mean_buffers
from halfstep.step.objective import Batch
from halfstep.step.rank_startup import check_same_batch, check_same_weights
from halfstep.step.rollback import Buffers
from halfstep.step.state import Cycle, StepState
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.text import list_some

WHICH_GRADIENTS = "the parameters that have gradients"  # how an error calls the exchange


@dataclass
class LaneState:
    """What `Accumulate` reads and writes of a StepState, for one lane."""

    cycle: Cycle
    scale: Tensor


class LaneColumns(NamedTuple):
    """The names of the numbers that lanes report beside loss and terms."""

    parts: tuple[str, ...]
    metrics: tuple[str, ...]


class LaneAccumulate:
    """Adds global batches to the open cycle of a StepState: this rank's lanes, then all."""

    def __init__(
        self,
        accumulate: Accumulate,
        lanes: Lanes,
        ranks: Ranks,
        buffers: Buffers,
        seed: int,
        *,
        cycle_length: int,
    ) -> None:
        self.accumulate = accumulate
        self.lanes = lanes
        self.ranks = ranks
        self.buffers = buffers
        self.seed = seed
        self.cycle_length = cycle_length
        self.no_batch = accumulate.no_batch
        self.sum_dtypes = accumulate.sum_dtypes
        self.params = accumulate.params
        self.objective = accumulate.objective
        self.gradient_sum: GradientSum
        if lanes.exact:
            all_lanes = lanes_of_ranks(lanes.count, ranks.count)
            self.gradient_sum = TreeSum(ranks, all_lanes, accumulate.applied.device)
        else:
            self.gradient_sum = AllReduceSum(ranks, accumulate.applied.device)

        # On the meta device: shapes, strides and dtypes without memory.
        self._gradients_like = [
            torch.empty_like(p, dtype=dtype, device="meta", requires_grad=False)
            for p, dtype in zip(self.params, self.sum_dtypes, strict=True)
        ]
        self._lane_states: list[LaneState] = []
        self._lane_buffers: list[list[Tensor]] = []
        self._columns: LaneColumns | None = None
        # The parameters that have gradients at the end of the cycle: in the lanes of this rank, and
        # in those of any rank. None before that is known.
        self._present: list[bool] | None = None
        self._agreed_present: list[bool] | None = None
        # A batch ended in an error, when some of its lanes had been added to the open cycle.
        self._cycle_is_torn = False
        self.compares_next_batch = False  # whatever its number: it is the first of a pass

    def take_over(self, other: "LaneAccumulate") -> None:
        """Goes on with the open cycle of another one, for the same lanes."""
        self.gradient_sum = other.gradient_sum
        self._lane_states = other._lane_states
        self._lane_buffers = other._lane_buffers
        self._columns = other._columns
        self._present = other._present
        self._agreed_present = other._agreed_present
        self._cycle_is_torn = other._cycle_is_torn
        self.compares_next_batch = other.compares_next_batch

    def copy_cycle(self, other: "LaneAccumulate", memo: dict[int, Any]) -> None:
        """Goes on with a copy of the open cycle of another one. Nothing of it was summed yet."""
        self._lane_states = copy.deepcopy(other._lane_states, memo)
        self._lane_buffers = copy.deepcopy(other._lane_buffers, memo)
        self._columns = other._columns
        self._cycle_is_torn = other._cycle_is_torn

    def __call__(self, state: StepState, batch: Batch) -> MicroBatch:
        """Adds one global batch. Returns what it reports, of all lanes together."""
        self.ranks.progress.step = state.steps + 1
        self.drop_torn_cycle(state)
        if self.compares_next_batch or _is_power_of_two(state.steps + 1):
            self.compares_next_batch = False
            check_same_batch(batch, self.ranks, state.steps + 1)
            check_same_weights(self.params, self.ranks, state.steps + 1)
        pieces = self.lanes.split(batch)
        cycle = state.cycle
        if cycle.micro == 0:
            self._open_cycle(state)
        reports = []
        try:
            for position, piece in enumerate(pieces):
                reports.append(self._run_lane(state, position, piece))
        except BaseException:
            # Some lanes have added their part of this batch, others have not.
            if cycle.micro == 0:
                self.restore_buffers(cycle)
            else:
                self._cycle_is_torn = True
            raise
        cycle.micro += 1
        if cycle.micro == self.cycle_length:
            self._end_lanes()  # gradients travel while the ranks exchange their losses
        return self._report_of_all(cycle, reports)

    def end_cycle(self, state: StepState) -> None:
        """Sums gradients and combines buffers over all lanes; the update comes next."""
        if self._present is None:  # a tail, shorter than a cycle
            self._end_lanes()
        if self._agreed_present is None:
            assert self._present is not None
            self._agreed_present = self.ranks.any_of(self._present, WHICH_GRADIENTS)
        state.cycle.grads = self.gradient_sum.finish(self._gradients_like, self._agreed_present)
        self._combine_buffers()
        self._lane_states = []
        self._lane_buffers = []

    def drop_torn_cycle(self, state: StepState) -> None:
        """After an error in the middle of a cycle: its sums are of no use, and it begins anew."""
        if not self._cycle_is_torn:
            return
        self._cycle_is_torn = False
        if state.cycle.micro == 0:  # another state was loaded
            return
        warnings.warn(
            f"the {state.cycle.micro} batches of the open update cycle are dropped: a later batch "
            "ended in an error, when some of its lanes had been added",
            Notice,
            stacklevel=user_stacklevel(),
        )
        self.restore_buffers(state.cycle)
        state.cycle.close()

    def restore_buffers(self, cycle: Cycle) -> None:
        """Makes the buffers what they were before the cycle: the same on all ranks."""
        if self.buffers:
            self.buffers.restore(cycle.buffers)

    def _open_cycle(self, state: StepState) -> None:
        """Starts all sums from nothing. Buffers are copied, to go back to and to start lanes at."""
        self.gradient_sum.reset()
        cycle = state.cycle
        zero = self.accumulate.float64_zero()
        cycle.grads = []
        cycle.weight = zero
        cycle.nominal = zero
        cycle.loss = zero
        if self.buffers:
            cycle.buffers = self.buffers.copy(cycle.buffers)
        self._lane_states = []
        self._lane_buffers = []
        self._present = None
        self._agreed_present = None
        for _ in self.lanes.mine:
            lane_state = LaneState(Cycle(), state.scale)
            self.accumulate.open_sums(lane_state.cycle)
            self._lane_states.append(lane_state)
            self._lane_buffers.append(cycle.buffers)

    def _run_lane(self, state: StepState, position: int, piece: Batch) -> MicroBatch:
        """One lane's micro-batch, with the random numbers and the buffers of that lane."""
        lane = self.lanes.mine[position]
        has_several = len(self.lanes.mine) > 1
        if has_several and self.buffers:
            self.buffers.restore(self._lane_buffers[position])
        random_numbers: AbstractContextManager[None] = nullcontext()
        if self.lanes.count > 1:
            random_numbers = lane_random_numbers(
                self.seed, state.steps, lane, self.accumulate.applied.device
            )
        with random_numbers:
            report = self.accumulate(self._lane_states[position], piece)
        if self.buffers:
            self._check_buffers(state.cycle)
        if has_several and self.buffers:
            self._lane_buffers[position] = [b.detach().clone() for b in self.buffers.tensors()]
        if self.cycle_length == 1:
            self._end_lane(position)
        return report

    def _check_buffers(self, cycle: Cycle) -> None:
        """Refuses buffers that forward has put in place of others, if no mean can be taken."""
        before = [(tuple(b.shape), b.dtype) for b in cycle.buffers]
        now = [(tuple(b.shape), b.dtype) for b in self.buffers.tensors()]
        if now == before:
            return
        changed = [f"{list(shape)} ({dtype})" for shape, dtype in set(now) ^ set(before)]
        raise ValueError(
            "expected buffers that keep their number, shapes and dtypes in forward, so that they "
            f"can be averaged over ranks or lanes; forward has changed {list_some(changed, 4)}. "
            "Give the buffer its shape when the network is built, or keep the tensor as a plain "
            "attribute, without register_buffer"
        )

    def _end_lanes(self) -> None:
        """The cycle is over: hands what is left to the sum, which may begin."""
        if self.cycle_length > 1:
            for position in range(len(self.lanes.mine)):
                self._end_lane(position)
        has_gradient = [False] * len(self.params)
        for lane_state in self._lane_states:
            for i, grad in enumerate(lane_state.cycle.grads):
                has_gradient[i] = has_gradient[i] or grad is not None
        self._present = has_gradient
        trained = [p.requires_grad for p in self.params]
        self.gradient_sum.start(self._gradients_like, trained)

    def _end_lane(self, position: int) -> None:
        """Hands the gradients of a lane to the sum, in units of single terms."""
        lane_cycle = self._lane_states[position].cycle
        self._refuse_sparse(lane_cycle.grads)
        factor = None
        if not self.objective.is_sum:
            assert lane_cycle.nominal is not None
            factor = torch.where(lane_cycle.nominal > 0, lane_cycle.nominal, 1)
        self.gradient_sum.add(self.lanes.mine[position], lane_cycle.grads, factor)

    def _refuse_sparse(self, grads: list[Tensor | None]) -> None:
        if any(grad is not None and grad.is_sparse for grad in grads):
            raise ValueError(
                "expected dense gradients, to be summed over ranks or lanes, received sparse ones; "
                "build the nn.Embedding without sparse=True, and give an optimizer for dense ones"
            )

    def _report_of_all(self, cycle: Cycle, reports: list[MicroBatch]) -> MicroBatch:
        """Loss, parts and counts of the whole batch, and its part in the sums of the cycle.

        All ranks have the same numbers of all lanes, and add them in the same order.
        """
        columns = self._agree_columns()
        rows = torch.stack([self._row(report, columns) for report in reports])
        table = self._gather_reports(rows)
        loss = table[:, 0]
        terms = table[:, 1]
        has_terms = terms > 0
        total_terms = terms.sum()
        divisor = torch.where(total_terms > 0, total_terms, 1)

        def weighted_sum(values: Tensor) -> Tensor:
            return torch.where(has_terms, values * terms, 0).sum()

        assert cycle.loss is not None
        assert cycle.weight is not None
        if self.objective.is_sum:
            batch_loss = loss.sum()
            cycle.loss = cycle.loss + batch_loss
            cycle.weight = torch.maximum(cycle.weight, has_terms.any().double())
        else:
            batch_loss = weighted_sum(loss) / divisor
            cycle.loss = cycle.loss + weighted_sum(loss)
            cycle.weight = cycle.weight + total_terms

        # Parts of a loss are averaged as the loss is; counts of metrics add up.
        parts: dict[str, Tensor] = {}
        for i, name in enumerate(columns.parts, 2):
            parts[name] = weighted_sum(table[:, i]) / divisor
        counts: dict[str, tuple[Tensor, Tensor]] = {}
        first_count = 2 + len(columns.parts)
        for i, name in enumerate(columns.metrics):
            total = table[:, first_count + 2 * i].sum()
            count = table[:, first_count + 2 * i + 1].sum()
            counts[name] = (total, count)
        loss_dtype = self.accumulate.zero_loss.dtype
        return MicroBatch(batch_loss.to(loss_dtype), parts, counts, total_terms)

    def _agree_columns(self) -> LaneColumns:
        """The names of parts and metrics; those of rank 0 where this rank has had no rows yet."""
        metric_names: tuple[str, ...] = ()
        if self.objective.observer is not None:
            metric_names = tuple(self.objective.observer.names)
        if self._columns is not None and self._columns.metrics == metric_names:
            return self._columns
        all_names = self.ranks.gather_objects(self.objective.part_names, "the parts of the loss")
        known = [names for names in all_names if names is not None]
        for names in known:
            if names != known[0]:
                raise ValueError(
                    f"loss: expected the same parts on all ranks, received {known[0]} on one and "
                    f"{names} on another; return all of them every time, with "
                    "torch.zeros_like(loss) for a part that is switched off"
                )
        if known and self.objective.part_names is None:
            self.objective.part_names = known[0]
        if known:
            self._columns = LaneColumns(known[0], metric_names)
            return self._columns
        return LaneColumns((), metric_names)

    def _row(self, report: MicroBatch, columns: LaneColumns) -> Tensor:
        """What one lane reports, as a row of float64 numbers."""
        zero = self.accumulate.float64_zero()
        numbers = [report.loss, zero if report.terms is None else report.terms]
        numbers += [report.parts.get(name, zero) for name in columns.parts]
        for name in columns.metrics:
            numbers += report.counts.get(name, (zero, zero))
        return torch.stack([number.detach().double() for number in numbers])

    def _gather_reports(self, rows: Tensor) -> Tensor:
        """The rows of all lanes. What the hosts have to say travels along where that is free."""
        what = "the losses of the lanes"
        flags = self._present
        if flags is None:
            return self._gather_lanes(rows, what)
        if rows.device.type != "cpu":
            self._agreed_present = self.ranks.any_of(flags, WHICH_GRADIENTS)
            return self._gather_lanes(rows, what)
        own_flags = torch.tensor(self.ranks.own_flags(flags), dtype=rows.dtype)
        rows = torch.cat([rows, own_flags.expand(len(rows), -1)], dim=1)
        table = self._gather_lanes(rows, what)
        flag_columns = table[:, -len(own_flags) :]
        agreed_flags = (flag_columns != 0).any(0).tolist()
        self._agreed_present = self.ranks.agreed_flags(agreed_flags)
        return table[:, : -len(own_flags)]

    def _gather_lanes(self, rows: Tensor, what: str) -> Tensor:
        """The rows of all lanes of all ranks, in the order of the lanes."""
        sizes = [len(lanes) for lanes in lanes_of_ranks(self.lanes.count, self.ranks.count)]
        padding = max(sizes) - rows.shape[0]
        if padding:
            rows = torch.cat([rows, rows.new_zeros((padding, *rows.shape[1:]))])
        gathered = self.ranks.all_gather(rows, what)
        return torch.cat([block[:size] for block, size in zip(gathered, sizes, strict=True)])

    def _combine_buffers(self) -> None:
        """Gives all ranks the same buffers: means over the lanes."""
        if not self.buffers or self.lanes.count == 1:
            return
        own = self._lane_buffers
        if len(self.lanes.mine) == 1:
            own = [[b.detach() for b in self.buffers.tensors()]]
        gathered = []
        for values in zip(*own, strict=True):
            rows = torch.stack([value.reshape(-1) for value in values])
            table = self._gather_lanes(rows, "the buffers of the network")
            gathered.append(table.view(-1, *values[0].shape))
        self.buffers.restore(mean_buffers(gathered))


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
