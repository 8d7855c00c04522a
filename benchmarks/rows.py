"""Rows of a comparison, each in a process of its own: started in waves, measured one at a time, written down at once.

A child imports and makes its CUDA context, says it is ready, and waits for the word. A wave does that together; while
one of it measures, the others wait and nothing else starts. A row that fails is a row with an error.
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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from measure import conditions

Figures = dict[str, Any]
READY, DONE = "@ready", "@row "
WAVE = 8  # children: importing one by one would take longer than measuring
LEAST_S = 20.0  # that a row gets, however little time is left when it starts


def arguments(doc: str | None, *, seconds: float, row_seconds: float) -> argparse.ArgumentParser:
    """The options that every script of rows has."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
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
    parser.add_argument(
        "--wait", action="store_true", help=argparse.SUPPRESS
    )  # a child of the driver
    return parser


def serve(name: str, measure: Callable[[], Figures], *, wait: bool) -> None:
    """In a child: ready, wait for the word, measure, answer with one line of JSON."""
    if wait:
        print(READY, flush=True)
        if not sys.stdin.readline():
            return  # the driver has gone
    start = time.perf_counter()
    try:
        figures = measure()
    except Exception as error:
        figures = {"error": f"{type(error).__name__}: {first_line(error)}"}
        print(f"{name}: {error!r}", file=sys.stderr)
    print(
        f"{DONE}{json.dumps({'row': name, **figures, 'took_s': round(time.perf_counter() - start, 1)})}",
        flush=True,
    )


def first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")[
        :300
    ]


def context(device: torch.device) -> None:
    """Create the CUDA context and load its first kernel, which are nobody's to pay for."""
    torch.ones(8, device=device).sum().item()


@dataclass
class Child:
    """A process that measures one row."""

    name: str
    process: "subprocess.Popen[str]"
    errors: IO[str]

    @classmethod
    def start(cls, command: Sequence[str], name: str) -> "Child":
        errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (stop closes it)
        env = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        process = subprocess.Popen(
            [sys.executable, *command, "--row", name, "--wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=errors, text=True, env=env,
        )  # fmt: skip
        return cls(name, process, errors)

    def ready(self, timeout_s: float) -> None:
        """Wait until it is; one that dies before says so when it is measured."""
        self._read(READY, timeout_s)

    def measure(self, timeout_s: float) -> Figures:
        """Its figures; an error where it died, said nothing or took too long."""
        try:
            self._go()
            line = self._read(DONE, timeout_s)
            if line is not None:
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(5)  # it tidies up; the device is the next row's only then
                return dict(json.loads(line[len(DONE) :]))
            said = (
                f"no figures in {timeout_s:g} s, exit {self.process.wait()}: {self._last_words()}"
            )
            return {"row": self.name, "error": said}
        finally:
            self.stop()

    def _read(self, mark: str, timeout_s: float) -> str | None:
        """The next line that begins with `mark`; None when there is none until it ends, or is ended for being late."""
        assert self.process.stdout is not None
        late = threading.Timer(timeout_s, self.process.kill)
        late.start()
        try:
            return next((line for line in self.process.stdout if line.startswith(mark)), None)
        finally:
            late.cancel()

    def _go(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died; reading will tell
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def _last_words(self) -> str:
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().splitlines() if line.strip()]
        crash = [i for i, line in enumerate(lines) if line.startswith("Fatal Python error")]
        if crash:  # what it was, and the innermost frames of the thread in which it was
            here = next(
                (i for i, line in enumerate(lines) if line.startswith("Current thread")), crash[0]
            )
            return "; ".join([lines[crash[0]], *lines[here + 1 : here + 4]])[:600]
        return lines[-1][:300] if lines else "nothing said"

    def stop(self) -> None:
        self.process.kill()
        with suppress(BrokenPipeError):
            self.process.communicate()  # closes its pipes
        self.errors.close()


@dataclass
class Table:
    """The result so far: kept from the JSON where it holds rows, and written back after every one."""

    path: str | None
    head: dict[str, Any]
    rows: dict[str, Figures] = field(default_factory=dict)

    @classmethod
    def open(cls, args: argparse.Namespace, **head: Any) -> "Table":
        table = cls(args.json, {"conditions": conditions(torch.device(args.device)), **head})
        if args.json and Path(args.json).exists() and not args.again:
            kept = json.loads(Path(args.json).read_text()).get("rows", [])
            table.rows = {row["row"]: row for row in kept if "error" not in row}
        return table

    def add(self, figures: Figures) -> None:
        self.rows[figures["row"]] = {**figures, "commit": self.head["conditions"]["commit"]}
        self.save()

    def save(self, **more: Any) -> None:
        """A reader never sees half a file: the rename is atomic."""
        self.head |= more
        if self.path:
            target = Path(self.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            part = target.with_suffix(".part")
            part.write_text(
                json.dumps({**self.head, "rows": list(self.rows.values())}, indent=1) + "\n"
            )
            part.replace(target)

    def value(self, row: str, key: str = "seconds") -> float | None:
        """A figure, None where the row failed or was not measured."""
        found = self.rows.get(row, {}).get(key)
        return float(found) if isinstance(found, int | float) else None


def drive(
    command: Sequence[str],
    names: Sequence[str],
    table: Table,
    args: argparse.Namespace,
    show: Callable[[Figures], str],
) -> None:
    """Measure the rows that are missing, one after the other, until the time is spent."""
    start, todo = time.perf_counter(), deque(name for name in names if name not in table.rows)
    wave: deque[Child] = deque()
    try:
        while (todo or wave) and (left_s := args.seconds - (time.perf_counter() - start)) > 0:
            if not wave:
                wave.extend(
                    Child.start(command, todo.popleft()) for _ in range(min(WAVE, len(todo)))
                )
                for child in wave:
                    child.ready(args.row_seconds)
            figures = wave.popleft().measure(min(args.row_seconds, max(left_s, LEAST_S)))
            table.add(figures)
            print(show(figures), flush=True)
    finally:
        left = [child.name for child in wave] + list(todo)
        for child in wave:
            child.stop()
    table.save(left_out=left, took_s=round(time.perf_counter() - start, 1))
    if left:
        print(
            f"left out after {args.seconds:g} s, the same command goes on: {', '.join(left)}",
            flush=True,
        )


def verdict(value: float | None, must: float, aim: float | None, *, least: bool = False) -> str:
    """Against a limit that must hold and one to aim for; `least`: larger is better."""
    if value is None:
        return "no figure"
    sign = -1 if least else 1
    if aim is not None and sign * value <= sign * aim:
        return "pass, aim reached"
    return "pass" if sign * value <= sign * must else "FAIL"


def checks(
    limits: Sequence[tuple[str, float | None, float, float | None, bool]],
) -> list[dict[str, Any]]:
    """Each limit with what was measured: printed, and returned for the JSON."""
    found = []
    for name, value, must, aim, least in limits:
        word = verdict(value, must, aim, least=least)
        shown, sign = "–" if value is None else f"{value:.3f}", "≥" if least else "≤"
        aimed = "" if aim is None else f", aim {sign} {aim:g}"
        print(f"{word:18} {name:56} {shown:>9}  ({sign} {must:g}{aimed})", flush=True)
        found.append({"check": name, "value": value, "must": must, "aim": aim, "verdict": word})
    return found


def ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b
