"""A CUDA graph on the CPU: the operations of a capture are written down, taken back, and repeated on the same tensors.

Unlike a direct replay no Python runs again, and memory that a capture allocates holds NaN until the first replay: what
a real graph bakes in is baked in here. (Batch norm's kernels move statistics without declaring it: leave it out.)
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfstep as hs
from halfstep.cuda_graphs.capture__graph import CapturedGraph, GraphCache
from halfstep.engine.captured.function_program import FunctionProgram
from halfstep.engine.captured.record_buffer import RecordBuffer
from halfstep.engine.captured.runner import CapturedRunner
from halfstep.engine.captured.sink import Sink
from halfstep.engine.captured.step_program import StepProgram
from halfstep.engine.feed import Feed
from halfstep.utils import rng

CPU = torch.device("cpu")


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []
        self.before: list[tuple[Tensor, Tensor]] = []
        self.fresh: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(argument.name)
                self.before += [(t, t.detach().clone()) for t in tensors(given) if t.numel()]
        out = func(*args, **kwargs)
        known = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs))}
        new = [t for t in tensors(out) if t.untyped_storage().data_ptr() not in known and t.numel()]
        self.fresh += new
        self.calls.append((func, args, kwargs, tensors(out), {id(t) for t in new}))
        return out

    def take_back(self) -> None:
        with torch.no_grad():
            for t, value in reversed(self.before):
                t.detach().copy_(value)
            for t in self.fresh:
                if t.is_floating_point():
                    t.detach().fill_(torch.nan)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, outs, new in self.calls:
            for held, got in zip(outs, tensors(func(*args, **kwargs)), strict=True):
                if id(held) in new:
                    held.detach().copy_(got)


class Emulated(GraphCache):
    @property
    def usable(self) -> bool:
        return not self._stopped

    def capture(self, key: Hashable, body: Callable[[], Any]) -> CapturedGraph:
        numbers, recording = rng.save(), Recording()
        try:
            with recording:
                result = body()
        finally:
            recording.take_back()
            rng.load(numbers)
        self.captures += 1
        self._held[key] = CapturedGraph(recording.replay, result)
        return self._held[key]


def sinking(
    step: Any, batches: Any, *, every: int = 5, policy: Any = "raise", state: Any = ()
) -> Sink:
    """hs.sink with emulated graphs."""
    sink, ring = hs.sink(step, batches, every=every), RecordBuffer(8192, CPU)
    own = not isinstance(step, hs.TrainStep)
    program = (
        FunctionProgram(step, ring, Emulated(CPU), policy, state)
        if own
        else StepProgram(step, ring, Emulated(CPU), policy)
    )
    sink.runner = CapturedRunner(program, Feed(batches))
    return sink
