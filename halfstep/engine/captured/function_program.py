"""A step function of the user's own as graphs; its results are kept row by row."""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from halfstep.cuda_graphs.capture import MAX_GRAPHS, CapturedGraph, GraphCache, rng_generation
from halfstep.cuda_graphs.guards import (
    ContainerTensors,
    module_guards,
    optimizer_guards,
)
from halfstep.engine.captured.inputs import UNCAPTURABLE, MakeBatches
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.uncapturable import (
    OnUncapturable,
    locate_error,
    raise_or_warn,
    record_host_syncs,
    unrepeatable_reason,
)
from halfstep.step import Record
from halfstep.utils.python_state import PythonState

# Calls before a capture: then optimizer state, autotuned kernels and gradients exist.
EAGER_CALLS = 3


class FunctionProgram:
    """Runs `function(*batch)`. Its results, tensors of one number each, are the columns of rows.

    Batches of one shape are

    - **run eagerly** the first three times, the third time watched for operations that make the
      host wait; and always once a capture was refused (`refusal_reason` says why),
    - **captured** the fourth time: its kernels are recorded, none of them runs,
    - **replayed** then, and every time after that.

    All graphs are **dropped** when a visit begins and something of `state`, the networks and
    optimizers that the function changes, is not as it was at the capture.
    """

    writes_fingerprints = False

    def __init__(
        self,
        function: Callable[..., Any],
        records: RecordBuffer,
        graphs: GraphCache,
        on_uncapturable: OnUncapturable,
        state: Sequence[Any] = (),
    ) -> None:
        self.function = function
        self.records = records
        self.graphs = graphs
        self.on_uncapturable = on_uncapturable
        self.state = tuple(state)
        self.names: tuple[str, ...] = ()  # of the columns, from the first call on
        self.replays = 0
        self.refusal_reason = ""  # why no more graphs are captured; empty while they are
        self._eager_calls: dict[Hashable, int] = {}  # by the key of the batch's shape
        self._guards: tuple[Any, ...] = ()
        self._container_tensors = ContainerTensors(*self.state)
        self._host_syncs = ""  # where the last eager call waited for the device

    def begin_steps(self) -> None:
        """Drops graphs that are stale after whatever happened since the last visit."""
        if not len(self.graphs):
            return
        if self._state_guards() != self._guards or self._container_tensors.were_replaced:
            self.graphs.clear()

    def end_steps(self) -> None:
        """Nothing to do: the function's state is the user's own."""

    def run(self, shape_key: Hashable, make_batches: MakeBatches, same_shape: int = 1) -> int:
        """Runs the current batch; its results go into the buffer. Returns 1, the batches run."""
        if self._host_syncs:
            self._refuse(self._host_syncs)

        can_capture = self.graphs.usable and not self.refusal_reason
        if can_capture and shape_key is UNCAPTURABLE:
            can_capture = self.graphs.has_capacity(MAX_GRAPHS)  # False, and warns once
        eager_calls = self._eager_calls.get(shape_key, 0)

        graph = self.graphs.get(shape_key)
        if graph is None and can_capture and eager_calls >= EAGER_CALLS:
            graph = self._capture(shape_key, make_batches)
        if graph is not None:
            graph.replay()
            self.replays += 1
            return 1

        is_last = can_capture and eager_calls == EAGER_CALLS - 1
        with record_host_syncs(None, self.graphs.device, on=is_last) as host_syncs:
            self._call(make_batches)
        self._host_syncs = "\n  ".join(dict.fromkeys(map(str, host_syncs)))
        if can_capture and (eager_calls or self.graphs.has_capacity(len(self._eager_calls))):
            self._eager_calls[shape_key] = eager_calls + 1
        return 1

    def flush(self, *, into_last_row: bool) -> bool:
        """Calls the function's own `flush`, if it has one. Returns whether that did something."""
        flush = getattr(self.function, "flush", None)
        return bool(flush and flush())

    def _call(self, make_batches: MakeBatches) -> None:
        """Calls the function with the current batch, and writes its results as a row."""
        result = named_numbers(self.function(*next(make_batches(1))))
        names = tuple(result)
        if self.names and names != self.names:
            raise ValueError(
                f"sink: expected the step to return {list(self.names)} every time, "
                f"got {list(names)}"
            )
        self.names = names
        self.records.write_values(list(result.values()))

    def _capture(self, shape_key: Hashable, make_batches: MakeBatches) -> CapturedGraph | None:
        """Records what a call launches. None where that did not work: the batch runs eagerly."""
        python_state = PythonState(self.function, *self.state)
        try:
            with self._container_tensors.during_capture():
                graph = self.graphs.capture(shape_key, lambda: self._call(make_batches))
            # Inside the try: a tensor without an address, a sparse one, cannot be guarded.
            self._guards = self._state_guards()
        except Exception as error:
            python_state.restore()
            self._refuse(str(locate_error(error, None)), error)
            return None
        changes = python_state.changes()
        if changes:
            python_state.restore()
            self._refuse(unrepeatable_reason(changes))
            return None
        return graph

    def _refuse(self, reason: str, cause: BaseException | None = None) -> None:
        """Captures nothing any more: raises, or warns that all calls run eagerly from now on."""
        self.graphs.clear()
        self.refusal_reason = reason
        self._host_syncs = ""
        raise_or_warn(reason, self.on_uncapturable, cause)

    def _state_guards(self) -> tuple[Any, ...]:
        """Everything in `state` that a graph has read in Python: addresses, settings, modes."""
        guards: list[Any] = [rng_generation(self.records.device)]
        for part in self.state:
            if isinstance(part, Optimizer):
                guards += optimizer_guards(part)
            else:
                guards += module_guards(part)
        return tuple(guards)


def named_numbers(result: Any) -> dict[str, Tensor]:
    """What a step function returned, by name; a TypeError unless it is tensors of one number each.

    It may be a Record, a dict, the loss alone, or a tuple that starts with the loss.
    """
    if isinstance(result, Record):
        return result._asdict()
    if isinstance(result, dict):
        numbers = dict(result)
    elif isinstance(result, tuple) and result:
        numbers = {"loss": result[0]}
        for i, value in enumerate(result[1:], start=1):
            numbers[f"value{i}"] = value
    else:
        numbers = {"loss": result}

    for name, value in numbers.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            continue
        received = type(value).__name__
        if isinstance(value, Tensor):
            received = f"shape {tuple(value.shape)}"
        raise TypeError(
            "sink: expected the step to return tensors of one number each (its loss, a dict of "
            f"them), got {received} for {name!r}; return for instance loss.detach()"
        )
    return numbers
