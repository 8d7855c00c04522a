"""A text file of whole lines that can be cut back to where a checkpoint saw it."""

import os
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from halfstep.checkpoint.disk import sync_folder
from halfstep.errors import Notice


class LogFile:
    """Lines wait in memory until `flush`; `state_dict` reports only what is on the disk, and what could not get there.

    When the disk is full, a notice says so, lines wait, and the next flush tries again.
    """

    def __init__(self, owner: str, path: str | Path, *, overwrite: bool) -> None:
        self.owner, self.path, self.overwrite = owner, Path(path), overwrite
        self._waiting: list[str] = []
        self._file: BinaryIO | None = None
        self._size = 0
        self._begun = False
        self._loaded: dict[str, Any] | None = None
        self._told = False

    def open(self, head: str = "", *, anew: bool = False) -> None:
        """Begins the file with `head`, or goes on where the loaded state says, cutting off what came after it.

        `anew`: the run was killed before its first checkpoint, and what it wrote until then is written again."""
        self._told, self._begun = False, False
        state, self._loaded = self._loaded, None
        if state is None:
            self._start(head, self.overwrite or anew)
        else:
            self._go_on(head, state["offset"], state["waiting"])
        self._begun = True

    def _start(self, head: str, overwrite: bool) -> None:
        if self.path.exists() and not overwrite and self.path.stat().st_size:
            raise FileExistsError(
                f"{self.owner}: {self.path} exists, and this run starts anew. Go on with it by fit(resume=…), name "
                "another file, or throw the old one away with overwrite=True."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("wb", buffering=0)
        sync_folder(self.path.parent)  # the new name survives a loss of power
        self._size, self._waiting = 0, [head] if head else []
        self.flush()

    def _go_on(self, head: str, offset: int, waiting: list[str]) -> None:
        self._check(offset)
        with self.path.open("rb") as file:
            found = file.readline() if head and offset else head.encode()
        if found != head.encode():
            raise ValueError(
                f"{self.owner}: {self.path} has the columns {found.decode(errors='replace').strip()}, this run has "
                f"{head.strip()}. Resume with the metrics and parameter groups of that run, or name another file."
            )
        self._file = self.path.open("r+b", buffering=0)
        self._file.truncate(offset)
        self._file.seek(offset)
        self._size, self._waiting = offset, list(waiting)

    def _check(self, offset: int) -> None:
        size = self.path.stat().st_size if self.path.is_file() else None
        if size is None or size < offset:
            came = "no file" if size is None else f"one of {size} bytes"
            raise (FileNotFoundError if size is None else ValueError)(
                f"{self.owner}: expected the log of the run that goes on, {self.path}, with {offset} bytes or more, "
                f"found {came}. Put the file back, resume from an older checkpoint, or leave the {self.owner} out and "
                "log to a new file."
            )

    def add(self, line: str) -> None:
        self._waiting.append(line)

    def flush(self) -> None:
        """All lines to the system, or none of them."""
        if self._file is None or not self._waiting:
            return
        data = "".join(self._waiting).encode()
        try:
            _write(self._file, data)
        except OSError as error:
            with suppress(OSError):  # no half lines
                self._file.truncate(self._size)
                self._file.seek(self._size)
            if not self._told:
                text = f"{self.path} cannot be written ({error.strerror}); its lines wait in memory, training goes on"
                warnings.warn(f"{self.owner}: {text}", Notice, stacklevel=4)
            self._told = True
            return
        self._size, self._waiting, self._told = self._size + len(data), [], False

    def close(self) -> None:
        """The last lines, on the disk; those that still cannot be written are an error now."""
        self.flush()
        if self._file is None:
            return
        with self._file as file:
            os.fsync(file.fileno())
        self._file = None
        if self._waiting:
            raise OSError(
                f"{self.owner}: the last {len(self._waiting)} lines could not be written to {self.path}"
            )

    def state_dict(self) -> dict[str, Any]:
        """The size of what is on the disk, and the lines that wait; nothing before `open`."""
        self.flush()
        if self._file is not None:
            os.fsync(self._file.fileno())
        return {"offset": self._size, "waiting": list(self._waiting)} if self._begun else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Checks that the file can go on from there; `open` cuts it."""
        if state:
            self._check(state["offset"])
        self._loaded = dict(state) or None


def _write(file: BinaryIO, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
