"""How far something countable is: a bar on a terminal, elsewhere a line now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from halfstep.utils.text import printable

LINE_EVERY_S = 10.0
MIN_FILES = 200  # fewer are read before a bar is worth it


def reading_progress(
    title: str, total: int, *, visible: bool
) -> AbstractContextManager[Callable[[int], None]]:
    """A function that adds the number of files read since its last call."""
    return count_progress(title, total, visible=visible and total >= MIN_FILES)


@contextmanager
def count_progress(title: str, total: int, *, visible: bool) -> Iterator[Callable[[int], None]]:
    """A function that adds what was done since its last call, out of `total`."""
    if not visible:
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
    done = 0
    next_line_time = time.monotonic() + LINE_EVERY_S

    def add(count: int) -> None:
        nonlocal done, next_line_time
        done += count
        if time.monotonic() >= next_line_time:
            next_line_time = time.monotonic() + LINE_EVERY_S
            print(f"{printable(title)}: {done:,} of {total:,}", file=sys.stderr, flush=True)

    return add
