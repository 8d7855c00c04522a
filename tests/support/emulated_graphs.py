"""A CUDA graph on the CPU: a capture's operations are recorded, undone, and repeated.

Unlike a direct replay no Python runs again, and memory that a capture allocates holds NaN until the
first replay: what a real graph bakes in is baked in here. (Batch norm's kernels move statistics
without declaring it: leave it out.)
"""

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfstep as hs
from halfstep.cuda_graphs.capture import CapturedGraph, GraphCache
from halfstep.engine.captured.function_program import FunctionProgram
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.runner import CapturedRunner, Program
from halfstep.engine.captured.sink import Sink
from halfstep.engine.captured.step_program import StepProgram
from halfstep.engine.feed import Feed
from halfstep.utils import rng

CPU = torch.device("cpu")


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Call(NamedTuple):
    """One operation of a capture."""

    function: Any
    args: Any
    kwargs: dict[str, Any]
    outs: list[Tensor]
    new_outs: set[int]  # ids of those that have memory of their own


class Recording(TorchDispatchMode):
    """Records the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.before: list[tuple[Tensor, Tensor]] = []  # tensors written to, and what they held
        self.allocated: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                self.before += [(t, t.detach().clone()) for t in tensors(value) if t.numel()]

        out = func(*args, **kwargs)

        input_storages = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        outs = tensors(out)
        new_outs = []
        for t in outs:
            if t.untyped_storage().data_ptr() not in input_storages and t.numel():
                new_outs.append(t)
        self.allocated += new_outs
        self.calls.append(Call(func, args, kwargs, outs, {id(t) for t in new_outs}))
        return out

    def take_back(self) -> None:
        """Undoes every write. Memory that was allocated holds NaN."""
        with torch.no_grad():
            for t, value in reversed(self.before):
                t.detach().copy_(value)
            for t in self.allocated:
                if t.is_floating_point():
                    t.detach().fill_(torch.nan)

    @torch.no_grad()
    def replay(self) -> None:
        """Repeats the operations on the same tensors."""
        for call in self.calls:
            results = tensors(call.function(*call.args, **call.kwargs))
            for out, result in zip(call.outs, results, strict=True):
                if id(out) in call.new_outs:
                    out.detach().copy_(result)


class EmulatedGraphs(GraphCache):
    """Captures by Recording."""

    @property
    def usable(self) -> bool:
        return not self._stopped

    def capture(self, key: Hashable, body: Callable[[], Any]) -> CapturedGraph:
        rng_state = rng.save()
        recording = Recording()
        try:
            with recording:
                result = body()
        finally:
            recording.take_back()
            rng.load(rng_state)
        self.captures += 1
        self._graphs[key] = CapturedGraph(recording.replay, result)
        return self._graphs[key]


def sink_with_emulated_graphs(
    step: Any, batches: Any, *, every: int = 5, policy: Any = "raise", state: Any = ()
) -> Sink:
    """hs.sink with emulated graphs."""
    sink = hs.sink(step, batches, every=every)
    records = RecordBuffer(8192, CPU)
    program: Program
    if isinstance(step, hs.TrainStep):
        program = StepProgram(step, records, EmulatedGraphs(CPU), policy)
    else:
        program = FunctionProgram(step, records, EmulatedGraphs(CPU), policy, state)
    sink.runner = CapturedRunner(program, Feed(batches))
    return sink
