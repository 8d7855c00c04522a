"""Where two runs part: the first step that differs, by logs, by checkpoints and by replay."""

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from halfstep import checkpoint
from halfstep.engine import Callback, Row, Run
from halfstep.errors import Notice
from halfstep.experiment.builders import Builder, call_builder
from halfstep.reproduce.idle_generators import describe_generators, generator_of, idle_generators
from halfstep.reproduce.recorded import (
    LOG,
    RecordedSteps,
    differing_fields,
    differing_leaves,
    read_log,
)
from halfstep.reproduce.replay_step import last_checkpoint_until, state_fingerprints, train_until
from halfstep.utils.text import list_some

MAX_NAMES_SHOWN = 8  # fields or tensors in the text of a difference

# Parts of a checkpoint that decide no step: what was logged where, and the number of epochs.
IRRELEVANT_STATE = re.compile(r"(writers|loop\.epochs)\b")

BY_LOGS = "by the logs"
BY_CHECKPOINTS = "by the checkpoints"
BY_REPLAY = "by replay"


@dataclass(frozen=True)
class Difference:
    """The first difference of two runs, by one way of comparing them."""

    step: int | None
    """The first step that is known to differ; None: no difference was found."""
    by: str
    """The way of comparing: by the logs, by the checkpoints or by replay."""
    names: tuple[str, ...] = ()
    """What differs there: fields of the record, or tensors of the state."""
    equal_until: int = 0
    """The last step known to be equal."""
    note: str = ""
    """What is no difference: which run is longer, and random generators in other states that
    nothing drew from. By replay: which run has recorded something else than its replay gives."""

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        if self.step is None:
            return f"no difference up to step {self.equal_until} ({self.by}){note}"
        return (
            f"step {self.step} differs ({self.by}): {list_some(self.names, MAX_NAMES_SHOWN)}; "
            f"equal up to step {self.equal_until}{note}"
        )


def diff(
    a: str | Path, b: str | Path, *, build: tuple[Builder, Builder] | None = None
) -> list[Difference]:
    """Compares two runs by their logs, their checkpoints and, with builders for both, by replay."""
    folder_a = Path(a)
    folder_b = Path(b)
    for folder in (folder_a, folder_b):
        if not folder.is_dir():
            raise FileNotFoundError(
                f"diff: expected the folder of a run, found nothing at {folder}"
            )

    by_logs = _compare_logs(folder_a, folder_b)
    by_checkpoints = _compare_checkpoints(folder_a, folder_b)
    differences = [d for d in (by_logs, by_checkpoints) if d is not None]
    if not differences:
        raise ValueError(
            f"diff: {a} and {b} share neither a {LOG} "
            "nor a checkpoint of the same step that is whole"
        )
    if build is not None:
        differences.append(_compare_by_replay((folder_a, folder_b), build, differences))
    return differences


def _note_longer_run(
    folders: tuple[Path, Path], steps_a: Iterable[int], steps_b: Iterable[int]
) -> str:
    """Which run is recorded further than the other; an empty text if neither is."""
    last_steps = (max(steps_a, default=0), max(steps_b, default=0))
    shorter, longer = sorted(zip(last_steps, folders, strict=True))
    shorter_last, shorter_folder = shorter
    longer_last, longer_folder = longer
    if shorter_last == longer_last:
        return ""
    return (
        f"{longer_folder} is recorded up to step {longer_last}, "
        f"{shorter_folder} up to step {shorter_last}"
    )


# By the logs


def _compare_logs(a: Path, b: Path) -> Difference | None:
    """By the rows of both logs without their times. Fingerprints in them see every bit."""
    if not (a / LOG).is_file() or not (b / LOG).is_file():
        return None
    rows_a = read_log(a / LOG)
    rows_b = read_log(b / LOG)
    steps_a = [step for step, kind in rows_a if kind == "step"]
    steps_b = [step for step, kind in rows_b if kind == "step"]
    note = _note_longer_run((a, b), steps_a, steps_b)

    # A step may have several rows, of different kinds.
    shared_keys = sorted(rows_a.keys() & rows_b.keys())
    changed_fields: dict[int, list[str]] = {}
    for key in shared_keys:
        step, _ = key
        names = changed_fields.setdefault(step, [])
        names += differing_fields(rows_a[key], rows_b[key])

    equal_until = 0
    for step, names in changed_fields.items():
        if names:
            return Difference(step, BY_LOGS, tuple(names), equal_until, note)
        equal_until = step
    return Difference(None, BY_LOGS, (), equal_until, note)


# By the checkpoints


def _compare_checkpoints(a: Path, b: Path) -> Difference | None:
    """By every tensor and number of checkpoints of the same step; None if there are no such."""
    paths_a = {checkpoint.step_of(path): path for path in checkpoint.listing(a)}
    paths_b = {checkpoint.step_of(path): path for path in checkpoint.listing(b)}
    note = _note_longer_run((a, b), paths_a, paths_b)

    shared_steps = sorted(paths_a.keys() & paths_b.keys())
    idle: set[str] | None = None  # generators; all checkpoints are read for them
    ignored: set[str] = set()
    equal_until: int | None = None
    for step in shared_steps:
        try:
            tree_a = checkpoint.load(paths_a[step]).tree
            tree_b = checkpoint.load(paths_b[step]).tree
        except checkpoint.CheckpointError as error:
            warnings.warn(f"diff: step {step} is left out: {error}", Notice, stacklevel=3)
            continue
        names = [
            name
            for name in differing_leaves("", tree_a, tree_b)
            if not IRRELEVANT_STATE.match(name)
        ]
        # What nothing drew from decides no step either.
        if idle is None and any(generator_of(name) for name in names):
            idle = idle_generators(paths_a.values(), paths_b.values())
        if idle:
            ignored |= {generator_of(name) for name in names} & idle
            names = [name for name in names if generator_of(name) not in idle]
        if names:
            # Random states come last: they follow from what the runs did.
            names.sort(key=lambda name: name.startswith("rng"))
            notes = _join_notes(note, ignored)
            return Difference(step, BY_CHECKPOINTS, tuple(names), equal_until or 0, notes)
        equal_until = step
    if equal_until is None:
        return None
    return Difference(None, BY_CHECKPOINTS, (), equal_until, _join_notes(note, ignored))


def _join_notes(note: str, ignored: set[str]) -> str:
    """Which run is longer, and which generators were left out of the comparison."""
    parts = [note] if note else []
    if ignored:
        parts.append(describe_generators(ignored))
    return "; ".join(parts)


# By replay


def _compare_by_replay(
    folders: tuple[Path, Path], build: tuple[Builder, Builder], differences: list[Difference]
) -> Difference:
    """Both runs again from their last equal checkpoint, with fingerprints after every step.

    Up to the first step that the other ways know to differ, else up to the last equal one. Where a
    run has recorded another step than its replay gives, the note says so: whatever made the runs
    differ is then not in what was replayed.
    """
    start = max((d.equal_until for d in differences if d.by == BY_CHECKPOINTS), default=0)
    differing_steps = [d.step for d in differences if d.step is not None]
    if differing_steps:
        last_step = min(differing_steps)
    else:
        last_step = max(d.equal_until for d in differences)

    if start >= last_step:
        note = f"nothing was replayed: the checkpoints are equal up to the last step, {start}"
        return Difference(None, BY_REPLAY, (), start, note)

    replay_a = _replay_run(folders[0], build[0], start, last_step)
    replay_b = _replay_run(folders[1], build[1], start, last_step)
    note = _note_unreproduced(replay_a, replay_b, runs_differ=bool(differing_steps))
    steps_a = replay_a.fingerprints
    steps_b = replay_b.fingerprints
    equal_until = start
    for step in sorted(steps_a.keys() & steps_b.keys()):
        prints_a = steps_a[step]
        prints_b = steps_b[step]
        changed = [name for name in prints_a if prints_a[name] != prints_b.get(name)]
        only_in_b = [name for name in prints_b if name not in prints_a]
        if changed or only_in_b:
            return Difference(step, BY_REPLAY, (*changed, *only_in_b), equal_until, note)
        equal_until = step
    return Difference(None, BY_REPLAY, (), equal_until, note)


def _note_unreproduced(*replays: "_ReplayRecorder", runs_differ: bool) -> str:
    """Which runs have recorded something else than their replay gives; empty if none has."""
    parts = []
    for replayed in replays:
        if replayed.unreproduced_step is not None:
            names = list_some(replayed.unreproduced_names, MAX_NAMES_SHOWN)
            parts.append(
                f"replay does not give what {replayed.recorded.folder} has recorded of step "
                f"{replayed.unreproduced_step} ({names})"
            )
    if not parts:
        return ""
    consequence = "what was replayed is not what the run did"
    if runs_differ:
        consequence = "the runs differ for another reason than what was replayed"
    return (
        f"{'; '.join(parts)}, so {consequence}: other code, data, versions or settings, a device "
        "that does not repeat itself, or a changed checkpoint"
    )


def _replay_run(folder: Path, build: Builder, start: int, last_step: int) -> "_ReplayRecorder":
    """The steps from the checkpoint at `start` on, again."""
    recorder = _ReplayRecorder(RecordedSteps(folder), last_step)
    parts = call_builder(build)
    start_path = last_checkpoint_until(folder, start) if start else None
    train_until(parts, folder, start_path, recorder, last_step)
    return recorder


class _ReplayRecorder(Callback):
    """Records the fingerprints after every step up to the last, then stops the run.

    Each step is compared with what the run has recorded of it, up to the first that differs.
    """

    def __init__(self, recorded: RecordedSteps, last_step: int) -> None:
        self.recorded = recorded
        self.last_step = last_step
        self.fingerprints: dict[int, dict[str, int]] = {}
        self.unreproduced_step: int | None = None
        self.unreproduced_names: list[str] = []

    def next_stop(self, run: Run) -> int | None:
        return run.position + 1

    def step(self, run: Run, row: Row) -> None:
        if row.global_step <= self.last_step:
            self._note_names(row.global_step, self.recorded.differing_from_row(row))

    def visit(self, run: Run) -> None:
        self.fingerprints[run.position] = state_fingerprints(run.model)
        self._note_names(run.position, self.recorded.differing_from_state(run))
        if run.position >= self.last_step:
            run.stop("compared")

    def _note_names(self, step: int, names: list[str]) -> None:
        if names and self.unreproduced_step in (None, step):
            self.unreproduced_step = step
            self.unreproduced_names += names
