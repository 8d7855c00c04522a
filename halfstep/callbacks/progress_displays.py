"""Where progress is shown: a bar on a terminal, a table in a notebook, or lines.

All but the table go to stderr, as the bars of tqdm, pip and curl do: what a program prints on
stdout can be piped into another, and holds the program's own rows only.
"""

import multiprocessing
import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from halfstep.callbacks.stepping_aside import is_stepping_aside, step_aside
from halfstep.utils.text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

# Columns of a bar. A terminal of fewer than 80 has a short one, so that the time left has room
# beside it, and one of fewer than 60 shows numbers only.
BAR_WIDTH = 20
SHORT_BAR_WIDTH = 10
SHORT_BAR_COLUMNS = 80
NARROW_COLUMNS = 60
# Of several fits in threads, one finds the terminal free.
STARTING = threading.Lock()
# A job's log must show that an epoch of hours is alive.
LINE_EVERY_S = 60.0


class Number(NamedTuple):
    """A number of a line or a table: its name and text apart, and as the words of a line.

    Without words it is in no line.
    """

    name: str
    text: str
    words: str


def labelled(name: str, text: str) -> Number:
    """A number whose name stands before it."""
    name = printable(name)
    return Number(name, text, f"{name} {text}")


class Position(NamedTuple):
    """How far an epoch or an evaluation is; `total` may be unknown, or what the last pass had."""

    done: int
    total: int | None
    is_estimate: bool = False

    def __str__(self) -> str:
        if self.total is None:
            return str(self.done)
        return f"{self.done}/{'~' if self.is_estimate else ''}{self.total}"


class Display(Protocol):
    """One place. At the end `end`, or `abandon` where it cannot be written to any more."""

    def move(self, head: str, position: Position, numbers: list[Number]) -> None:
        """The newest state, in place of the one before."""
        ...

    def keep(self, head: str, numbers: list[Number]) -> None:
        """A line that stays."""
        ...

    def note(self, text: str) -> None: ...

    def end(self) -> None: ...

    def abandon(self) -> None: ...


def start_display(style: str, file: TextIO | None) -> Display | None:
    """A new display for this process; None for the other processes of a distributed run."""
    with STARTING:
        return _start_display(style, file)


def _start_display(style: str, file: TextIO | None) -> Display | None:
    if _rank() != 0:
        return None
    if style == "lines":
        return Lines(file)
    if _is_notebook():
        from halfstep.callbacks.notebook_table import NotebookTable

        return NotebookTable()
    if not owns_terminal():
        return Lines(file)
    try:
        return TerminalBar()
    except ModuleNotFoundError:  # a terminal without rich
        return Lines(file)


def _rank() -> int:
    """This process's number in a distributed run; 0 in any other."""
    rank = os.environ.get("RANK", "")  # torchrun's
    if rank.isdecimal():
        return int(rank)
    import torch

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return 0


def _is_notebook() -> bool:
    """Whether an IPython kernel runs this: Jupyter, Colab, VS Code. Terminals of IPython are none.

    Spyder's console is a kernel too, and does not replace what it has shown.
    """
    ipython = sys.modules.get("IPython")
    if ipython is None or "spyder_kernels" in sys.modules:
        return False
    shell = ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


def owns_terminal() -> bool:
    """Whether a bar may move on stderr: a terminal that nothing else draws on."""
    # The file itself says it: FORCE_COLOR makes rich take any file for a terminal.
    if sys.stderr is None or not sys.stderr.isatty():
        return False
    if os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return False
    # A bar of ours in another thread or around this fit, or one of rich.
    if is_stepping_aside(sys.stderr) or hasattr(sys.stderr, "rich_proxied_file"):
        return False
    if multiprocessing.parent_process() is not None:
        return False  # several of a pool would draw over each other
    return _active_tqdm() is None and not _is_background_job()


def _is_background_job() -> bool:
    """Whether the shell has put this process into the background: its prompt is on the line."""
    try:
        return os.tcgetpgrp(sys.stderr.fileno()) != os.getpgrp()
    except (AttributeError, OSError, ValueError):  # Windows; no terminal of this process's own
        return False


def _active_tqdm() -> Any:
    """The class tqdm where a bar of it is on the screen."""
    tqdm = getattr(sys.modules.get("tqdm"), "tqdm", None)
    return tqdm if getattr(tqdm, "_instances", None) else None


class Lines:
    """Only lines that stay, on `file` or stderr; after a minute without any, one of the position.

    That file is looked up at each line, as print does: others may replace sys.stderr.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file
        self._last_line = time.monotonic()

    def move(self, head: str, position: Position, numbers: list[Number]) -> None:
        if time.monotonic() > self._last_line + LINE_EVERY_S:
            self._print(join_words(f"{head} step {position}", numbers))

    def keep(self, head: str, numbers: list[Number]) -> None:
        self._print(join_words(head, numbers))

    def note(self, text: str) -> None:
        self._print(text)

    def end(self) -> None: ...

    def abandon(self) -> None: ...

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        file = self._file or sys.stderr
        if file is None:
            return
        tqdm = _active_tqdm()
        if tqdm is not None:
            tqdm.write(text, file=file)  # its bar moves down a line
            file.flush()
        else:
            file.write(f"{text}\n")  # at once: another thread may print too
            file.flush()


def bar_width(terminal_columns: int) -> int:
    """The columns of a bar on a terminal of this width; 0 where it has no room."""
    if terminal_columns < NARROW_COLUMNS:
        return 0
    return SHORT_BAR_WIDTH if terminal_columns < SHORT_BAR_COLUMNS else BAR_WIDTH


def new_bars(console: "Console", *columns: Any, one_line: bool) -> "Progress":
    """Bars of rich: text, bar, the columns. On a narrow terminal without the bar.

    `one_line`: it goes when it is stopped, and moves and prints nothing by itself.
    """
    from rich.progress import BarColumn, Progress, TextColumn

    head = TextColumn("{task.description}", markup=False)
    width = bar_width(console.width)
    return Progress(
        *([head, BarColumn(width)] if width else [head]),
        *columns,
        console=console,
        auto_refresh=not one_line,
        transient=one_line,
        redirect_stdout=not one_line,
        redirect_stderr=not one_line,
    )


def start_bars(bars: "Progress") -> None:
    bars.start()
    # A process that is killed must not leave a terminal without a cursor.
    bars.console.show_cursor(True)


class TerminalBar:
    """A bar of rich in the last line of the terminal that stderr is.

    Whatever else is printed meanwhile wipes it first; the next move draws it again.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import TextColumn

        self._file = sys.stderr
        self._console = Console(file=sys.stderr, highlight=False)
        numbers = TextColumn("{task.fields[numbers]}", markup=False)
        self._bars: Progress | None = new_bars(self._console, numbers, one_line=True)
        self._task = self._bars.add_task("", visible=False, total=None, numbers="")
        self._is_drawn = False
        start_bars(self._bars)
        self._streams = step_aside(self._wipe)

    def move(self, head: str, position: Position, numbers: list[Number]) -> None:
        with self._streams.lock:
            if self._bars is None or self._streams.is_inside_line:
                return
            self._bars.update(
                self._task,
                description=head,
                total=position.total,
                completed=position.done,
                numbers=self._fit_width(head, str(position), numbers),
                visible=True,
            )
            self._bars.refresh()
            self._is_drawn = True

    def _fit_width(self, head: str, position: str, numbers: list[Number]) -> str:
        """The position and the first numbers, as many as have room in one line."""
        columns = self._console.width - len(head) - 1
        bar = bar_width(self._console.width)
        if bar:
            columns -= bar + 1
        count = len(numbers)
        while count and cell_width(join_words(position, numbers[:count])) > columns:
            count -= 1
        return join_words(position, numbers[:count])

    def keep(self, head: str, numbers: list[Number]) -> None:
        self.note(join_words(head, numbers, max_width=self._console.width))

    def note(self, text: str) -> None:
        with self._streams.lock:
            self._wipe()
            self._streams.end_line()
            print(text, file=self._file, flush=True)

    def end(self) -> None:
        bars = self._bars
        if bars is None:
            return
        with self._streams.lock:
            self._bars = None
            self._streams.restore()
            if self._is_drawn:
                bars.update(self._task, visible=False)
            bars.stop()

    def abandon(self) -> None:
        """Leaves the terminal, which is gone, as it is; other files are as they were before."""
        self._bars = None
        self._streams.restore()

    def _wipe(self) -> None:
        if self._bars is not None and self._is_drawn:
            self._is_drawn = False
            self._bars.update(self._task, visible=False)
            self._bars.refresh()


def cell_width(text: str) -> int:
    """The columns of a terminal that a text takes: two for a letter of Chinese."""
    from rich.cells import cell_len

    return cell_len(text)


def join_words(head: str, numbers: list[Number], *, max_width: int | None = None) -> str:
    """A line: the head, and the numbers with their names.

    A number that would cross `max_width` begins a line of its own, below the first number.
    """
    texts = [number.words for number in numbers if number.words]
    if max_width is None:
        return "  ".join([head, *texts])
    lines = []
    line = head
    for text in texts:
        longer = f"{line}  {text}"
        if cell_width(longer) <= max_width:
            line = longer
        else:
            lines.append(line)
            line = " " * (cell_width(head) + 2) + text
    return "\n".join([*lines, line])
