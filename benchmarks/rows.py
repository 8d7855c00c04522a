"""Rows of a comparison, each measured in a process of its own and written down at once.

A child process imports, makes its CUDA context, says that it is ready, and waits for a line. A wave
of children does that together; while one of it measures, the others wait and nothing else starts.
A row that fails is a row with an error.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch
from measure import conditions

Figures = dict[str, Any]

# What a child prints: one line when it is ready, one with its figures.
READY_MARK = "@ready"
FIGURES_MARK = "@row "

WAVE_SIZE = 8  # children; importing one by one would take longer than measuring
MIN_ROW_S = 20.0  # seconds that a row gets, however little time is left when it starts
EXIT_S = 5  # seconds for a child to tidy up after its figures

MAX_ERROR_CHARACTERS = 300
MAX_CRASH_CHARACTERS = 600
CRASH_FRAMES = 3  # innermost frames of a crash that an error shows


def build_parser(
    description: str | None, *, seconds: float, row_seconds: float
) -> argparse.ArgumentParser:
    """The options that every script of rows has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--json", help="written after every row; rows that it holds already are kept"
    )
    parser.add_argument(
        "--again", action="store_true", help="measure rows that the JSON holds once more"
    )
    parser.add_argument(
        "--seconds", type=float, default=seconds, help="start no further row after this long"
    )
    parser.add_argument(
        "--row-seconds", type=float, default=row_seconds, help="stop a row after this long"
    )
    parser.add_argument("--row", help="measure this one row here, in this process")
    # For children of measure_missing_rows.
    parser.add_argument("--wait", action="store_true", help=argparse.SUPPRESS)
    return parser


# In a child.


def serve_row(name: str, measure: Callable[[], Figures], *, wait: bool) -> None:
    """Says ready, waits for a line, measures, and answers with one line of JSON."""
    if wait:
        print(READY_MARK, flush=True)
        if not sys.stdin.readline():
            return  # the parent has gone
    start = time.perf_counter()
    try:
        figures = measure()
    except Exception as error:
        figures = {"error": describe_error(error)}
        print(f"{name}: {error!r}", file=sys.stderr)
    seconds = round(time.perf_counter() - start, 1)
    row = {"row": name, **figures, "took_s": seconds}
    print(f"{FIGURES_MARK}{json.dumps(row)}", flush=True)


def describe_error(error: Exception) -> str:
    """The class of an error and the first line of its message that holds text."""
    message = "no message"
    for line in str(error).splitlines():
        if line.strip():
            message = line.strip()[:MAX_ERROR_CHARACTERS]
            break
    return f"{type(error).__name__}: {message}"


def create_cuda_context(device: torch.device) -> None:
    """Makes the CUDA context and loads a first kernel, so that no row pays for them."""
    torch.ones(8, device=device).sum().item()


# In the parent.


@dataclass
class RowProcess:
    """A process that measures one row."""

    name: str
    process: "subprocess.Popen[str]"
    errors: IO[str]

    @classmethod
    def start(cls, command: Sequence[str], name: str) -> "RowProcess":
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (stop closes it)
        process = subprocess.Popen(
            [sys.executable, *command, "--row", name, "--wait"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
        )
        return cls(name, process, errors)

    def wait_until_ready(self, timeout_s: float) -> None:
        """A child that dies before it is ready says so when it is measured."""
        self._read_line(READY_MARK, timeout_s)

    def measure(self, timeout_s: float) -> Figures:
        """Its figures; an error where it died, printed none or took too long."""
        try:
            self._send_start()
            line = self._read_line(FIGURES_MARK, timeout_s)
            if line is None:
                code = self.process.wait()
                error = f"no figures in {timeout_s:g} s, exit {code}: {self._describe_end()}"
                return {"row": self.name, "error": error}
            # The device is free for the next row when the child has tidied up.
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(EXIT_S)
            figures: Figures = json.loads(line.removeprefix(FIGURES_MARK))
            return figures
        finally:
            self.stop()

    def stop(self) -> None:
        self.process.kill()
        with suppress(BrokenPipeError):
            self.process.communicate()  # closes its pipes
        self.errors.close()

    def _send_start(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died; reading will show it
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def _read_line(self, mark: str, timeout_s: float) -> str | None:
        """The next line that begins with `mark`; None if the child ends before."""
        assert self.process.stdout is not None
        timer = threading.Timer(timeout_s, self.process.kill)
        timer.start()
        try:
            return next((line for line in self.process.stdout if line.startswith(mark)), None)
        finally:
            timer.cancel()

    def _describe_end(self) -> str:
        """The last line of its errors; for a crash, its kind and the innermost frames."""
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        if not lines:
            return "nothing said"
        crash = _index_of_prefix(lines, "Fatal Python error")
        if crash is None:
            return lines[-1][:MAX_ERROR_CHARACTERS]
        thread = _index_of_prefix(lines, "Current thread")
        first_frame = 1 + (crash if thread is None else thread)
        frames = lines[first_frame : first_frame + CRASH_FRAMES]
        return "; ".join([lines[crash], *frames])[:MAX_CRASH_CHARACTERS]


def _index_of_prefix(lines: list[str], prefix: str) -> int | None:
    for i, line in enumerate(lines):
        if line.startswith(prefix):
            return i
    return None


@dataclass
class ResultTable:
    """The rows so far: read from the JSON where it holds some, written back after every new one."""

    path: str | None
    head: dict[str, Any]
    rows: dict[str, Figures] = field(default_factory=dict)

    @classmethod
    def open(cls, args: argparse.Namespace, **head: Any) -> "ResultTable":
        """A row with an error is left out, so that it is measured again."""
        table = cls(args.json, {"conditions": conditions(torch.device(args.device)), **head})
        if args.json and Path(args.json).exists() and not args.again:
            saved_rows = json.loads(Path(args.json).read_text()).get("rows", [])
            table.rows = {row["row"]: row for row in saved_rows if "error" not in row}
        return table

    def add(self, figures: Figures) -> None:
        self.rows[figures["row"]] = {**figures, "commit": self.head["conditions"]["commit"]}
        self.save()

    def save(self, **head: Any) -> None:
        """Writes the file. The rename is atomic: a reader never sees half a file."""
        self.head |= head
        if not self.path:
            return
        target = Path(self.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = target.with_suffix(".part")
        content = {**self.head, "rows": list(self.rows.values())}
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(target)

    def value(self, row: str, key: str = "seconds") -> float | None:
        """A figure of a row; None where the row failed or was not measured."""
        figure = self.rows.get(row, {}).get(key)
        return float(figure) if isinstance(figure, int | float) else None

    def values(self, rows: Iterable[str], key: str = "seconds") -> list[float]:
        """The figures of those rows that have one."""
        figures = [self.value(row, key) for row in rows]
        return [figure for figure in figures if figure is not None]


def measure_missing_rows(
    command: Sequence[str],
    names: Sequence[str],
    table: ResultTable,
    args: argparse.Namespace,
    format_row: Callable[[Figures], str],
) -> None:
    """Measures the rows that the table lacks, one after the other, until the time is spent."""
    start = time.perf_counter()
    waiting = deque(name for name in names if name not in table.rows)
    wave: deque[RowProcess] = deque()
    try:
        while waiting or wave:
            seconds_left = args.seconds - (time.perf_counter() - start)
            if seconds_left <= 0:
                break
            if not wave:
                for _ in range(min(WAVE_SIZE, len(waiting))):
                    wave.append(RowProcess.start(command, waiting.popleft()))
                for child in wave:
                    child.wait_until_ready(args.row_seconds)
            timeout_s = min(args.row_seconds, max(seconds_left, MIN_ROW_S))
            figures = wave.popleft().measure(timeout_s)
            table.add(figures)
            print(format_row(figures), flush=True)
    finally:
        left_out = [child.name for child in wave] + list(waiting)
        for child in wave:
            child.stop()
    table.save(left_out=left_out, took_s=round(time.perf_counter() - start, 1))
    if left_out:
        print(
            f"left out after {args.seconds:g} s, the same command goes on: {', '.join(left_out)}",
            flush=True,
        )


# Limits.


class Limit(NamedTuple):
    """A figure, the limit that it must meet and the one to aim for."""

    name: str
    value: float | None
    must: float
    aim: float | None = None
    larger_is_better: bool = False


def verdict(limit: Limit) -> str:
    """Whether the figure meets its limit and its aim, in words."""
    if limit.value is None:
        return "no figure"
    if limit.aim is not None and _meets(limit.value, limit.aim, limit.larger_is_better):
        return "pass, aim reached"
    return "pass" if _meets(limit.value, limit.must, limit.larger_is_better) else "FAIL"


def _meets(value: float, bound: float, larger_is_better: bool) -> bool:
    return value >= bound if larger_is_better else value <= bound


def check_limits(limits: Sequence[Limit]) -> list[dict[str, Any]]:
    """Prints each limit with its verdict. Returns the same for the JSON."""
    checks = []
    for limit in limits:
        word = verdict(limit)
        value = "–" if limit.value is None else f"{limit.value:.3f}"
        sign = "≥" if limit.larger_is_better else "≤"
        aim = "" if limit.aim is None else f", aim {sign} {limit.aim:g}"
        print(f"{word:18} {limit.name:56} {value:>9}  ({sign} {limit.must:g}{aim})", flush=True)
        checks.append(
            {
                "check": limit.name,
                "value": limit.value,
                "must": limit.must,
                "aim": limit.aim,
                "verdict": word,
            }
        )
    return checks


def divide(a: float | None, b: float | None) -> float | None:
    """a / b; None where one of them is missing, or b is 0."""
    if a is None or not b:
        return None
    return a / b
