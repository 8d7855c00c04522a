"""How many bytes are here: a bar on a terminal, elsewhere a line now and then on request."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from halfstep.utils.text import format_bytes, printable

LINE_EVERY_S = 10.0


@contextmanager
def byte_progress(
    title: str, total: int | None, progress: bool | None, *, lines: bool = False
) -> Iterator[Callable[[int], None]]:
    """A function that shows the number of bytes so far; any thread may call it.

    Without a terminal it does nothing, or with `lines` prints one at the start and every 10 s.
    """
    if progress is False or not (lines or sys.stderr.isatty()):
        yield lambda size: None
        return
    if not sys.stderr.isatty():
        yield _line_printer(title, total)
        return

    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task(escape(printable(title)), total=total)
        yield lambda size: bar.update(task, completed=size)


def _line_printer(title: str, total: int | None) -> Callable[[int], None]:
    of_total = "" if total is None else f" of {format_bytes(total)}"
    lock = threading.Lock()
    next_line_time = time.monotonic() + LINE_EVERY_S
    print(f"{printable(title)}: copying{of_total}", file=sys.stderr, flush=True)

    def show(size: int) -> None:
        nonlocal next_line_time
        with lock:
            is_due = time.monotonic() >= next_line_time
            if is_due:
                next_line_time = time.monotonic() + LINE_EVERY_S
        if is_due:
            line = f"{printable(title)}: {format_bytes(size)}{of_total}"
            print(line, file=sys.stderr, flush=True)

    return show
