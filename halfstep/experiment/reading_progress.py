"""How far the reading of many files is: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from halfstep.utils.text import printable

LINE_EVERY_S = 10.0
MIN_FILES = 200  # fewer are read before a bar is worth it


@contextmanager
def reading_progress(title: str, total: int, *, visible: bool) -> Iterator[Callable[[int], None]]:
    """A function that adds the number of files read since its last call."""
    if not visible or total < MIN_FILES:
        yield lambda count: None
        return
    if not sys.stderr.isatty():
        yield _line_printer(title, total)
        return

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        Remaining(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(printable(title), total=total)
        yield lambda count: bar.advance(task, count)


def _line_printer(title: str, total: int) -> Callable[[int], None]:
    files_read = 0
    next_line_time = time.monotonic() + LINE_EVERY_S

    def add(count: int) -> None:
        nonlocal files_read, next_line_time
        files_read += count
        if time.monotonic() >= next_line_time:
            next_line_time = time.monotonic() + LINE_EVERY_S
            print(f"{printable(title)}: {files_read:,} of {total:,}", file=sys.stderr, flush=True)

    return add
