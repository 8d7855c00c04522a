"""Forward and loss as one program of torch.compile: when, why, and whether that pays.

It buys the rows "compiled" of docs/internals/speed.md: the benchmark MLP 0.29 s instead of 0.50 s
for five epochs in fp32, ResNet-50 34.8 ms instead of 41.6 ms at batch 256 (one H200). Results
differ from uncompiled ones by rounding. Switched off by compile=False.

Only training is compiled, and each shape of batch from its second batch on: the first shows what is
wrong with the batch, not with the compiler, and tells report() the dtypes.
"""

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from halfstep.compiler.backend import compile_graph
from halfstep.cuda_graphs.guards import hook_dictionaries
from halfstep.errors import Notice
from halfstep.precision import Applied
from halfstep.step.batch_context import attach_loss_arguments
from halfstep.step.objective import Batch, BatchLoss, Objective
from halfstep.step.options import AutoFlag
from halfstep.utils import rng
from halfstep.utils.python_state import PythonState

MAX_COMPILED_SHAPES = 6  # torch keeps 8 programs; two are left for a frozen layer or eval mode
MAX_SHAPES_SEEN = 256  # shapes remembered; beyond that every batch has one of its own
ASSUMED_SPEEDUP = 1.2  # of compiled steps

# Seconds to compile: at least, and for each leaf module. For a CPU they were measured (see
# docs/internals/fast-paths.md), for CUDA they are assumed.
COMPILE_COST_S = {"cpu": (20.0, 1.8), "cuda": (15.0, 0.5)}


def count_leaf_modules(net: nn.Module) -> int:
    """The modules without children: the time to compile grows with their number."""
    return sum(1 for module in net.modules() if next(module.children(), None) is None)


def compiling_pays(seconds_left: float, modules: int, device: str = "cpu") -> tuple[bool, str]:
    """Whether a run of `seconds_left` repays the time to compile, and why."""
    base_cost, module_cost = COMPILE_COST_S.get(device, COMPILE_COST_S["cuda"])
    cost = base_cost + module_cost * modules
    saved = max(seconds_left, 0.0) * (1 - 1 / ASSUMED_SPEEDUP)
    pays = saved > cost
    verb = "saves" if pays else "would save"
    verdict = "pays" if pays else "does not pay"
    return pays, (
        f"compiling {modules} modules takes about {cost:.0f} s "
        f"and {verb} about {saved:.0f} s of the {seconds_left:.0f} s left "
        f"({ASSUMED_SPEEDUP} times the speed assumed): it {verdict}"
    )


class CompiledForward:
    """Forward and loss of a batch, compiled or not.

    `step.compiled(True)` compiles from the next batch on, where compile="auto" leaves that open.
    """

    def __init__(
        self,
        objective: Objective,
        requested: AutoFlag,
        device: torch.device,
        *,
        deterministic: bool,
    ) -> None:
        self.objective = objective
        self.requested = requested
        self.device = device
        self.on = False
        self.reason = "'auto' compiles in a fit that is long enough to pay for it"
        self._is_open = requested == "auto" and not deterministic
        self._inside_whole_step = False
        self._applied: Applied | None = None  # what the program was made for
        self._program: Any = None
        self._shapes: dict[Any, bool] = {}  # those seen, and whether they are compiled
        self._saved_shapes: dict[str, bool] = {}  # the same of the run that this one continues
        self._hooks: list[dict[int, Any]] = []  # every dictionary of hooks that forward looks into
        self._hook_count = 0
        self.forward_and_loss: Callable[..., BatchLoss] = objective

        if requested == "auto" and deterministic:
            self.reason = "deterministic=True repeats the uncompiled step"
        elif requested != "auto":
            self.reason = f"compile={requested!r}"
            self._switch(requested)
        cause = missing_compiler(device) if self.on else None
        if cause is not None:
            self._give_up(cause, "install one, or use compile=False", None)

    def __call__(self, on: bool, why: str = "asked for") -> bool:
        """Compiles or not from the next batch on, where compile="auto" leaves it open.

        Returns what holds.
        """
        if not self._is_open:
            return self.on
        cause = missing_compiler(self.device) if on else None
        if cause is not None:
            self._give_up(cause, "", None)
        else:
            self.reason = why
            self._switch(on)
        return self.on

    def compiled_shapes(self) -> dict[str, bool]:
        """The shapes of batch seen so far, as text, and whether each is compiled."""
        return {**self._saved_shapes, **{repr(s): done for s, done in self._shapes.items()}}

    def load_compiled_shapes(self, shapes: dict[str, bool]) -> None:
        """Continues where `compiled_shapes` was saved: these are compiled when they come again.

        Compiled code draws other random numbers than uncompiled code, so dropout would differ if
        their first batch ran uncompiled once more.
        """
        self._applied = None
        self._saved_shapes = dict(shapes)

    @property
    def inside_whole_step(self) -> bool:
        """Whether forward and loss are part of a program of the whole step, made by an engine."""
        return self._inside_whole_step

    @inside_whole_step.setter
    def inside_whole_step(self, inside: bool) -> None:
        if inside != self._inside_whole_step:
            self._inside_whole_step = inside
            self._switch(self.on)

    def _switch(self, on: bool) -> None:
        self.on = on
        # A program of the whole step traces the objective itself.
        self.forward_and_loss = self.objective
        if on and not self._inside_whole_step:
            self.forward_and_loss = self._forward_and_loss

    def _forward_and_loss(self, applied: Applied, batch: Batch, *, weighted: bool) -> BatchLoss:
        """What the objective gives, rounded as compiled code rounds.

        Batches of too many shapes run uncompiled.
        """
        if applied is not self._applied or self._count_hooks() != self._hook_count:
            self._start_program(applied)
        shape = _batch_shape(batch)
        if self._shapes.get(shape):
            return self._run_program(applied, batch, weighted)
        if self._saved_shapes and shape not in self._shapes:
            was_compiled = self._saved_shapes.pop(repr(shape), None)
            if was_compiled is not None:
                self._run_without_effects(applied, batch, weighted)
                self._shapes[shape] = False
            if was_compiled:
                return self._compile_shape(applied, batch, weighted, shape)
        if shape in self._shapes and not self._is_full():
            return self._compile_shape(applied, batch, weighted, shape)
        if len(self._shapes) + len(self._saved_shapes) < MAX_SHAPES_SEEN:
            self._shapes[shape] = False  # compiled when it comes again: most odd batches do not
        return self.objective(applied, batch, weighted=weighted)

    def _start_program(self, applied: Applied) -> None:
        """A new program, for another precision."""
        # `keep=` finds outputs by their identity, which no program preserves.
        if applied.precision.keep and applied.cast != "autocast":
            cause = f"keep= under {applied.precision.name!r} runs uncompiled only"
            self._give_up(cause, "use O1", None)
            return
        if self._applied is not None:
            self._saved_shapes = {}
        self._applied = applied
        self._program = _make_program(applied)
        self._shapes = {}
        self._hooks = hook_dictionaries(applied.net)
        self._hook_count = self._count_hooks()

    def _count_hooks(self) -> int:
        """The hooks of all modules. A program runs those that were there when it was made."""
        return sum(map(len, self._hooks))

    def _compile_shape(
        self, applied: Applied, batch: Batch, weighted: bool, shape: Any
    ) -> BatchLoss:
        """A new shape's first run. What fails here and works uncompiled is the compiler's."""
        snapshot = _Snapshot(self.objective, self.device)
        try:
            # One of torch's warnings is that strict fp32 could be TF32: strict was asked for.
            with warnings.catch_warnings(action="ignore"):
                result = self._run_program(applied, batch, weighted)
        except Exception as error:
            snapshot.restore()
            self._applied = None  # torch makes no program any more of code that it failed on
            # Uncompiled. This raises what is not about compiling.
            result = self.objective(applied, batch, weighted=weighted)
            if self.requested is True:
                snapshot.restore()
            cause = f"torch could not compile forward and loss ({_first_two_lines(error)})"
            self._give_up(cause, "use compile=False", error)
        self._shapes[shape] = True
        return result

    def _run_without_effects(self, applied: Applied, batch: Batch, weighted: bool) -> None:
        """Runs uncompiled, as each shape does at first, and restores what that has changed."""
        snapshot = _Snapshot(self.objective, self.device)
        with torch.no_grad():
            self.objective(applied, batch, weighted=weighted)
        snapshot.restore()

    def _run_program(self, applied: Applied, batch: Batch, weighted: bool) -> BatchLoss:
        objective = self.objective
        with applied:  # weights are swapped outside the traced code
            out = self._program(objective, applied, batch, weighted)
        if objective.is_known_loss:
            result = BatchLoss(*out)
        else:
            try:
                result = objective.batch_loss(out, applied.precision.output, weighted=weighted)
            except Exception as error:
                attach_loss_arguments(error, objective.loss, out)
                raise
        return objective.add_count(result, batch, weighted=weighted)

    def _give_up(self, cause: str, advice: str, error: Exception | None) -> None:
        """compile=True is honoured or refused; "auto" continues uncompiled and says so once."""
        if self.requested is True:
            raise RuntimeError(
                f"compile=True: {cause}; {advice}, or compile='auto' to go on uncompiled"
            ) from error
        self._is_open = False
        self.reason = cause
        self._switch(False)
        warnings.warn(f"not compiled: {cause}; training goes on uncompiled", Notice, stacklevel=2)

    def _is_full(self) -> bool:
        """Whether no program may be made now: there are enough, or a graph is being captured."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return True
        compiled_count = sum(self._shapes.values()) + sum(self._saved_shapes.values())
        is_full = compiled_count >= MAX_COMPILED_SHAPES
        if is_full and not self.reason.endswith("shapes"):
            self.reason += f"; uncompiled beyond {MAX_COMPILED_SHAPES} batch shapes"
            warnings.warn(
                f"compiled: batches come in more than {MAX_COMPILED_SHAPES} shapes, "
                "and the others run uncompiled; pad to a few",
                Notice,
                stacklevel=2,
            )
        return is_full


def _traced_forward_and_loss(
    objective: Objective, applied: Applied, batch: Batch, weighted: bool
) -> Any:
    """What is compiled: the network's outputs, and the loss where that is torch's or the net's.

    A loss of the user's own may read the network's weights, which are swapped in here.
    """
    out = applied.unrounded_outputs(objective.forward(objective.net, *batch))
    if not objective.is_known_loss:
        return out
    no_autocast: AbstractContextManager[Any] = nullcontext()
    if applied.cast == "autocast":
        no_autocast = torch.autocast(applied.device.type, enabled=False)
    with no_autocast:
        return tuple(objective.batch_loss(out, applied.precision.output, weighted=weighted))


def _make_program(applied: Applied) -> Any:
    """torch.compile of a code object of its own: torch limits programs by code object."""
    traced = _traced_forward_and_loss
    own_copy = FunctionType(traced.__code__.replace(), traced.__globals__, traced.__name__)
    is_low = torch.finfo(applied.precision.compute).bits < 32
    has_passes = is_low or applied.precision.name == "fp32"
    chip = "cuda" if applied.device.type == "cuda" and has_passes else None
    backend = partial(compile_graph, low=is_low, chip=chip)
    with warnings.catch_warnings(action="ignore"):  # torch's own, when its compiler is imported
        return torch.compile(own_copy, dynamic=False, backend=backend)


def missing_compiler(device: torch.device) -> str | None:
    """What torch.compile lacks on this machine, in words; None when it has what it needs."""
    with warnings.catch_warnings(action="ignore"):
        if device.type == "cuda":
            from torch.utils._triton import has_triton

            return None if has_triton() else "torch finds no Triton for this CUDA device"
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except Exception as error:
            return f"torch finds no C++ compiler ({_first_two_lines(error)})"
    return None


class _Snapshot:
    """Buffers, attributes and random states as they were, for after a program that failed."""

    def __init__(self, objective: Objective, device: torch.device) -> None:
        self.device = device
        self.python_state = PythonState(*objective.parts)
        self.buffers = [(buffer, buffer.detach().clone()) for buffer in objective.net.buffers()]
        self.host_rng = rng.host_states()
        self.cuda_rng = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def restore(self) -> None:
        self.python_state.restore()
        with torch.no_grad():
            for buffer, value in self.buffers:
                buffer.copy_(value)
        rng.set_host_states(self.host_rng)
        if self.cuda_rng is not None:
            torch.cuda.set_rng_state(self.cuda_rng, self.device)


def _batch_shape(batch: Batch) -> Any:
    """What a program is made for: shapes and dtypes, and every other value itself."""
    return tuple(
        [(x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in tree_leaves(batch)]
    )


def _first_two_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"
