"""What this process does as one of several ranks: who prints, and how the launcher learns its end.

Under torchrun each rank is a whole command. Rank 0 prints; the others are silent but for an error
of their own. The launcher (launch_ranks.py) reads how each rank has ended from a file, so that it
can show one message.
"""

import json
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfstep.cli.output import echo
from halfstep.errors import RankLostError
from halfstep.utils.files import write_text
from halfstep.utils.rank_environment import (
    attempt_of_environment,
    rank_count_of_environment,
    rank_of_environment,
)

# The folder for the endings of the ranks: set by `halfstep … --ranks` for the ranks it starts.
ENDINGS_VARIABLE = "HALFSTEP_RANK_ENDINGS"

LAUNCHER_CHECK_S = 1.0  # how soon a rank notices that its launcher was killed


@dataclass(frozen=True)
class RankEnding:
    """How a rank has ended."""

    rank: int
    exit_code: int
    time: float = 0.0
    message: str = ""
    """Its error, in the words that the command shows; "" without one."""
    is_lost: bool = False
    """The error says only that another rank was missing."""
    is_shown: bool = True
    """The rank has printed what there is to say."""


def has_launcher() -> bool:
    """Whether `halfstep … --ranks` has started this process as a rank."""
    return ENDINGS_VARIABLE in os.environ


class RankProcess:
    """This process as a rank. Alone it prints and ends as any command does."""

    def __init__(self, *, debug: bool) -> None:
        self.debug = debug
        self.rank = rank_of_environment()
        self.error_stream = sys.stderr
        if self.rank > 0:
            sys.stdout = sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
        if has_launcher() and self.rank == 0:
            _stop_with_launcher()

    def end(self, code: object) -> int:
        """Under the launcher: all ranks end, with an exit code that they agree on.

        The process's own is 0: nothing has failed that could be tried again.
        """
        write_ending(RankEnding(self.rank, code if isinstance(code, int) else int(bool(code))))
        return 0

    def show_error(self, error: Exception, text: str, *, agreed: bool, exit_code: int) -> int:
        """Shows an error of this rank, or leaves that to the launcher. The process's exit code."""
        is_lost = isinstance(error, RankLostError)
        is_shown = agreed or not has_launcher()
        # That a rank was lost is worth one message: the lost rank has its own.
        if is_shown and not (is_lost and self.rank > 0):
            prefix = "" if self.debug else f"halfstep: {self._name(agreed=agreed)}"
            echo(f"{prefix}{text}", file=self.error_stream)
        if not has_launcher():
            return exit_code
        write_ending(RankEnding(self.rank, exit_code, time.time(), text, is_lost, is_shown))
        return 0 if agreed else exit_code

    def _name(self, *, agreed: bool) -> str:
        """The rank, where the error may be its alone."""
        is_alone = rank_count_of_environment() == 1
        return "" if is_alone or (agreed and self.rank == 0) else f"rank {self.rank}: "


def write_ending(ending: RankEnding) -> None:
    """Writes how this rank has ended, for the launcher."""
    path = _ending_path(Path(os.environ[ENDINGS_VARIABLE]), attempt_of_environment(), ending.rank)
    with suppress(OSError):  # the launcher is gone, or the disk is full: the exit code says enough
        write_text(path, json.dumps(asdict(ending)))


def read_endings(folder: Path, attempt: int) -> dict[int, RankEnding]:
    """The endings of an attempt by rank. A rank that was killed has none."""
    endings: dict[int, RankEnding] = {}
    for path in folder.glob(_ending_path(folder, attempt, "*").name):
        with suppress(OSError, ValueError, TypeError):
            values: dict[str, Any] = json.loads(path.read_text("utf-8"))
            ending = RankEnding(**values)
            endings[ending.rank] = ending
    return endings


def describe_failure(endings: dict[int, RankEnding], rank_count: int) -> str:
    """Which rank failed, and why: the first error that is not another rank's loss."""
    errors = sorted((e for e in endings.values() if e.message), key=lambda e: e.time)
    own_errors = [e for e in errors if not e.is_lost]
    if len(own_errors) == rank_count and len({e.message for e in own_errors}) == 1:
        return own_errors[0].message  # none of them is to blame
    if own_errors:
        return f"rank {own_errors[0].rank}: {own_errors[0].message}"
    missing = [str(rank) for rank in range(rank_count) if rank not in endings]
    if missing:
        return (
            f"rank {', '.join(missing)}: ended without a message, as a process does that was "
            "killed, by the system where memory is short for instance"
        )
    if errors:
        return f"rank {errors[0].rank}: {errors[0].message}"
    return "a rank has failed without a message"


def note_new_attempt() -> None:
    """On rank 0 of ranks that were started again: says why, and that the run goes on."""
    attempt = attempt_of_environment()
    if attempt == 0:
        return
    reason = "a rank has ended"
    if has_launcher():
        folder = Path(os.environ[ENDINGS_VARIABLE])
        endings = read_endings(folder, attempt - 1)
        reason = describe_failure(endings, rank_count_of_environment())
    echo(
        f"note: {reason}\nnote: all ranks are started again, for the {_ordinal(attempt)} time; "
        "the run goes on from its newest checkpoint, or begins",
        err=True,
    )


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def _ending_path(folder: Path, attempt: int, rank: object) -> Path:
    return folder / f"attempt-{attempt}-rank-{rank}.json"


def _stop_with_launcher() -> None:
    """If the launcher is killed, rank 0 gets SIGTERM: all ranks stop with it, and it saves.

    Linux can send a signal by itself (PR_SET_PDEATHSIG), but sends one for each thread of the
    parent, and the second one ends a rank that is saving.
    """
    launcher = os.getppid()

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(LAUNCHER_CHECK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="halfstep-launcher-watch", daemon=True).start()
