"""Forward and loss as one compiled program: whether it is one, why, and whether that pays."""

import warnings
from contextlib import nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from halfstep.compiler.backend import generate
from halfstep.errors import Notice
from halfstep.precision import Applied
from halfstep.step.loss_terms import Count
from halfstep.step.objective import Batch, Objective
from halfstep.step.options import AutoFlag

SHAPES = 6  # of batches that are compiled: torch keeps 8 programs, two are left for a frozen layer or eval mode
SEEN = 256  # shapes remembered: beyond, every batch has one of its own
GAIN = 1.2  # assumed: compiled steps are this much faster
COST_S = {"cpu": (20.0, 1.8), "cuda": (15.0, 0.5)}
"""Seconds to compile: (at least, and per leaf module). CPU measured, see docs/reference/step.md; CUDA assumed."""


def leaves(net: nn.Module) -> int:
    """The modules without children: what the time to compile grows with."""
    return sum(1 for m in net.modules() if next(m.children(), None) is None)


def pays(seconds_left: float, modules: int, device: str = "cpu") -> tuple[bool, str]:
    """Whether compiling a network of so many leaf modules is repaid by a run of `seconds_left`, and why."""
    least, each = COST_S.get(device, COST_S["cuda"])
    cost, saved = least + each * modules, max(seconds_left, 0.0) * (1 - 1 / GAIN)
    verb, word = ("saves", "pays") if saved > cost else ("would save", "does not pay")
    return saved > cost, (
        f"compiling {modules} modules takes about {cost:.0f} s and {verb} about {saved:.0f} s "
        f"of the {seconds_left:.0f} s left ({GAIN} times the speed assumed): it {word}"
    )


class CompiledForward:
    """`step.compiled(True)`: from here on forward and loss run compiled, where compile="auto" leaves that open.

    Only training is, and each shape from its second batch on: the first shows what is wrong with the batch, not with
    the compiler, and tells report() the dtypes.
    """

    def __init__(
        self, objective: Objective, wish: AutoFlag, device: torch.device, *, deterministic: bool
    ) -> None:
        self.objective, self.wish, self.device = objective, wish, device
        self.on, self.reason = False, "'auto' compiles in a fit that is long enough to pay for it"
        self._open = wish == "auto" and not deterministic
        self._inside = False
        self._under: Applied | None = None
        self._program: Any = None
        self._shapes: dict[Any, bool] = {}  # those seen, and whether they are compiled
        if wish == "auto" and deterministic:
            self.reason = "deterministic=True repeats the uncompiled step"
        elif wish != "auto":
            self.reason = f"compile={wish!r}"
            self._set(wish)
        cause = missing_compiler(device) if self.on else None
        if cause is not None:
            self._fail(cause, "install one, or use compile=False", None)

    def __call__(self, on: bool, why: str = "asked for") -> bool:
        """Compiled or not from the next batch on; returns what holds, which only compile="auto" leaves open."""
        cause = missing_compiler(self.device) if self._open and on else None
        if cause is not None:
            self._fail(cause, "", None)
        elif self._open:
            self.reason = why
            self._set(on)
        return self.on

    def run(self, applied: Applied, batch: Batch, *, weighted: bool) -> tuple[Tensor, Count | None]:
        """What the objective gives, rounded as compiled code rounds; batches of too many shapes run uncompiled."""
        if applied is not self._under:
            self._start(applied)
        shape = _shape(batch)
        if self._shapes.get(shape):
            return self._run(applied, batch, weighted)
        if shape in self._shapes and not self._full():
            return self._compile(applied, batch, weighted, shape)
        if len(self._shapes) < SEEN:
            self._shapes[shape] = False  # compiled when it comes again: most odd batches do not
        return self.objective(applied, batch, weighted=weighted)

    def _start(self, applied: Applied) -> None:
        """A program for another precision; `keep=` finds outputs by their identity, which no program preserves."""
        if applied.precision.keep and applied.cast != "autocast":
            self._fail(
                f"keep= under {applied.precision.name!r} runs uncompiled only", "use O1", None
            )
        else:
            self._under, self._program, self._shapes = applied, _program(applied), {}

    def _compile(
        self, applied: Applied, batch: Batch, weighted: bool, shape: Any
    ) -> tuple[Tensor, Count | None]:
        """A new shape's first run. What fails here and works uncompiled is the compiler's failure."""
        old = _kept(self.objective.net, self.device)
        try:
            with warnings.catch_warnings(
                action="ignore"
            ):  # one is that strict fp32 could be TF32: it is asked for
                result = self._run(applied, batch, weighted)
        except Exception as error:
            _put_back(old, self.device)
            self._under = None  # torch makes no whole program any more of code that it failed on
            result = self.objective(
                applied, batch, weighted=weighted
            )  # raises what is not about compiling
            if self.wish is True:
                _put_back(old, self.device)
            self._fail(
                f"torch could not compile forward and loss ({_first_lines(error)})",
                "use compile=False",
                error,
            )
        self._shapes[shape] = True
        return result

    def _run(self, applied: Applied, batch: Batch, weighted: bool) -> tuple[Tensor, Count | None]:
        objective = self.objective
        with applied:  # the swap stays outside the traced code
            out = self._program(objective, applied, batch, weighted)
        if not objective.is_known_loss:
            out = objective.loss_and_count(out, applied.precision.output, weighted=weighted)
        loss, n = out
        return loss, objective.count_from_batch(batch, n, weighted=weighted)

    @property
    def inside_whole_step(self) -> bool:
        """Whether forward and loss are part of a program of the whole step, which an engine makes."""
        return self._inside

    @inside_whole_step.setter
    def inside_whole_step(self, inside: bool) -> None:
        if inside != self._inside:
            self._inside = inside
            self._set(self.on)

    def _set(self, on: bool) -> None:
        self.on, self.objective.run = (
            on,
            self.run if on and not self._inside else self.objective.__call__,
        )

    def _fail(self, cause: str, advice: str, error: Exception | None) -> None:
        """compile=True is honoured or refused; "auto" goes on without, and says so once."""
        if self.wish is True:
            raise RuntimeError(
                f"compile=True: {cause}; {advice}, or compile='auto' to go on uncompiled"
            ) from error
        self._open, self.reason = False, cause
        self._set(False)
        warnings.warn(f"not compiled: {cause}; training goes on uncompiled", Notice, stacklevel=2)

    def _full(self) -> bool:
        """Whether no program may be made now: there are enough, or a CUDA graph is being captured."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return True
        full = sum(self._shapes.values()) >= SHAPES
        if full and not self.reason.endswith("shapes"):
            self.reason += f"; uncompiled beyond {SHAPES} batch shapes"
            text = f"compiled: batches come in more than {SHAPES} shapes, and the others run uncompiled; pad to a few"
            warnings.warn(text, Notice, stacklevel=2)
        return full


def _forward_and_loss(objective: Objective, applied: Applied, batch: Batch, weighted: bool) -> Any:
    """What is compiled: the network's outputs, and its loss too where that is torch's or the network's own."""
    out = applied.unrounded(objective.forward(objective.net, *batch))
    if (
        not objective.is_known_loss
    ):  # a loss of the user's own may read the network's weights, which are swapped here
        return out
    wide = (
        torch.autocast(applied.device.type, enabled=False)
        if applied.cast == "autocast"
        else nullcontext()
    )
    with wide:
        return objective.loss_and_count(out, applied.precision.output, weighted=weighted)


def _program(applied: Applied) -> Any:
    """torch.compile of a code object of its own: torch counts and limits programs by code object."""
    code = _forward_and_loss.__code__.replace()
    own = FunctionType(code, _forward_and_loss.__globals__, _forward_and_loss.__name__)
    low = torch.finfo(applied.precision.compute).bits < 32
    chip = (
        "cuda"
        if applied.device.type == "cuda" and (low or applied.precision.name == "fp32")
        else None
    )
    with warnings.catch_warnings(
        action="ignore"
    ):  # torch's own, on the first import of its compiler
        return torch.compile(own, dynamic=False, backend=partial(generate, low=low, chip=chip))


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
            return f"torch finds no C++ compiler ({_first_lines(error)})"
    return None


def _kept(net: nn.Module, device: torch.device) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """Buffers and random states as they are."""
    states = [
        torch.get_rng_state(),
        *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else []),
    ]
    return [(b, b.detach().clone()) for b in net.buffers()], states


def _put_back(old: tuple[list[tuple[Tensor, Tensor]], list[Tensor]], device: torch.device) -> None:
    buffers, states = old
    with torch.no_grad():
        for now, before in buffers:
            now.copy_(before)
    torch.set_rng_state(states[0])
    for state in states[1:]:
        torch.cuda.set_rng_state(state, device)


def _shape(batch: Batch) -> Any:
    """What a program is made for: shapes and dtypes, and every other value itself."""
    return tuple(
        [(x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in tree_leaves(batch)]
    )


def _first_lines(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:2])}"
