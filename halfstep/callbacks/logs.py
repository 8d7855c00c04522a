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
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any, BinaryIO

from torch import Tensor

from halfstep.engine import Callback, Row, Run
from halfstep.errors import Notice
from halfstep.utils.atomic_files import write_chunks
from halfstep.utils.checks import whole_number

LOG_FIELDS = tuple(field.name for field in fields(Row))
POSITION_FIELDS = ("epoch", "step", "global_step")

row_values = attrgetter(*LOG_FIELDS)

DISK_IS_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# One encoder for all lines: json.dumps would build one for every line.
JSON_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)


class _Log(Callback):
    """Selects the steps and evaluations that become lines; `_add_line` formats one."""

    writes = True

    def __init__(
        self, path: str | Path, *, every: int = 1, times: bool = False, overwrite: bool = False
    ) -> None:
        owner = type(self).__name__
        self.every = whole_number(f"{owner}: every", every, minimum=1)
        self.times = times
        self.file = LogFile(owner, path, overwrite=overwrite)

    def step(self, run: Run, row: Row) -> None:
        if row.global_step % self.every:
            return
        values = {"kind": "step", **dict(zip(LOG_FIELDS, row_values(row), strict=True))}
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
        self.file.close()

    def state_dict(self) -> dict[str, Any]:
        return self.file.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.file.load_state_dict(state)


class CSVLog(_Log):
    """A table with a line for every `every`-th step and for every evaluation.

    The column `kind` tells them apart. The columns are fixed at the start: `lr`, or `lr_0`, `lr_1`,
    … with several parameter groups; scores are in `valid_…`. Numbers are written so that reading
    gives the same bits; inf and NaN as `inf`, `nan`; bools as 0 and 1. `times=True` adds the wall
    clock, which no resume repeats. A resumed run cuts the file back to its checkpoint; a new run
    refuses an existing file, unless `overwrite=True`.
    """

    columns: Sequence[str] = ()

    def begin(self, run: Run) -> None:
        # A step of the user's own may have no optimizer; its records have one learning rate.
        optimizer = getattr(run.model.step, "optimizer", None)
        group_count = 1 if optimizer is None else len(optimizer.param_groups)
        columns = ["kind"]
        for name in LOG_FIELDS:
            if name == "lr" and group_count > 1:
                columns += [f"lr_{i}" for i in range(group_count)]
            else:
                columns.append(name)
        columns += dict.fromkeys(f"valid_{name}" for name in ("loss", *run.model.metrics))
        if self.times:
            columns.append("time")
        self.columns = columns
        self.file.open(_csv_line(columns), replace=_resume_found_nothing(run))

    def _add_line(self, values: dict[str, Any]) -> None:
        if isinstance(values.get("lr"), tuple) and "lr" not in self.columns:
            for i, lr in enumerate(values.pop("lr")):
                values[f"lr_{i}"] = lr
        unknown = [name for name in values if name not in self.columns]
        if unknown:
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
        self.file.open(replace=_resume_found_nothing(run))

    def _add_line(self, values: dict[str, Any]) -> None:
        try:
            # First without a look for NaN and tensors, which would take four times as long.
            line = JSON_ENCODER.encode(values)
        except (ValueError, TypeError):
            line = JSON_ENCODER.encode(_nonfinite_as_text(values))
        self.file.add(line + "\n")


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

    Lines wait in memory until `flush`. When the disk is full, a notice says so, the lines go on
    waiting, and the next flush tries again. `state_dict` has the length of what is on the disk and
    the lines that are not.
    """

    def __init__(self, owner: str, path: str | Path, *, overwrite: bool) -> None:
        self.owner = owner
        self.path = Path(path)
        self.overwrite = overwrite
        self._file: BinaryIO | None = None
        self._size = 0
        self._waiting: list[str] = []
        self._has_begun = False
        self._has_warned = False
        self._loaded_state: dict[str, Any] | None = None

    def open(self, head: str = "", *, replace: bool = False) -> None:
        """Begins the file with the line `head`, or goes on where the loaded state says.

        What came after that state is cut off. `replace`: an existing file is from a run that was
        killed before its first checkpoint. All of it will be written again, so it is replaced.
        """
        self._has_warned = False
        self._has_begun = False
        state = self._loaded_state
        self._loaded_state = None
        if state is None:
            self._start(head, overwrite=self.overwrite or replace)
        else:
            self._continue(head, state["offset"], state["waiting"])
        self._has_begun = True

    def _start(self, head: str, *, overwrite: bool) -> None:
        if self.path.exists() and not overwrite and self.path.stat().st_size:
            raise FileExistsError(
                f"{self.owner}: {self.path} exists, and this run starts anew. Go on with it by "
                "fit(resume=…), name another file, or throw the old one away with overwrite=True."
            )
        # An old file is replaced in one step, by one that has its first line already. On a full
        # disk that line waits like any other.
        self._waiting = [head] if head else []
        try:
            write_chunks(self.path, [head.encode()])
            self._waiting = []
        except OSError as error:
            if error.errno not in DISK_IS_FULL:
                raise
            write_chunks(self.path, [])
        self._file = self.path.open("r+b", buffering=0)
        self._size = self._file.seek(0, os.SEEK_END)
        self.flush()

    def _continue(self, head: str, offset: int, waiting: list[str]) -> None:
        self._check_length(offset)
        if head and offset:
            with self.path.open("rb") as file:
                first_line = file.readline()
            if first_line != head.encode():
                columns = first_line.decode(errors="replace").strip()
                raise ValueError(
                    f"{self.owner}: {self.path} has the columns {columns}, this run has "
                    f"{head.strip()}. Resume with the metrics and parameter groups of that run, "
                    "or name another file."
                )
        self._file = self.path.open("r+b", buffering=0)
        self._file.truncate(offset)
        self._file.seek(offset)
        self._size = offset
        self._waiting = list(waiting)

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
            f"checkpoint, or leave the {self.owner} out and log to a new file."
        )

    def add(self, line: str) -> None:
        """Appends a line, which waits for the next `flush`."""
        self._waiting.append(line)

    def flush(self) -> None:
        """Writes all waiting lines, or none of them."""
        if self._file is None or not self._waiting:
            return
        data = "".join(self._waiting).encode()
        try:
            remaining = memoryview(data)
            while remaining:
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            with suppress(OSError):  # no half lines
                self._file.truncate(self._size)
                self._file.seek(self._size)
            if not self._has_warned:
                warnings.warn(
                    f"{self.owner}: {self.path} cannot be written ({error.strerror}); its lines "
                    "wait in memory, training goes on",
                    Notice,
                    stacklevel=4,
                )
            self._has_warned = True
            return
        self._size += len(data)
        self._waiting = []
        self._has_warned = False

    def close(self) -> None:
        """Writes the last lines through to the disk. OSError if some still cannot be written."""
        self.flush()
        if self._file is None:
            return
        with self._file as file:
            os.fsync(file.fileno())
        self._file = None
        if self._waiting:
            raise OSError(
                f"{self.owner}: the last {len(self._waiting)} lines could not be written to "
                f"{self.path}"
            )

    def state_dict(self) -> dict[str, Any]:
        """The length of what is on the disk, and the lines that wait; empty before `open`."""
        self.flush()
        if self._file is not None:
            os.fsync(self._file.fileno())
        if not self._has_begun:
            return {}
        return {"offset": self._size, "waiting": list(self._waiting)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Checks that the file can go on from there. `open` cuts it."""
        if state:
            self._check_length(state["offset"])
        self._loaded_state = dict(state) or None
