"""Streams that wipe a bar from the terminal before they write, so that no line is torn.

rich has such streams too. They break lines at the width of the terminal, and hold back a line until
it is whole: a prompt, of a debugger for instance, would never be seen.
"""

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any, TextIO


class SteppingAside:
    """A stream in the place of `file`. Everything but writing goes to that file itself."""

    def __init__(self, file: TextIO, streams: "Streams") -> None:
        self._file = file
        self._streams = streams

    def write(self, text: str) -> int:
        with self._streams.before_writing():
            count = self._file.write(text)
        if text:
            self._streams.is_inside_line = not text.endswith("\n")
        return count

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        # input() flushes before it writes a prompt past this object.
        with self._streams.before_writing():
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)


class Streams:
    """stdout, stderr and the handlers of `logging`, as far as they are this terminal."""

    def __init__(self, wipe: Callable[[], None]) -> None:
        self.lock = RLock()
        self.is_inside_line = False  # something was printed whose line goes on
        self._wipe: Callable[[], None] | None = wipe
        self._process = os.getpid()
        self._stderr = sys.stderr
        self._replaced: dict[str, tuple[TextIO, Any]] = {}
        self._handlers: list[tuple[Any, TextIO]] = []

    def replace(self) -> None:
        for name in ("stdout", "stderr"):
            file = getattr(sys, name)
            # A pipe gets its lines untouched.
            if file is not None and file.isatty():
                stream = SteppingAside(file, self)
                self._replaced[name] = (file, stream)
                setattr(sys, name, stream)
        by_file = {id(file): stream for file, stream in self._replaced.values()}
        for handler in _stream_handlers():
            if id(handler.stream) in by_file:
                self._handlers.append((handler, handler.stream))
                handler.setStream(by_file[id(handler.stream)])

    def restore(self) -> None:
        """Puts back what is still ours; streams that others keep write on without wiping."""
        self._wipe = None
        for name, (file, stream) in self._replaced.items():
            if getattr(sys, name) is stream:
                setattr(sys, name, file)
        for handler, file in self._handlers:
            if getattr(handler.stream, "_streams", None) is self:
                handler.setStream(file)

    @contextmanager
    def before_writing(self) -> Iterator[None]:
        """Inside, the bar is gone and is not drawn."""
        # A worker process that was forked has copies of bar and lock, which mean nothing there.
        if os.getpid() != self._process:
            yield
            return
        with self.lock:
            if self._wipe is not None:
                self._wipe()
            yield

    def end_line(self) -> None:
        """Ends the line that somebody has begun and left."""
        if self.is_inside_line:
            self._stderr.write("\n")
            self.is_inside_line = False


def step_aside(wipe: Callable[[], None]) -> Streams:
    """From here on, `wipe` is called before anything is printed on the terminal."""
    streams = Streams(wipe)
    streams.replace()
    return streams


def is_stepping_aside(file: Any) -> bool:
    return isinstance(file, SteppingAside)


def _stream_handlers() -> list[Any]:
    """Every handler of `logging` that writes to a stream."""
    loggers = [logging.getLogger(), *logging.root.manager.loggerDict.values()]
    handlers = [handler for logger in loggers for handler in getattr(logger, "handlers", ())]
    return [handler for handler in handlers if isinstance(handler, logging.StreamHandler)]
