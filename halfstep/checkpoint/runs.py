"""The checkpoints of a run: folders in one root folder, named by their step.

A checkpoint that replaces another one of its step is first complete under a name of its own,
`step-000000123.new`, which readers know too; then the old one is removed, then it takes the name.
So there is a whole one at every moment, and a writer that was killed between is made up for by the
next (`finish_replacements`).
"""

import os
import re
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from halfstep.checkpoint.disk import remove_folder
from halfstep.checkpoint.health import Health, read_health
from halfstep.checkpoint.manifest import MANIFEST_FILE
from halfstep.checkpoint.store import save, verify
from halfstep.checkpoint.verified import RECENT_CHANGE_S, VerifiedCheckpoints
from halfstep.errors import CheckpointError, Notice, checkpoint_error
from halfstep.utils.atomic_files import sync_folder
from halfstep.utils.keywords import user_stacklevel
from halfstep.utils.text import plural

Item = TypeVar("Item")

REPLACEMENT_SUFFIX = ".new"
CHECKPOINT_NAME = re.compile(r"step-([0-9]{9,})(?:\.new)?")


def name_of(step: int) -> str:
    """The folder name of a step's checkpoint. Names of steps below 10^9 sort as the steps do."""
    if type(step) is not int or step < 0:
        raise ValueError(
            f"expected a step of 0 or more, got {step!r}. Count steps from the start of the run."
        )
    return f"step-{step:09d}"


def step_of(path: str | Path) -> int:
    """The step in a checkpoint's folder name. ValueError for any other name."""
    name = Path(path).name
    if not _is_checkpoint_name(name):
        raise ValueError(
            f"expected a name such as {name_of(123)}, got {name!r}. Use name_of(step) to make one."
        )
    return int(name.removeprefix("step-").removesuffix(REPLACEMENT_SUFFIX))


def listing(root: str | Path) -> list[Path]:
    """The folders in `root` that have a checkpoint's name, by step, whether complete or not.

    Empty if there is no such root. A step is there twice while its checkpoint is being replaced,
    the new one last.
    """
    root = Path(root)
    try:
        paths = [path for path in root.iterdir() if _is_checkpoint_name(path.name)]
        folders = [path for path in paths if path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        reason = error.strerror or str(error)
        advice = "Name the folder of the run."
        raise checkpoint_error(root, "a folder of checkpoints", reason, advice) from error
    return sorted(folders, key=lambda path: (step_of(path), path.name))


def latest(root: str | Path) -> Path | None:
    """The newest checkpoint that is whole, checksums included, and good; None if there is none.

    Good: the weights are finite, and training had not stopped to move them. Newer ones are passed
    over, and one Notice names them.
    """
    # If checkpoints were pruned while we looked, or names are changing, newer ones exist by now.
    while True:
        search = _search_newest(root)
        if search.newest is not None:
            break
        if not search.some_vanished and not _changed_recently(root):
            break

    if search.broken or search.bad:
        kinds = []
        if search.broken:
            kinds.append(f"{plural(len(search.broken), 'checkpoint')} broken")
        if search.bad:
            kinds.append(f"{plural(len(search.bad), 'checkpoint')} of training that had failed")
        outcome = "no good one is left" if search.bad else "no whole one is left"
        if search.newest is not None:
            outcome = f"{search.newest} is used instead"
        reasons = "\n  ".join([*search.broken, *search.bad])
        warnings.warn(
            f"{' and '.join(kinds)}, {outcome}:\n  {reasons}", Notice, stacklevel=user_stacklevel()
        )
    return search.newest


def choose(source: str | Path) -> Path | None:
    """The checkpoint that a path means: itself, or the newest good one in a folder of them.

    One that is named is taken as it is; a Notice says what is wrong with it.
    """
    path = Path(source)
    if not (path / MANIFEST_FILE).is_file():
        return latest(path)
    with suppress(CheckpointError):  # whoever loads it will say that it is damaged
        health = read_health(path)
        if not health.is_good:
            warnings.warn(
                f"{path}: {health.describe()}. It is used all the same, because it was named",
                Notice,
                stacklevel=user_stacklevel(),
            )
    return path


def prune(
    root: str | Path,
    keep: int,
    protect: Collection[Path] = (),
    *,
    verified: VerifiedCheckpoints | None = None,
    successors: Collection[Path] | None = None,
    guard: Callable[[], object] | None = None,
) -> list[Path]:
    """Removes all checkpoints but the newest `keep` good ones, the oldest first.

    Returns the removed. Those in `protect` stay. Nothing is removed unless the ones that stay are
    whole, checksums included; damaged ones are not counted. Neither are those that are not good
    (see `latest`) and those inside a streak of skipped updates, which may become too long: of them
    the newest stays beside the `keep`, or as many as good ones are missing. `verified`
    remembers between calls what is known about each; the newest good one is read in any case. Only
    `successors` count, where they are given: those that are in a store too. `guard` is called
    before each removal, and may raise.
    """
    if type(keep) is not int or keep < 1:
        raise ValueError(
            f"expected keep of 1 or more, got {keep!r}. The newest checkpoint is never removed."
        )
    paths = listing(root)
    protected = {os.path.realpath(path) for path in protect}
    if all(os.path.realpath(path) in protected for path in paths[:-keep]):
        return []  # nothing is too many, so nothing need be read
    if successors is not None and len(successors) <= keep:
        return []
    known = verified or VerifiedCheckpoints()

    def examine(path: Path, is_newest: bool) -> Health | None:
        if successors is None or path in successors:
            return known.examine(path, read_again=is_newest)
        try:  # it does not count, so its tensors need not be read
            return read_health(path)
        except CheckpointError:
            return None

    superfluous = choose_superfluous(paths, keep, examine, successors)
    removed = [path for path in superfluous if os.path.realpath(path) not in protected]
    for path in removed:
        if guard is not None:
            guard()
        remove_folder(path)
    return removed


def choose_superfluous(
    checkpoints: Sequence[Item],
    keep: int,
    examine: Callable[[Item, bool], Health | None],
    successors: Collection[Item] | None = None,
) -> list[Item]:
    """Which of the checkpoints are too many, the oldest first; all come in order of their steps.

    `examine` says the health of one, None where it is damaged. It is asked from the newest on, with
    True until one counts, and not about those that are too many. Only `successors` count, where
    they are given: others may be too many, and take no place.
    """
    # From the newest back to the one that completes the number to keep; older ones are too many.
    too_many: list[Item] = []
    judge = _Judge()
    good_count = 0
    uncounted: list[tuple[Item, Health]] = []
    for index in reversed(range(len(checkpoints))):
        if successors is not None and checkpoints[index] not in successors:
            health = examine(checkpoints[index], False)
            if health is not None:
                judge.is_good(health)  # it may say that older ones are not
            continue
        health = examine(checkpoints[index], good_count == 0)
        if health is None:
            continue
        if not judge.is_good(health) or health.skips_in_a_row > 0:
            uncounted.append((checkpoints[index], health))
            continue
        good_count += 1
        if good_count == keep:
            too_many = list(checkpoints[:index])
            break
    return [*too_many, *_superfluous(uncounted, keep - good_count)]


def _superfluous(uncounted: list[tuple[Item, Health]], missing: int) -> list[Item]:
    """Which of the checkpoints that do not count go, the oldest first; they come newest first.

    As many stay as good ones are missing, but one at least, and the newest that has finite weights.
    """
    stay = [item for item, _ in uncounted[: max(missing, 1)]]
    stay += [item for item, health in uncounted if not health.is_lost][:1]
    return [item for item, _ in reversed(uncounted) if item not in stay]


def replace(
    path: Path,
    tree: object,
    *,
    extra_files: Mapping[str, bytes] | None = None,
    guard: Callable[[], object] | None = None,
) -> None:
    """Saves the tree in place of the checkpoint at `path`.

    At every moment one of the two is there whole, under a name that `listing` and `latest` know.
    The old one is removed when the new one was verified, and `guard` raises nothing.
    """
    finish_replacements(path.parent)
    new = path.with_name(f"{path.name}{REPLACEMENT_SUFFIX}")
    save(new, tree, extra_files=extra_files)
    try:
        verify(new)
    except CheckpointError:
        remove_folder(new)
        raise
    if guard is not None:
        guard()
    _take_place(new, path)


def finish_replacements(root: Path) -> None:
    """Completes what a writer that was killed in `replace` left. The caller writes there alone."""
    for new in listing(root):
        if not new.name.endswith(REPLACEMENT_SUFFIX):
            continue
        path = new.with_name(new.name.removesuffix(REPLACEMENT_SUFFIX))
        try:
            verify(new)
        except CheckpointError:
            # The old one may be whole still.
            if os.path.lexists(path):
                remove_folder(new)
                continue
        _take_place(new, path)


def _take_place(new: Path, path: Path) -> None:
    remove_folder(path)
    try:
        os.rename(new, path)
        sync_folder(path.parent)
    except OSError as error:
        reason = error.strerror or str(error)
        advice = f"Rename {new} to {path.name} by hand; until then it is read from where it is."
        raise checkpoint_error(path, "a free name", reason, advice) from error


def good_checkpoints(root: Path, verified: VerifiedCheckpoints) -> list[Path]:
    """The checkpoints in a folder that are whole and good, the oldest first."""
    judge = _Judge()
    good = []
    for path in reversed(listing(root)):
        health = verified.examine(path)
        if health is not None and judge.is_good(health):
            good.append(path)
    return good[::-1]


class _Judge:
    """Says which checkpoints are good, when it is asked about them from the newest to the oldest.

    When a run had failed with certain weights, older checkpoints of the same weights are not good
    either: those after the first skips of a long streak, and the one right before it.
    """

    def __init__(self) -> None:
        self._failed_updates: set[int] = set()

    def is_good(self, health: Health) -> bool:
        if not health.is_good and health.updates is not None:
            self._failed_updates.add(health.updates)
        return health.is_good and health.updates not in self._failed_updates


@dataclass
class _Search:
    """The newest good checkpoint, what is wrong with newer ones, and whether some vanished."""

    newest: Path | None = None
    broken: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    some_vanished: bool = False


def _search_newest(root: str | Path) -> _Search:
    search = _Search()
    judge = _Judge()
    stalled: list[tuple[Path, str]] = []
    for path in reversed(listing(root)):
        try:
            verify(path)
            health = read_health(path)
        except CheckpointError as error:
            if os.path.lexists(path):
                search.broken.append(str(error))
            else:
                search.some_vanished = True
            continue
        if judge.is_good(health):
            search.newest = path
            break
        reason = f"{path}: {health.describe()}"
        search.bad.append(reason)
        if not health.is_lost:
            stalled.append((path, reason))

    # Nothing but skipped updates from the start: the scale may still be too large.
    if search.newest is None and stalled:
        search.newest, reason = stalled[0]
        search.bad.remove(reason)
    return search


def _changed_recently(root: str | Path) -> bool:
    """Whether names in the folder have just changed.

    A listing made meanwhile may have seen neither the old name nor the new one.
    """
    try:
        return abs(time.time() - os.stat(root).st_mtime) < RECENT_CHANGE_S
    except OSError:
        return False


def _is_checkpoint_name(name: str) -> bool:
    match = CHECKPOINT_NAME.fullmatch(name)
    return match is not None and name_of(int(match[1])) == name.removesuffix(REPLACEMENT_SUFFIX)
