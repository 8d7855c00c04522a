"""A whole step as one compiled program, after it has been looked at beside the step itself."""

import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep.compiler.backend import generate
from halfstep.compiler.trace import written_down
from halfstep.engine.captured.static_step import backend_of
from halfstep.step import TrainStep
from halfstep.utils import rng

CHECKS = 8  # batches on which what was written down must give the step's own bits
NEAR = 0.05  # of a tensor's change: compiled code rounds in another order, which moves a change by 1e-5 or so
NEAR_LOW = 0.5  # in half precision an element falls to the other side now and then, and its residue with it
Tensors: TypeAlias = list[Tensor]
_STRAYS = (
    "written down, the step gives other values than when it runs: does it use numpy or Python's random numbers, keep "
    "tensors or counters in attributes, or set torch's random numbers?"
)
_WRONG = "torch's compiler makes other values of this step than it gives uncompiled"


class WholeStepProgram:
    """Runs a step as a program. On its first batches `body` runs too, from the same state, and its result stays: the
    operations as written down must give the same bits, and the compiled program the same values but for rounding."""

    def __init__(self, step: TrainStep, body: Callable[[], Any]) -> None:
        self._step, self._body, self._written = step, body, written_down(body)
        self._inputs, self._calls = self._written.inputs, 0
        self._run: Any = self._written.module(plain=False)

    def __call__(self) -> str:
        """One step; what is wrong with the program, if it is."""
        if self._calls > CHECKS + 1:
            self._call()
            return ""
        self._calls += 1
        if self._calls == 1:  # the batch that it was written down with proves nothing
            self._body()
            return ""
        return self._beside(_equal, _STRAYS) if self._calls <= CHECKS + 1 else self._compiled()

    def _compiled(self) -> str:
        low = torch.finfo(self._step.precision.compute).bits < 32
        if sys.stderr.isatty():
            print("halfstep: compiling the whole step, once (5 to 30 s)", file=sys.stderr)
        try:
            with torch.no_grad(), warnings.catch_warnings(action="ignore"), backend_of(self._step):
                self._run = generate(
                    self._written.module(plain=True), self._inputs, low=low, chip=None
                )
        except Exception as error:
            self._body()
            return f"torch cannot compile it: {_first_line(error)}"
        if self._written.random:  # compiled, it draws other numbers
            return self._beside(lambda *_: True, _WRONG)
        return self._beside(partial(_near, self._step.precision.compute), _WRONG)

    @torch.no_grad()
    def _call(self) -> None:
        if self._step.options.deterministic:
            with backend_of(self._step):
                self._run(*self._inputs)
        else:
            self._run(*self._inputs)

    def _beside(self, same: Callable[[Tensors, Tensors, Tensors], bool], wrong: str) -> str:
        """The program, then the step from the same state, random numbers too. An error is the step's, if it has one."""
        numbers, written = rng.save(), self._written.written
        before, failed = [t.clone() for t in written], ""
        try:
            self._call()
        except Exception as error:
            failed = f"as a program it fails: {_first_line(error)}"
        mine = [t.clone() for t in written]
        with torch.no_grad():
            for t, value in zip(written, before, strict=True):
                t.copy_(value)
        rng.load(numbers)
        self._body()
        return failed or ("" if same(mine, written, before) else wrong)


def _equal(mine: Tensors, right: Tensors, before: Tensors) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        for a, b in zip(mine, right, strict=True)
    )


def _near(compute: torch.dtype, mine: Tensors, right: Tensors, before: Tensors) -> bool:
    """Whether tensors changed alike: whole numbers and what is not finite exactly, the others to rounding. A change may
    be nothing but rounding (a bias before a batch norm has no gradient), so some of the largest one is allowed."""
    parts: list[tuple[torch.dtype, float, float, float]] = []
    for a, b, old in zip(mine, right, before, strict=True):
        known = torch.isfinite(b)
        if not torch.equal(known, torch.isfinite(a)) or (not _broken(b) and not torch.equal(a, b)):
            return False
        if _broken(b):
            x, y, z = (
                torch.where(known & torch.isfinite(t), t, 0).to(torch.complex128)
                for t in (a, b, old)
            )
            error, change, size = (v.abs().square().sum().sqrt().item() for v in (x - y, y - z, y))
            parts.append((b.dtype, error, change, size))
    low, largest = torch.finfo(compute), dict[torch.dtype, float]()
    for dtype, _, change, _ in parts:
        largest[dtype] = max(change, largest.get(dtype, 0.0))
    near = NEAR if low.bits >= 32 else NEAR_LOW
    floor = {dtype: 10 * low.eps * change for dtype, change in largest.items()}
    return all(
        error <= near * change + floor[dtype] + 8 * torch.finfo(dtype).eps * size
        for dtype, error, change, size in parts
    )


def _broken(t: Tensor) -> bool:
    """Whether it holds fractions."""
    return t.is_floating_point() or t.is_complex()


def _first_line(error: BaseException) -> str:
    return next(
        (line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__
    )
