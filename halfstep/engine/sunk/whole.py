"""A whole step compiled into one program, and looked at once beside the step itself."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep.engine.sunk.tape import Tape, written_down
from halfstep.step.compiled import generate

NEAR = 0.05  # of a change: rounding in another order moves it by 1e-5 or so, the values of another batch by all of it


class Whole:
    """Calls the program. Its first run is compared with `body` run eagerly from the same state, whose result stays."""

    def __init__(self, body: Callable[[], Any], *, low: bool) -> None:
        self._body: Callable[[], Any] | None = body
        self._tape: Tape | None = written_down(body)
        self._inputs = self._tape.inputs
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            self._run = generate(self._tape.module(), self._inputs, low=low, cut=None)

    def __call__(self) -> str:
        """One step; what is wrong with the program, if it is."""
        body, tape = self._body, self._tape
        if body is None or tape is None:
            self._call()
            return ""
        self._body = self._tape = None
        return self._both(body, tape.written, random=tape.random)

    @torch.no_grad()
    def _call(self) -> None:
        self._run(*self._inputs)

    def _both(self, body: Callable[[], Any], written: list[Tensor], *, random: bool) -> str:
        before = [t.clone() for t in written]
        self._call()
        if random:  # the program draws other numbers: there is nothing to compare
            return ""
        mine = [t.clone() for t in written]
        for t, value in zip(written, before, strict=True):
            t.copy_(value)
        body()
        same = _near(mine, written, before)
        return "" if same else (
            "the compiled step gives other values than the step: does it use numpy, Python's random numbers, or code "
            "of its own that torch does not see?"
        )  # fmt: skip


def _near(mine: list[Tensor], right: list[Tensor], before: list[Tensor]) -> bool:
    """Whether the program changed tensors as the step did: whole numbers and what is not finite exactly, the others by
    all of one dtype together. One alone may be nothing but rounding: a bias before a batch norm has no gradient."""
    sums: dict[torch.dtype, Tensor] = {}
    for a, b, old in zip(mine, right, before, strict=True):
        known = torch.isfinite(b)
        if not torch.equal(known, torch.isfinite(a)) or not (b.is_floating_point() or torch.equal(a, b)):
            return False
        x, y, z = (torch.where(known & torch.isfinite(t), t, 0).double() for t in (a, b, old))
        parts = torch.stack([(x - y).square().sum(), (y - z).square().sum(), y.square().sum()])
        sums[b.dtype] = sums.get(b.dtype, 0) + parts
    floats = {dtype: each.sqrt().tolist() for dtype, each in sums.items() if dtype.is_floating_point}
    return all(e <= NEAR * change + torch.finfo(dtype).eps * size for dtype, (e, change, size) in floats.items())
