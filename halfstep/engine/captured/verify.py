"""Proof that a captured step is the step: the same batches eagerly, eagerly again and replayed, bit for bit."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from halfstep.engine.captured.uncapturable import user_location
from halfstep.engine.feed import Args
from halfstep.step import TrainStep
from halfstep.step.fingerprint import fingerprint
from halfstep.utils import rng
from halfstep.utils.device_values import is_capturing

Prints = list[dict[str, int]]
_BAKED = "the captured step is not the eager one: does it branch on values, count in Python, or replace its tensors?"


class VerifyError(AssertionError):
    """A replay, or an eager step done twice, gave other bits: the message names the step and the tensors."""


class VerifiedStep:
    """What is verified: how to call it, and everything that must come out the same."""

    def __init__(self, step: Any, state: Sequence[Any] = ()) -> None:
        self.step, self.state = step, tuple(state)
        lacking = [type(s).__name__ for s in state if not hasattr(s, "load_state_dict")]
        if not isinstance(step, TrainStep) and (not state or lacking):
            came = f"{', '.join(lacking)} without load_state_dict" if lacking else "none"
            raise ValueError(
                f"verify: expected state=(net, optimizer, …), all that the function changes, to start again from; "
                f"received {came}"
            )

    def save(self) -> list[Any]:
        if isinstance(self.step, TrainStep):
            return [self.step.state_dict()]
        return [copy.deepcopy(s.state_dict()) for s in self.state]

    def load(self, saved: list[Any]) -> None:
        owners = [self.step] if isinstance(self.step, TrainStep) else self.state
        for owner, each in zip(owners, saved, strict=True):
            owner.load_state_dict(copy.deepcopy(each))

    def prints(self) -> dict[str, int]:
        """A fingerprint of every tensor, on the host."""
        if isinstance(self.step, TrainStep):
            return {name: int(value) for name, value in self.step.fingerprints().items()}
        trees = {f"state[{i}]": s.state_dict() for i, s in enumerate(self.state)}
        leaves = tree_flatten_with_path(trees)[0]
        return {
            _name(path): int(fingerprint(leaf)) for path, leaf in leaves if isinstance(leaf, Tensor)
        }


def verify(
    subject: VerifiedStep,
    batches: list[Args],
    replayed: Callable[[list[Args], Callable[[], None]], None],
) -> None:
    """Raises VerifyError unless all three ways agree; afterwards state and random numbers are as they were before.

    `replayed(batches, look)` runs them sunk, one visit each, and calls `look` after every step.
    """
    saved, numbers = subject.save(), rng.save()

    def ways(run: Callable[[Callable[[], None]], None]) -> Prints:
        seen: Prints = []
        subject.load(saved)
        rng.load(numbers)
        run(lambda: seen.append(subject.prints()))
        return seen

    def eager(look: Callable[[], None]) -> None:
        for args in batches:
            subject.step(*args)
            look()

    try:
        first, again = ways(eager), ways(eager)
        _compare(
            first,
            again,
            lambda: _unrepeatable(subject, batches, lambda: _again(subject, saved, numbers)),
        )
        third = ways(lambda look: replayed(batches, look))
        _compare(first, third, lambda: _BAKED)
    finally:
        subject.load(saved)
        rng.load(numbers)


def _again(subject: VerifiedStep, saved: list[Any], numbers: dict[str, Any]) -> None:
    subject.load(saved)
    rng.load(numbers)


def _compare(a: Prints, b: Prints, why: Callable[[], str]) -> None:
    for i, (one, other) in enumerate(zip(a, b, strict=True), 1):
        names = [n for n in dict.fromkeys([*one, *other]) if one.get(n) != other.get(n)]
        if names:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise VerifyError(f"verify: step {i} differs in {', '.join(names[:4])}{more}: {why()}")


def _unrepeatable(subject: VerifiedStep, batches: list[Args], restart: Callable[[], None]) -> str:
    """The first operation that gave other bits from the same inputs."""
    traces = []
    for _ in range(2):
        restart()
        with _Trace() as trace:
            for args in batches:
                subject.step(*args)
        traces.append(trace.seen)
    pairs = zip(*traces, strict=False)
    other = next(((name, place) for (name, place, x), (_, _, y) in pairs if x != y), None)
    said = (
        f"{other[0]} ({other[1]})"
        if other
        else "an operation that repeats itself when it is watched"
    )
    return f"eager steps do not repeat themselves, first in {said}; deterministic=True makes them"


class _Trace(TorchDispatchMode):
    """Every operation with its place and a fingerprint of its outputs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, str, tuple[int, ...]]] = []
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self._inside and not is_capturing():
            self._inside = True
            try:
                tensors = [t for t in tree_leaves(out) if isinstance(t, Tensor) and not t.is_sparse]
                marks = tuple(int(fingerprint(t)) for t in tensors)
            finally:
                self._inside = False
            self.seen.append((str(func), user_location(), marks))
        return out


def _name(path: Any) -> str:
    return "".join(str(part) for part in path)


def warmup_steps(step: Any) -> int:
    """Steps before the first replay: some cycles of a TrainStep, the first ones maybe skipped; a function's first."""
    return (
        (3 + step.compiled.on) * step.options.accumulate + 4 if isinstance(step, TrainStep) else 3
    )


def cloned(args: Args, device: torch.device) -> Args:
    """A batch that nobody else writes to."""
    copied: Args = tree_map(lambda x: x.to(device, copy=True) if isinstance(x, Tensor) else x, args)
    return copied
