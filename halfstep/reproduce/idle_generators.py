"""Random generators that no run drew from.

Their states decide nothing, and two processes have other ones unless they are seeded.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from halfstep import checkpoint
from halfstep.reproduce.recorded import differing_leaves

RNG_PREFIX = "rng."  # of the leaves of a checkpoint

# Where a generator that nobody drew from stands among the 624 words of its Mersenne twister. One
# that was drawn from comes to this position with a chance of 1 in 312. Numpy's stands at 624 after
# np.random.seed, but also after one draw, so only its own start counts.
UNUSED_PYTHON = 624
UNUSED_NUMPY = 623

GENERATORS = {"python": "Python's", "numpy": "numpy's", "torch": "torch's", "cuda": "torch's, CUDA"}


def idle_generators(*runs: Iterable[Path]) -> set[str]:
    """The generators that nothing drew from in any of the runs, by their checkpoints.

    Such a generator has one state in all checkpoints of a run; where there is one checkpoint only,
    that of a generator that was not used since it began.
    """
    idle = set(GENERATORS)
    for paths in runs:
        states = _generator_states(paths)
        idle &= {name for name in GENERATORS if _is_idle(name, [s.get(name) for s in states])}
    return idle


def generator_of(leaf: str) -> str:
    """The generator whose state this leaf of a checkpoint is a part of; "" for any other leaf."""
    if not leaf.startswith(RNG_PREFIX):
        return ""
    return leaf.removeprefix(RNG_PREFIX).partition(".")[0]


def describe_generators(names: Iterable[str]) -> str:
    """As a note of a difference says it."""
    listed = "; ".join(label for name, label in GENERATORS.items() if name in names)
    return f"random generators that nothing drew from are in other states ({listed})"


def _generator_states(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """The random states in each of these checkpoints that is whole."""
    states = []
    for path in paths:
        try:
            tree = checkpoint.load(path).tree
        except checkpoint.CheckpointError:
            continue
        saved = tree.get("rng") if isinstance(tree, dict) else None
        if isinstance(saved, dict):
            states.append(saved)
    return states


def _is_idle(name: str, states: Sequence[Any]) -> bool:
    if not states or any(state is None for state in states):
        return False
    first, *others = states
    if not others:
        return _is_unused(name, first)
    return not any(differing_leaves("", first, other) for other in others)


def _is_unused(name: str, state: Any) -> bool:
    """Whether nothing was drawn since the generator began. Python's and numpy's states say it."""
    if name == "python":
        _, words, _ = state
        return int(words[-1]) == UNUSED_PYTHON
    if name == "numpy":
        _, _, position, _, _ = state
        return bool(position == UNUSED_NUMPY)
    return False
