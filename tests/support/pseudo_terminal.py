"""A pseudo-terminal, and what a person sees on it in the end."""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HIDE_CURSOR = "\x1b[?25l"
SHOW_CURSOR = "\x1b[?25h"
# What decides how rich draws, beside the terminal itself.
TERMINAL_SETTINGS = ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS")


class Terminal:
    """A pseudo-terminal of 200 columns; inside `with` it is this process's stderr."""

    def __init__(self, columns: int = 200) -> None:
        self.ours, self.theirs = os.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.drawn = b""
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def __enter__(self) -> None:
        self.before = sys.stderr
        sys.stderr = open(self.theirs, "w", closefd=False, encoding="utf-8")

    def __exit__(self, *_: object) -> None:
        sys.stderr.close()
        sys.stderr = self.before

    def _read(self) -> None:
        try:
            while part := os.read(self.ours, 4096):
                self.drawn += part
        except OSError:  # how Linux says that nobody holds the other end any more
            pass

    def text(self) -> str:
        self.close()
        return self.drawn.decode()

    def close(self) -> None:
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1
            self.reader.join()
            os.close(self.ours)


def visible_lines(drawn: str) -> list[str]:
    """What a person sees in the end, line by line: what was overwritten or wiped is gone."""
    return [_visible(line).strip() for line in drawn.split("\n")]


def _visible(line: str) -> str:
    shown = ""
    column = 0
    for part in re.split(r"(\r|\x1b\[2K)", line):
        if part == "\r":
            column = 0
        elif part == "\x1b[2K":
            shown = " " * column
        else:
            text = CONTROL.sub("", part)
            shown = shown[:column].ljust(column) + text + shown[column + len(text) :]
            column += len(text)
    return shown


def run_on_terminal(
    command: list[str],
    *,
    columns: int = 200,
    cwd: Path | None = None,
    typed: str = "",
    timeout_s: float = 120,
    **settings: str,
) -> tuple[int, str]:
    """The exit status of a program that has a terminal of its own, and all that was drawn there.

    `typed` is what a person types once the program has drawn something; `settings` are variables of
    its environment.
    """
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    left_out = {*TERMINAL_SETTINGS, "RANK"}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"TERM": "xterm", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    environment |= {"OMP_NUM_THREADS": "1", **settings}

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    process: subprocess.Popen[Any] = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env=environment,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    drawn = b""
    deadline = time.monotonic() + timeout_s
    while select.select([ours], [], [], max(0, deadline - time.monotonic()))[0]:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        drawn += part
        if typed:
            os.write(ours, typed.encode())
            typed = ""
    else:
        process.send_signal(signal.SIGKILL)
    os.close(ours)
    return process.wait(), drawn.decode()
