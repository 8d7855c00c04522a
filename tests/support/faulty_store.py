"""A store that fails now and then: objects are files of a folder, and the calls of fsspec go wrong.

A call may fail before or after it did its work, arrive in part and say so, or say nothing; an
answer may be cut short or late. What happens is drawn from a seed. FAULTY_STORE in the environment
configures it, as JSON, so that it works in other processes too:

    folder   where the objects are
    rate     the share of calls that go wrong
    seed     of what happens
    kill_at  the number of the call in which the process is killed, half way
    down     calls from this number on all fail
"""

import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
from fsspec import AbstractFileSystem

VARIABLE = "FAULTY_STORE"
FAULTS = ("before", "after", "part", "silent part", "late")
LATE_S = 0.01

SECRET = "hunter2-of-the-faulty-store"


class FaultSchedule:
    """Draws what goes wrong, call by call, and counts it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.configure({})

    def configure(self, settings: dict[str, Any]) -> None:
        self.rate = settings.get("rate", 0.0)
        self.kill_at = settings.get("kill_at", 0)
        self.down = settings.get("down", 0)
        self.draw = random.Random(settings.get("seed", 0))
        self.call_count = 0
        self.faults: dict[str, int] = {}

    def next(self, call: str) -> str:
        """What goes wrong with this call; empty if nothing does."""
        with self.lock:
            self.call_count += 1
            if self.kill_at and self.call_count >= self.kill_at:
                return "kill"
            if self.down and self.call_count >= self.down:
                return "before"
            if self.draw.random() >= self.rate:
                return ""
            fault = self.draw.choice(FAULTS)
            self.faults[fault] = self.faults.get(fault, 0) + 1
            return fault


SCHEDULE = FaultSchedule()


class FaultyFileSystem(AbstractFileSystem):
    """Objects as files. `pipe_file(mode="create")` is exclusive, as in a real store."""

    protocol = "faulty"
    cachable = False
    root = Path("/nonexistent")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        self._before("ls")
        folder = self._file(path)
        if not folder.exists():
            raise FileNotFoundError(path)
        return [self._info(child) for child in sorted(folder.iterdir())]

    def find(self, path: str, detail: bool = False, **_: Any) -> Any:
        fault = self._before("find")
        files = sorted(child for child in self._file(path).rglob("*") if child.is_file())
        self._after(fault)
        return {self._name(child): self._info(child) for child in files}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        fault = self._before("info")
        if not self._file(path).exists():
            raise FileNotFoundError(path)
        self._after(fault)
        return self._info(self._file(path))

    def exists(self, path: str, **_: Any) -> bool:
        self._before("exists")
        return self._file(path).exists()

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **_: Any
    ) -> bytes:
        fault = self._before("cat_file")
        content = self._file(path).read_bytes()[start:end]
        self._after(fault)
        return content[: len(content) // 2] if fault.endswith("part") else content

    def put_file(self, lpath: str, rpath: str, **_: Any) -> None:
        self._write(rpath, Path(lpath).read_bytes(), exclusive=False)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self._write(path, value, exclusive=mode == "create")

    def rm_file(self, path: str) -> None:
        fault = self._before("rm_file")
        self._file(path).unlink()
        with suppress(OSError):  # in a store, a folder goes with its last object
            self._file(path).parent.rmdir()
        self._after(fault)

    def _write(self, path: str, content: bytes, *, exclusive: bool) -> None:
        fault = self._before("write", may_kill=False)
        file = self._file(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("xb" if exclusive else "wb") as opened:
            if fault in ("kill", "part", "silent part"):
                opened.write(content[: len(content) // 2])
                opened.flush()
            else:
                opened.write(content)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "part":
            raise OSError(f"connection reset by https://user:{SECRET}@store/{path}")
        self._after(fault)

    def _before(self, call: str, *, may_kill: bool = True) -> str:
        fault = SCHEDULE.next(call)
        if fault == "kill" and may_kill:
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "late":
            time.sleep(LATE_S)
        if fault == "before":
            raise OSError(f"500 of https://store/?X-Amz-Signature={SECRET}")
        return fault

    def _after(self, fault: str) -> None:
        if fault == "after":
            raise TimeoutError(f"no answer to {SECRET}")

    def _file(self, path: str) -> Path:
        return self.root / str(self._strip_protocol(path)).lstrip("/")

    def _name(self, file: Path) -> str:
        return file.relative_to(self.root).as_posix()

    def _info(self, file: Path) -> dict[str, Any]:
        stat = file.stat()
        kind = "directory" if file.is_dir() else "file"
        # With the inode, so that another file of the same size is told apart, as by an ETag.
        version = f"{stat.st_ino}-{stat.st_mtime_ns}"
        return {"name": self._name(file), "size": stat.st_size, "type": kind, "mtime": version}


def use_faulty_store(settings: dict[str, Any]) -> None:
    """Makes faulty:// a store of this process, in the folder that the settings say."""
    FaultyFileSystem.root = Path(settings["folder"])
    SCHEDULE.configure(settings)
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)


if VARIABLE in os.environ:
    use_faulty_store(json.loads(os.environ[VARIABLE]))
