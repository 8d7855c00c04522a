"""Logs of the run in a file: one line per step and per evaluation.

After a resume they are those of a run that was never interrupted: a checkpoint knows how long the
file was, and the resumed run cuts it back to that length.
"""

import csv
import errno
import io
import json
import math
import os
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from halfstep.engine import Callback, Row, Run
from halfstep.engine.run import ROW_COLUMNS, score_name
from halfstep.errors import Notice
from halfstep.storage.url import hide_credentials, is_store_url
from halfstep.utils.atomic_files import sync_folder, write_chunks
from halfstep.utils.checks import whole_number
from halfstep.utils.keywords import suggest_keywords, user_stacklevel
from halfstep.utils.saved_state import SavedValue

LOG_FIELDS = ROW_COLUMNS
POSITION_FIELDS = ("epoch", "step", "global_step")

row_values = attrgetter(*LOG_FIELDS)

# The words of other libraries.
FOREIGN_OPTIONS = {
    **dict.fromkeys(("filename", "filepath", "file", "folder", "save_dir", "log_dir"), "path"),
    **dict.fromkeys(("log_every_n_steps", "flush_logs_every_n_steps"), "every"),
    **dict.fromkeys(("update_freq", "every_steps"), "every"),
}
MISPLACED_OPTIONS = {"append": "a run that is resumed goes on in its file; leave it out"}

# Files that cannot be synced at all, such as those of some network and FUSE file systems.
NO_SYNC_ERRORS = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)

# A file in a folder that may not be written, or that is a mount of its own, can be cut but not
# replaced by another one.
NO_REPLACEMENT_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EBUSY, *NO_SYNC_ERRORS)

# One encoder for all lines: json.dumps would build one for every line.
JSON_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


class _Log(Callback):
    """Selects the steps and evaluations that become lines; `_add_line` formats one."""

    writes = True

    @suggest_keywords(None, names=FOREIGN_OPTIONS, advice=MISPLACED_OPTIONS)
    def __init__(
        self, path: str | Path, *, every: int = 1, times: bool = False, overwrite: bool = False
    ) -> None:
        owner = type(self).__name__
        self.every = whole_number(f"{owner}: every", every, minimum=1)
        self.times = times
        self.file = LogFile(owner, path, overwrite=overwrite)
        self.copy_from: Path | None = None
        """The log of a run that goes on in this file, where this file is new."""

    def step(self, run: Run, row: Row) -> None:
        if row.global_step % self.every:
            return
        values = {"kind": "step", **dict(zip(LOG_FIELDS, row_values(row), strict=True))}
        if row.parts or row.counts:
            values.update(row.extras)
        if self.times:
            values["time"] = time.time()
        self._add_line(values)

    def visit(self, run: Run) -> None:
        if run.scores is not None:
            values: dict[str, Any] = {"kind": "evaluation"}
            for name in POSITION_FIELDS:
                values[name] = getattr(run, name)
            for name, score in run.scores.items():
                values[f"valid_{name}"] = score
            if self.times:
                values["time"] = time.time()
            self._add_line(values)
        self.file.flush()

    def _add_line(self, values: dict[str, Any]) -> None:
        raise NotImplementedError

    def end(self, run: Run) -> None:
        is_refused = run.error is not None and not run.has_begun
        self.file.close(refused=is_refused)

    def state_dict(self) -> dict[str, Any]:
        return self.file.state_dict()

    def check_state(self, run: Run, saved: SavedValue) -> None:
        if not self._starts_new_file(run):
            self.file.check_state(saved)

    def _starts_new_file(self, run: Run) -> bool:
        """Whether the run goes on from a checkpoint by its path, and this file is not there yet.

        With resume="auto" the run is the one that wrote the file, which is missed then.
        """
        return run.resume not in (None, "auto") and not self.file.path.exists()

    def _open(self, run: Run, head: str = "") -> None:
        """Opens the file, which a run that goes on in another folder begins anew."""
        starts_new_file = self.file.continues and self._starts_new_file(run)
        if starts_new_file and not self.file.begin_as_copy(self.copy_from):
            warnings.warn(
                f"{self.file.owner}: {self.file.path} is a new file, which begins after step "
                f"{run.position}: the lines before are in the log of the run that {run.resume} "
                "was saved in. Copy that file here before the fit, and it goes on in it.",
                Notice,
                stacklevel=user_stacklevel(),
            )
            self.file.start_anew()
        self.file.open(head, replace=_resume_found_nothing(run), is_resumed=run.resumed is not None)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.file.load_state_dict(state)


class CSVLog(_Log):
    """A table with a line for every `every`-th step and for every evaluation.

    The column `kind` tells them apart. The columns are fixed at the start, or with the first step
    where the loss may return parts: `lr`, or `lr_0`, `lr_1`, … with several parameter groups; parts
    of the loss and metrics on training data by their names; scores are in `valid_…`. Numbers are
    written so that reading gives the same bits; inf and NaN as `inf`, `nan`; bools as 0 and 1.
    `times=True` adds the wall clock, which no resume repeats. A resumed run cuts the file back to
    its checkpoint; a new run refuses an existing file, unless `overwrite=True`.
    """

    columns: Sequence[str] = ()
    _parts: tuple[str, ...] = ()  # columns of the parts of the loss
    _awaits_parts = False  # the first step shows what parts there are

    def begin(self, run: Run) -> None:
        if run.resumed is None:
            self._parts = ()
        self.columns = self._run_columns(run, self._parts)
        self._left_out: set[str] = set()
        self._has_parts = run.may_have_parts
        self._awaits_parts = run.may_have_parts and not self.file.continues
        head = "" if self._awaits_parts else _csv_line(self.columns)
        if self.file.continues and self.file.first_line():
            self._take_columns_of_file(run)
        self._open(run, head)

    def step(self, run: Run, row: Row) -> None:
        if self._awaits_parts:
            self._begin_table(run, tuple(row.parts))
        super().step(run, row)

    def end(self, run: Run) -> None:
        if self._awaits_parts:
            self._begin_table(run, ())
        super().end(run)

    def _begin_table(self, run: Run, parts: tuple[str, ...]) -> None:
        """The head of a file, when it is known what the loss returns beside itself."""
        self._awaits_parts = False
        self._parts = parts
        self.columns = self._run_columns(run, parts)
        self.file.add(_csv_line(self.columns))

    def state_dict(self) -> dict[str, Any]:
        parts = {"parts": list(self._parts)} if self._parts else {}
        return {**super().state_dict(), **parts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        file_state = dict(state)
        self._parts = tuple(file_state.pop("parts", ()))
        super().load_state_dict(file_state)

    def check_state(self, run: Run, saved: SavedValue) -> None:
        super().check_state(run, saved)
        parts = saved.optional_field("parts")
        part_names = () if parts is None else tuple(parts.texts())
        if saved.value and saved.value["offset"] and self.file.first_line():
            self._compare_columns(run, self._run_columns(run, part_names), part_names)

    def _take_columns_of_file(self, run: Run) -> None:
        """Goes on in the columns that the file has. A field of another version is left out."""
        in_file, left_out, unknown = self._compare_columns(run, self.columns, self._parts)
        differences = []
        if left_out:
            differences.append(f"has no column for {', '.join(left_out)}, which is left out")
        if unknown:
            differences.append(f"has {', '.join(unknown)}, which stays empty from here on")
        if differences:
            warnings.warn(
                f"CSVLog: {self.file.path}, written by another version of halfstep, "
                f"{' and '.join(differences)}",
                Notice,
                stacklevel=user_stacklevel(),
            )
        self.columns = in_file
        self._left_out = set(left_out)

    def _compare_columns(
        self, run: Run, columns: Sequence[str], parts: Sequence[str]
    ) -> tuple[list[str], list[str], list[str]]:
        """The columns of the file, those that it lacks, and those that only it has.

        Columns of another version of halfstep may differ; those that this run decides may not.
        """
        in_file = next(csv.reader([self.file.first_line()]), [])
        left_out = [name for name in columns if name not in in_file]
        unknown = [name for name in in_file if name not in columns]
        is_other_run = len(set(in_file)) != len(in_file) or "kind" not in in_file
        may_be_left_out = {*LOG_FIELDS, *run.train_metrics, *parts} - {"lr"}
        is_other_run |= any(name not in may_be_left_out for name in left_out)
        is_other_run |= any(_is_decided_by_run(name) for name in unknown)
        if is_other_run:
            raise ValueError(
                f"{self.file.owner}: {self.file.path} has the columns {','.join(in_file)}, "
                f"this run has {','.join(columns)}. Resume with the metrics, parameter groups and "
                f"times= of that run, or leave the {self.file.owner} out of this one."
            )
        return in_file, left_out, unknown

    def _run_columns(self, run: Run, parts: Sequence[str]) -> list[str]:
        # A step of the user's own may have no optimizer; its records have one learning rate.
        optimizer = getattr(run.model.step, "optimizer", None)
        group_count = 1 if optimizer is None else len(optimizer.param_groups)
        columns = ["kind"]
        for name in LOG_FIELDS:
            if name == "lr" and group_count > 1:
                columns += [f"lr_{i}" for i in range(group_count)]
            else:
                columns.append(name)
        columns += [*parts, *run.train_metrics]
        scores = [*(run.score_names or ("loss", *run.model.metrics))]
        scores += [score_name(one_set, part) for one_set in run.valid_sets for part in parts]
        columns += dict.fromkeys(f"valid_{name}" for name in scores)
        if self.times:
            columns.append("time")
        return columns

    def _add_line(self, values: dict[str, Any]) -> None:
        if isinstance(values.get("lr"), tuple) and "lr" not in self.columns:
            for i, lr in enumerate(values.pop("lr")):
                values[f"lr_{i}"] = lr
        unknown = [
            name for name in values if name not in self.columns and name not in self._left_out
        ]
        if unknown and values["kind"] == "evaluation" and self._has_parts:
            # An evaluation whose loss has other parts than a training step.
            self._left_out.update(unknown)
            warnings.warn(
                f"CSVLog: the columns are fixed at the start of a run, {', '.join(unknown)} came "
                "with an evaluation later and is left out; a JSONLLog has it",
                Notice,
                stacklevel=user_stacklevel(),
            )
        elif unknown:
            raise ValueError(
                "CSVLog: the columns are fixed at the start of a run, "
                f"{', '.join(unknown)} came later"
            )
        self.file.add(_csv_line([_csv_cell(values.get(name)) for name in self.columns]))


class JSONLLog(_Log):
    """One JSON object a line: `{"kind": "step", …}` or `{"kind": "evaluation", …}`.

    Every `every`-th step and every evaluation. Strict JSON: inf and NaN are the strings "Infinity",
    "-Infinity", "NaN", which float() reads; `lr` is a list with several parameter groups. `times`,
    `overwrite` and resuming are as in CSVLog.
    """

    def begin(self, run: Run) -> None:
        self._open(run)

    def _add_line(self, values: dict[str, Any]) -> None:
        try:
            # First without a look for NaN and tensors, which would take four times as long.
            line = JSON_ENCODER.encode(values)
        except (ValueError, TypeError):
            line = JSON_ENCODER.encode(_nonfinite_as_text(values))
        self.file.add(line + "\n")


def _is_decided_by_run(column: str) -> bool:
    """Whether the run's metrics, parameter groups or `times=` decide that there is this column."""
    return column == "time" or column == "lr" or column.startswith(("valid_", "lr_"))


def _csv_line(cells: Sequence[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _csv_cell(value: Any) -> Any:
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, Tensor | list | tuple | dict):
        return json.dumps(_nonfinite_as_text(value))
    return value


def _nonfinite_as_text(value: Any) -> Any:
    """The value for strict JSON: inf and NaN as words that float() reads, tensors as lists."""
    if isinstance(value, float):
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        return value
    if isinstance(value, dict):
        return {name: _nonfinite_as_text(item) for name, item in value.items()}
    if isinstance(value, Tensor):
        return _nonfinite_as_text(value.tolist())
    if isinstance(value, list | tuple):
        return [_nonfinite_as_text(item) for item in value]
    return value


def _resume_found_nothing(run: Run) -> bool:
    """Whether fit(resume=…) was requested and there was no checkpoint to go on from."""
    return run.resume is not None and run.resumed is None


class LogFile:
    """A text file of complete lines that can be cut back to where a checkpoint saw it.

    Lines wait in memory until `flush`. When they cannot be written, or not through to the disk (it
    is full, a quota, a failing drive), a notice says so, the lines go on waiting, and the next
    `flush` tries again. `state_dict` has the length of what is on the disk and the lines that are
    not.
    """

    def __init__(self, owner: str, path: str | Path, *, overwrite: bool) -> None:
        if is_store_url(path):
            raise ValueError(
                f"{owner}: expected a file of this machine, got {hide_credentials(str(path))}. "
                f"Write {owner}(saver.folder / 'log.jsonl') with saver = hs.Checkpoint(URL): all "
                "that is in its folder is uploaded."
            )
        self.owner = owner
        self.path = Path(path)
        self.overwrite = overwrite
        self._file: BinaryIO | None = None
        self._size = 0  # of the lines that were written
        self._synced_size = 0  # of the lines that are on the disk, whatever happens
        self._is_new_file = False  # this run has created it
        self._is_regular = True  # no pipe or device, which can be neither cut nor synced
        self._needs_cut = False  # something stands in the file beyond `_size`
        # What stands there when a run begins is cut off or replaced at the first visit, not before:
        # a fit that another callback refuses leaves the file alone.
        self._is_beginning = False
        self._sync_failed = False
        self._head: list[str] = []
        self._waiting: list[str] = []
        self._has_begun = False
        self._has_warned = False
        self._loaded_state: dict[str, Any] | None = None
        self._lines_of_checkpoint: list[str] = []  # of a run whose file is elsewhere

    def open(self, head: str = "", *, replace: bool = False, is_resumed: bool = False) -> None:
        """Begins the file with the line `head`, or goes on where the loaded state says.

        What came after that state is cut off. `replace`: an existing file is from a run that was
        killed before its first checkpoint. All of it will be written again, so it is replaced.
        """
        self._has_warned = False
        self._has_begun = False
        self._sync_failed = False
        state = self._loaded_state
        self._loaded_state = None
        self._head = [head] if head else []
        if state is None:
            self._start(overwrite=self.overwrite or replace, is_resumed=is_resumed)
        else:
            self._check_length(state["offset"])
            self._open_file()
            self._size = state["offset"]
            self._synced_size = self._size
            self._waiting = list(state["waiting"])
        self._needs_cut = self._is_regular and self._length() > self._size
        self._is_beginning = self._needs_cut
        if not self._is_beginning:
            self.flush()
        self._has_begun = True

    @property
    def continues(self) -> bool:
        """Whether `open` will go on with the file of a checkpoint that was loaded."""
        return self._loaded_state is not None

    def begin_as_copy(self, source: Path | None) -> bool:
        """Makes the file of the lines of another one, as far as the checkpoint knows them.

        False where that is not there, or too short.
        """
        assert self._loaded_state is not None
        offset = self._loaded_state["offset"]
        if source is None or not source.is_file() or source.stat().st_size < offset:
            return False
        with source.open("rb") as file:
            content = file.read(offset)
        write_chunks(self.path, [content])
        return True

    def start_anew(self) -> None:
        """Lets `open` begin a new file, with the lines that waited in the checkpoint."""
        assert self._loaded_state is not None
        self._lines_of_checkpoint = list(self._loaded_state["waiting"])
        self._loaded_state = None

    def _start(self, *, overwrite: bool, is_resumed: bool) -> None:
        if self.path.exists() and not overwrite and self.path.stat().st_size:
            problem = "and this run starts anew. Go on with it by fit(resume=…)"
            if is_resumed:
                problem = "and the checkpoint that the run goes on from knows of no log. Move it"
            raise FileExistsError(
                f"{self.owner}: {self.path} exists, {problem}, name another file, or throw the old "
                "one away with overwrite=True."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._open_file()
        with suppress(OSError):
            sync_folder(self.path.parent)  # the new name survives a loss of power
        self._size = 0
        self._synced_size = 0
        lines = [line for line in self._lines_of_checkpoint if line not in self._head]
        self._waiting = [*self._head, *lines]
        self._lines_of_checkpoint = []

    def _open_file(self) -> None:
        """Opens the file, which is created where there is none, and not cut."""
        self._is_new_file = not self.path.exists()
        self._is_regular = self._is_new_file or self.path.is_file()
        if not self._is_regular:
            self._file = self.path.open("wb", buffering=0)
            return
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._file = os.fdopen(descriptor, "r+b", buffering=0)

    def _length(self) -> int:
        assert self._file is not None
        return os.fstat(self._file.fileno()).st_size

    def check_state(self, saved: SavedValue) -> None:
        """Raises unless the file can go on from a saved state. Changes nothing."""
        if not saved.entries():
            return
        offset = saved.field("offset").whole_number()
        saved.field("waiting").texts()
        self._check_length(offset)

    def _check_length(self, offset: int) -> None:
        """Raises unless the file exists and has at least `offset` bytes."""
        error_type: type[Exception]
        if not self.path.is_file():
            error_type = FileNotFoundError
            received = "no file"
        else:
            size = self.path.stat().st_size
            if size >= offset:
                return
            error_type = ValueError
            received = f"one of {size} bytes"
        raise error_type(
            f"{self.owner}: expected the log of the run that goes on, {self.path}, with {offset} "
            f"bytes or more, found {received}. Put the file back, resume from an older "
            f"checkpoint, or leave the {self.owner} out of this run."
        )

    def first_line(self) -> str:
        """The first line of the file as it is, without its end; empty where there is none."""
        if not self.path.is_file():
            return ""
        with self.path.open("rb") as file:
            return file.readline().decode(errors="replace").rstrip("\n")

    def add(self, line: str) -> None:
        """Appends a line, which waits for the next `flush`."""
        self._waiting.append(line)

    def flush(self) -> None:
        """Writes all waiting lines, or none of them."""
        if self._file is None or not (self._waiting or self._needs_cut):
            return
        data = "".join(self._waiting).encode()
        if self._is_beginning and self._size == 0:
            try:
                self._replace(data)
            except OSError as error:
                if error.errno not in NO_REPLACEMENT_ERRORS:
                    self._warn_unwritten(error)
                    return
            else:
                return
        self._is_beginning = False
        try:
            if self._is_regular:
                self._file.truncate(self._size)
                self._file.seek(self._size)
            self._needs_cut = False
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            with suppress(OSError):  # no half lines
                self._file.truncate(self._size)
                self._file.seek(self._size)
            self._warn_unwritten(error)
            return
        self._size += len(data)
        self._waiting = []
        if self._sync_failed:
            self._sync()

    def _replace(self, data: bytes) -> None:
        """Puts a new file in the place of the old one, which is there whole until then."""
        write_chunks(self.path, [data])
        old_file = self._file
        self._open_file()
        assert old_file is not None
        old_file.close()
        self._size = len(data)
        self._synced_size = self._size
        self._waiting = []
        self._needs_cut = False
        self._is_beginning = False

    def _sync(self) -> None:
        """Writes the file through to the disk. What is not sure to be there waits again.

        After an error nobody knows which of the lines are on the disk, and the next fsync would
        report success for those that were lost. So they are read back, and written once more.
        """
        if self._file is None or self._is_beginning:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            if self._is_regular and error.errno not in NO_SYNC_ERRORS:
                self._sync_failed = True
                self._take_back_unsynced()
                self._warn_unwritten(error)
                return
        self._synced_size = self._size
        self._sync_failed = False

    def _take_back_unsynced(self) -> None:
        """Lets the lines since the last successful sync wait again."""
        assert self._file is not None
        tail = b""
        try:
            self._file.seek(self._synced_size)
            while piece := self._file.read(self._size - self._synced_size - len(tail)):
                tail += piece
        except OSError:
            tail = b""
        if len(tail) == self._size - self._synced_size:
            self._waiting = [*tail.decode().splitlines(keepends=True), *self._waiting]
            self._size = self._synced_size
            self._needs_cut = True
        # Else they cannot even be read back: what is in the file is all there is.
        self._synced_size = self._size

    def _warn_unwritten(self, error: OSError) -> None:
        """Once a run: a disk that is nearly full takes some lines and refuses others."""
        if not self._has_warned:
            warnings.warn(
                f"{self.owner}: {self.path} cannot be written ({error.strerror}); its lines "
                "wait in memory, training goes on",
                Notice,
                stacklevel=user_stacklevel(),
            )
        self._has_warned = True

    def close(self, *, refused: bool = False) -> None:
        """Writes the last lines through to the disk; a Notice if some still cannot be written.

        `refused`: the fit ended before it began, and leaves the file as it was.
        """
        if self._file is None:
            return
        try:
            if refused:
                self._waiting = []
                self._has_begun = False
            else:
                self.flush()
                self._sync()
        finally:
            file = self._file
            self._file = None
            with suppress(OSError):  # an error of the last write, reported again
                file.close()
        if refused and self._is_new_file:
            self.path.unlink(missing_ok=True)
        if self._waiting:
            warnings.warn(
                f"{self.owner}: the last {len(self._waiting)} lines could not be written to "
                f"{self.path}. Nothing else of the run is lost. Where a Checkpoint has saved its "
                "end, it holds these lines too: make room, and fit(resume='auto') writes them.",
                Notice,
                stacklevel=user_stacklevel(),
            )

    def state_dict(self) -> dict[str, Any]:
        """The length of what is on the disk, and the lines that wait; empty before `open`."""
        if not self._is_beginning:
            self.flush()
            self._sync()
        if not self._has_begun:
            return {}
        return {"offset": self._size, "waiting": list(self._waiting)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """`open` will go on from there."""
        self._loaded_state = dict(state) or None
