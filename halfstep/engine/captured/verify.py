"""verify=K: proves on the first batches that a captured step gives the bits of the eager step.

The batches run eagerly, eagerly again and replayed; afterwards everything is as it was before. It
checks a fast path and is off by default (verify=0). What captured steps buy is in
docs/internals/speed.md, and `Model(capture=False)` switches them off.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

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
from halfstep.utils.python_state import PythonState
from halfstep.utils.text import list_some

# Of each tensor, by its name.
Fingerprints: TypeAlias = dict[str, int]

# Calls of a function of the user's before its first replay.
FUNCTION_WARMUP_STEPS = 3

# Of a TrainStep: cycles (one more where it is compiled), and steps that may be skipped at first.
WARMUP_CYCLES = 3
WARMUP_EXTRA_STEPS = 4

MAX_NAMES = 4  # tensors that a message names

_REPLAY_DIFFERS = (
    "the captured step is not the eager one: "
    "does it branch on values, count in Python, or replace its tensors?"
)


class VerifyError(AssertionError):
    """A replay, or an eager step done twice, gave other bits.

    The message names the step and the tensors.
    """


class VerifiedStep:
    """A step and everything it changes: saved, restored, and compared by fingerprints.

    A TrainStep knows what it changes. For a function, `state` names it: (net, optimizer, …).
    """

    def __init__(self, step: Any, state: Sequence[Any] = ()) -> None:
        self.step = step
        self.state = tuple(state)
        self._is_train_step = isinstance(step, TrainStep)
        if not self._is_train_step:
            self._check_state()

    def _check_state(self) -> None:
        unloadable = [
            type(owner).__name__ for owner in self.state if not hasattr(owner, "load_state_dict")
        ]
        if self.state and not unloadable:
            return
        received = f"{', '.join(unloadable)} without load_state_dict" if unloadable else "none"
        raise ValueError(
            "verify: expected state=(net, optimizer, …), all that the function changes, "
            f"to start again from; received {received}"
        )

    @property
    def modules(self) -> Sequence[Any]:
        """What may have modules among it, whose attributes forward may change."""
        if self._is_train_step:
            parts: Sequence[Any] = self.step.objective.parts
            return parts
        return (self.step, *self.state)

    def save(self) -> list[Any]:
        """A copy of the state, for `load`."""
        if self._is_train_step:
            return [self.step.state_dict()]
        return [copy.deepcopy(owner.state_dict()) for owner in self.state]

    def load(self, saved: list[Any]) -> None:
        """Restores what `save` returned. It may be loaded several times."""
        owners = (self.step,) if self._is_train_step else self.state
        for owner, state in zip(owners, saved, strict=True):
            owner.load_state_dict(copy.deepcopy(state))

    def fingerprints(self) -> Fingerprints:
        """A fingerprint of every tensor, on the host."""
        if self._is_train_step:
            return {name: int(value) for name, value in self.step.fingerprints().items()}
        trees = {f"state[{i}]": owner.state_dict() for i, owner in enumerate(self.state)}
        leaves, _ = tree_flatten_with_path(trees)
        return {
            "".join(str(part) for part in path): int(fingerprint(leaf))
            for path, leaf in leaves
            if isinstance(leaf, Tensor)
        }


def verify(
    subject: VerifiedStep,
    batches: list[Args],
    run_captured: Callable[[list[Args], Callable[[], None]], None],
) -> None:
    """Raises VerifyError unless two eager runs and a captured one agree after every step.

    `run_captured(batches, after_step)` runs the batches captured, one visit each, and calls
    `after_step` after every step. State and random numbers are afterwards as they were before.
    """
    saved = subject.save()
    random_states = rng.save()
    python_state = PythonState(*subject.modules)

    def restore() -> None:
        python_state.restore()
        subject.load(saved)
        rng.load(random_states)

    def run_eagerly(batches: list[Args], after_step: Callable[[], None]) -> None:
        for args in batches:
            subject.step(*args)
            after_step()

    def fingerprints_of(
        run: Callable[[list[Args], Callable[[], None]], None],
    ) -> list[Fingerprints]:
        steps: list[Fingerprints] = []
        restore()
        run(batches, lambda: steps.append(subject.fingerprints()))
        return steps

    try:
        # Eager steps must repeat themselves, or no comparison means anything.
        eager = fingerprints_of(run_eagerly)
        eager_again = fingerprints_of(run_eagerly)
        difference = _first_difference(eager, eager_again)
        if difference:
            reason = _explain_unrepeatable(subject, batches, restore)
            raise VerifyError(f"verify: {difference}: {reason}")

        captured = fingerprints_of(run_captured)
        difference = _first_difference(eager, captured)
        if difference:
            raise VerifyError(f"verify: {difference}: {_REPLAY_DIFFERS}")
    finally:
        restore()


def _first_difference(steps: list[Fingerprints], other_steps: list[Fingerprints]) -> str:
    """The first step that differs, and its tensors, in words; "" if there is none."""
    for number, (prints, other) in enumerate(zip(steps, other_steps, strict=True), 1):
        all_names = dict.fromkeys([*prints, *other])
        names = [name for name in all_names if prints.get(name) != other.get(name)]
        if names:
            return f"step {number} differs in {list_some(names, MAX_NAMES)}"
    return ""


def _explain_unrepeatable(
    subject: VerifiedStep, batches: list[Args], restore: Callable[[], None]
) -> str:
    """Names the first operation that gives other bits from the same inputs."""
    runs: list[list[_Operation]] = []
    for _ in range(2):
        restore()
        with _OperationTrace() as trace:
            for args in batches:
                subject.step(*args)
        runs.append(trace.operations)

    operation = "an operation that repeats itself when it is watched"
    for first, second in zip(*runs, strict=False):
        if first.fingerprints != second.fingerprints:
            operation = f"{first.name} ({first.location})"
            break
    return (
        f"eager steps do not repeat themselves, first in {operation}; deterministic=True makes them"
    )


class _Operation(NamedTuple):
    name: str
    location: str  # the user's line
    fingerprints: tuple[int, ...]  # of its outputs


class _OperationTrace(TorchDispatchMode):
    """Lists every operation of torch that runs inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[_Operation] = []
        self._is_fingerprinting = False  # those operations are not listed

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if self._is_fingerprinting or is_capturing():
            return outputs
        self._is_fingerprinting = True
        try:
            tensors = [t for t in tree_leaves(outputs) if isinstance(t, Tensor) and not t.is_sparse]
            fingerprints = tuple(int(fingerprint(t)) for t in tensors)
        finally:
            self._is_fingerprinting = False
        self.operations.append(_Operation(str(func), user_location(), fingerprints))
        return outputs


def warmup_steps(step: Any) -> int:
    """How many steps may run before the first replay."""
    if not isinstance(step, TrainStep):
        return FUNCTION_WARMUP_STEPS
    cycles = WARMUP_CYCLES + step.compiled.on
    return cycles * step.options.accumulate + WARMUP_EXTRA_STEPS


def clone_batch(args: Args, device: torch.device) -> Args:
    """A copy of a batch on the device, which nobody else writes to."""
    copied: Args = tree_map(
        lambda leaf: leaf.to(device, copy=True) if isinstance(leaf, Tensor) else leaf, args
    )
    return copied
