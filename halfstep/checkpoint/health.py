"""Whether a checkpoint of a run is worth going on from: its extra file health.json.

Its bytes may be whole and training lost all the same: the weights are NaN, nothing but skipped
updates came before it, or it was saved because a gradient was not finite. A checkpoint without the
file, of an older halfstep, is loaded and looked at.
"""

import json
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep.checkpoint.store import load, read_extra_file
from halfstep.checkpoint.tree import TreePath, format_path
from halfstep.errors import DAMAGED_ADVICE, checkpoint_error
from halfstep.utils.saved_state import SavedValue
from halfstep.utils.text import list_some, plural

HEALTH_FILE = "health.json"
MAX_NAMES_STORED = 100
MAX_NAMES_SHOWN = 3

# Keys of a saved step below which every tensor must be finite.
FINITE_PARTS = ("optimizer", "ema", "residue")


@dataclass(frozen=True)
class Health:
    """What is wrong with a checkpoint of a run. The fields are keys of health.json."""

    nonfinite: tuple[str, ...] = ()
    """Parameters, averages and optimizer state with inf or NaN. Buffers may have them, as masks."""
    updates: int | None = None
    """How often the weights had moved: checkpoints with the same number have the same weights."""
    skips_in_a_row: int = 0
    """Updates that were skipped one after the other right before the save."""
    stalled: bool = False
    """These are so many that weights before them are the better ones to go on from."""
    error: str | None = None
    """The non-finite value that ended the run here: the next step would raise it again."""

    @property
    def is_lost(self) -> bool:
        """Whether no step can come after it."""
        return bool(self.nonfinite) or self.error is not None

    @property
    def is_good(self) -> bool:
        """Whether a run should go on from it."""
        return not self.is_lost and not self.stalled

    def describe(self) -> str:
        """Why a run should not go on from it, in a few words."""
        if self.nonfinite:
            return f"inf or NaN in {list_some(list(self.nonfinite), MAX_NAMES_SHOWN)}"
        if self.error is not None:
            return f"the run ended there: {self.error}"
        if self.stalled:
            return f"{plural(self.skips_in_a_row, 'update')} in a row had been skipped"
        return "training failed with these very weights"

    def encode(self) -> bytes:
        """The bytes of health.json."""
        return json.dumps(asdict(self), indent=1).encode() + b"\n"


def find_nonfinite(tree: Any, parameter_names: Collection[str]) -> tuple[str, ...]:
    """The names of parameters, averages and optimizer state with inf or NaN, in a run's tree.

    Each device is waited for once.
    """
    if not isinstance(tree, dict):
        return ()
    names: list[str] = []
    flags: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for path, tensor in _finite_leaves(tree.get("step"), frozenset(parameter_names), ()):
        name = str(path[-1]) if path[-1] in parameter_names else format_path(path)
        flags.setdefault(tensor.device, []).append((name, _is_finite(tensor)))
    for named_flags in flags.values():
        finite = torch.stack([flag for _, flag in named_flags]).tolist()
        names += [name for (name, _), ok in zip(named_flags, finite, strict=True) if not ok]
    return tuple(names[:MAX_NAMES_STORED])


def read_health(folder: Path) -> Health:
    """The health of a checkpoint. CheckpointError where it cannot be read."""
    content = read_extra_file(folder, HEALTH_FILE)
    if content is not None:
        try:
            return decode_health(content)
        except (ValueError, RecursionError) as error:
            found = f"something else ({error})"
            raise checkpoint_error(
                folder / HEALTH_FILE, "what halfstep writes about a run", found, DAMAGED_ADVICE
            ) from error

    # Of an older halfstep, or no run at all.
    tree = load(folder, verify=False).tree
    return health_of_tree(tree)


def health_of_tree(tree: Any) -> Health:
    """The health of a saved run, from its tensors. What is no run is good: it may hold anything."""
    if not isinstance(tree, dict) or "halfstep_run" not in tree:
        return Health()
    config = tree.get("config")
    names = config.get("names") if isinstance(config, dict) else None
    # What is no name is for the resume to refuse, with its place in the tree.
    known = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return Health(nonfinite=find_nonfinite(tree, known))


def _as_dict(value: Any) -> dict[str, Any]:
    SavedValue(value, HEALTH_FILE).entries()  # raises unless it is one
    return dict(value)


def decode_health(content: bytes) -> Health:
    """The health in these bytes. A newer halfstep may have written other keys too."""
    values = {**asdict(Health()), **_as_dict(json.loads(content))}
    saved = SavedValue(values, HEALTH_FILE)
    updates = saved.field("updates")
    error = saved.field("error")
    return Health(
        nonfinite=tuple(saved.field("nonfinite").texts()),
        updates=None if updates.value is None else updates.whole_number(),
        skips_in_a_row=saved.field("skips_in_a_row").whole_number(),
        stalled=saved.field("stalled").flag(),
        error=None if error.value is None else error.text(),
    )


def _finite_leaves(
    value: Any, parameter_names: frozenset[str], path: TreePath
) -> Iterator[tuple[TreePath, Tensor]]:
    """The tensors of a saved step that must be finite, with their paths."""
    if isinstance(value, Tensor):
        is_number = value.is_floating_point() or value.is_complex()
        is_named = bool(path) and path[-1] in parameter_names
        if is_number and value.numel() and (is_named or any(part in FINITE_PARTS for part in path)):
            yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _finite_leaves(item, parameter_names, (*path, key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _finite_leaves(item, parameter_names, (*path, i))


def _is_finite(tensor: Tensor) -> Tensor:
    """A flag on the tensor's device. One pass, and no copy: a NaN is both smallest and largest."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if tensor.itemsize == 1:  # float8, which has no kernels
        tensor = tensor.float()
    smallest, largest = torch.aminmax(tensor)
    return smallest.isfinite() & largest.isfinite()
