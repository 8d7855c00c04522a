"""On a CPU, a whole training step as one compiled program, checked beside the step itself.

What it buys: 0.71 (0.58 to 1.02) of the time of a bare torch loop, where the uncompiled step takes
1.24 (0.99 to 1.56) of it (the benchmark MLP, batch 64, 2 threads of a Xeon; docs/guide/cpu.md). It
is on with `compile=True` in `fit` and `hs.sink`; `capture=False` compiles forward and loss only,
and `compile=False` nothing. Results differ from the uncompiled step by rounding.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from halfstep.compiler.backend import compile_graph
from halfstep.compiler.trace import trace
from halfstep.engine.captured.static_step import step_backend_flags
from halfstep.step import TrainStep
from halfstep.utils import rng
from halfstep.utils.text import first_line

Tensors: TypeAlias = list[Tensor]

# (values of the program, values of the step, values before both) → whether they agree.
Comparison: TypeAlias = Callable[[Tensors, Tensors, Tensors], bool]

# Batches on which the recorded operations, not yet compiled, must give the step's own bits.
CHECKED_BATCHES = 8

# How far the change of a tensor may be from the step's, as a share of it. Compiled code rounds in
# another order, which moves a change by 1e-5 or so.
CHANGE_TOLERANCE = 0.05

# The same for a program that computes in 16 bits: now and then an element is rounded to the other
# side, and its rounding error with it.
LOW_CHANGE_TOLERANCE = 0.5

# Rounding errors (eps) that are allowed beside it: in 16 bits of the largest change of a dtype, and
# in its own dtype of the tensor's size.
CHANGE_ROUNDINGS = 10
SIZE_ROUNDINGS = 8

_DIFFERS_RECORDED = (
    "written down, the step gives other values than when it runs: does it use numpy or Python's "
    "random numbers, keep tensors or counters in attributes, or set torch's random numbers?"
)
_DIFFERS_COMPILED = "torch's compiler makes other values of this step than it gives uncompiled"


class WholeStepProgram:
    """Runs a step as one program: the operations that `body` did when it was recorded.

    On the first calls `body` runs too, from the same state, and its result stays: first the
    recorded operations must give the same bits, then the compiled ones the same values, except for
    rounding. From then on only the compiled program runs.
    """

    def __init__(self, step: TrainStep, body: Callable[[], Any]) -> None:
        self._step = step
        self._body = body
        self._traced = trace(body)
        self._inputs = self._traced.inputs
        self._calls = 0
        self._program: Any = self._traced.module(decompose=False)

    def __call__(self) -> str:
        """Runs one step. Returns what is wrong with the program, or ""."""
        compiles_at = CHECKED_BATCHES + 2
        if self._calls >= compiles_at:
            self._run_program()
            return ""

        self._calls += 1
        # The batch that was recorded gives the same values in any case, so it checks nothing.
        if self._calls == 1:
            self._body()
            return ""
        if self._calls < compiles_at:
            return self._run_both(_equal_bits, _DIFFERS_RECORDED)
        return self._compile_and_run_both()

    def _compile_and_run_both(self) -> str:
        compute_dtype = self._step.precision.compute
        if sys.stderr.isatty():
            print("halfstep: compiling the whole step, once (5 to 30 s)", file=sys.stderr)
        try:
            with (
                torch.no_grad(),
                warnings.catch_warnings(action="ignore"),
                step_backend_flags(self._step),
            ):
                self._program = compile_graph(
                    self._traced.module(decompose=True),
                    self._inputs,
                    low=torch.finfo(compute_dtype).bits < 32,
                    chip=None,
                    # A resumed run begins uncompiled: dropout must not depend on that.
                    own_random_numbers=False,
                )
        except Exception as error:
            self._body()
            return f"torch cannot compile it: {first_line(error)}"

        def changed_alike(values: Tensors, expected: Tensors, before: Tensors) -> bool:
            return _changed_alike(values, expected, before, compute_dtype)

        return self._run_both(changed_alike, _DIFFERS_COMPILED)

    @torch.no_grad()
    def _run_program(self) -> None:
        if self._step.options.deterministic:
            with step_backend_flags(self._step):
                self._program(*self._inputs)
        else:
            self._program(*self._inputs)

    def _run_both(self, agree: Comparison, difference: str) -> str:
        """Runs the program, then the step from the same state and random numbers.

        The step's result stays. If the step raises an error, that error is raised. Returns why the
        program failed, `difference` if the two do not agree, or "".
        """
        tensors = self._traced.changed_inputs
        before = [t.clone() for t in tensors]
        random_states = rng.save()
        failure = ""
        try:
            self._run_program()
        except Exception as error:
            failure = f"as a program it fails: {first_line(error)}"
        program_values = [t.clone() for t in tensors]

        # Back to the state before, and the step itself.
        with torch.no_grad():
            for t, value in zip(tensors, before, strict=True):
                t.copy_(value)
        rng.load(random_states)
        self._body()

        if failure:
            return failure
        if not agree(program_values, tensors, before):
            return difference
        return ""


class _Change(NamedTuple):
    """How a tensor with fractions has changed, as 2-norms over its finite elements."""

    dtype: torch.dtype
    error: float  # program − step
    change: float  # step − before
    size: float  # step


def _equal_bits(values: Tensors, expected: Tensors, before: Tensors) -> bool:
    pairs = zip(values, expected, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


def _changed_alike(
    values: Tensors, expected: Tensors, before: Tensors, compute_dtype: torch.dtype
) -> bool:
    """Whether tensors have changed in the same way.

    Whole numbers, and which elements are finite, must be equal; other values up to rounding.
    """
    changes = []
    for value, right, old in zip(values, expected, before, strict=True):
        if not torch.equal(torch.isfinite(right), torch.isfinite(value)):
            return False
        if _has_fractions(right):
            changes.append(_measure_change(value, right, old))
        elif not torch.equal(value, right):
            return False

    compute = torch.finfo(compute_dtype)
    tolerance = CHANGE_TOLERANCE if compute.bits >= 32 else LOW_CHANGE_TOLERANCE

    # A change may be nothing but rounding: a bias before a batch norm has no gradient. So a little
    # of the largest change is allowed everywhere.
    largest_change: dict[torch.dtype, float] = {}
    for entry in changes:
        largest_change[entry.dtype] = max(entry.change, largest_change.get(entry.dtype, 0.0))

    for dtype, error, change, size in changes:
        change_rounding = CHANGE_ROUNDINGS * compute.eps * largest_change[dtype]
        size_rounding = SIZE_ROUNDINGS * torch.finfo(dtype).eps * size
        # Written so that a NaN, which compares as False, disagrees.
        if not error <= tolerance * change + change_rounding + size_rounding:
            return False
    return True


def _measure_change(value: Tensor, right: Tensor, old: Tensor) -> _Change:
    """The norms of a _Change, with 0 for elements that are not finite."""
    is_finite = torch.isfinite(right)

    def finite_part(t: Tensor) -> Tensor:
        return torch.where(is_finite & torch.isfinite(t), t, 0).to(torch.complex128)

    finite_right = finite_part(right)
    return _Change(
        dtype=right.dtype,
        error=_norm(finite_part(value) - finite_right),
        change=_norm(finite_right - finite_part(old)),
        size=_norm(finite_right),
    )


def _norm(t: Tensor) -> float:
    return t.abs().square().sum().sqrt().item()


def _has_fractions(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()
