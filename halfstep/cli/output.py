"""What is printed: columns, bars, JSON; plain text that reads the same in a pipe."""

import json
import math
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer

_VALUED = ("--resume",)  # options among those left out of a command that take their value along


def columns(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Lines with the columns below each other: the first `left` of them to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(_padded(row, widths, left)).rstrip() for row in rows]


def _padded(row: Sequence[str], widths: Sequence[int], left: int) -> list[str]:
    pairs = enumerate(zip(row, widths, strict=True))
    return [cell.ljust(width) if i < left else cell.rjust(width) for i, (cell, width) in pairs]


def bar(part: float, *, width: int = 24) -> str:
    """A bar of `part` of the width, at least one mark; of ASCII where the stream knows no other."""
    encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower()
    return ("█" if "utf" in encoding else "#") * max(1, round(part * width))


def scores(values: Mapping[str, Any]) -> str:
    """`loss 0.4321  acc 85.20 %`: what is called accuracy as a percentage."""
    return "  ".join(
        f"{name} {number(name, value)}"
        for name, value in values.items()
        if isinstance(value, float)
    )


def number(name: str, value: float) -> str:
    return (
        f"{100 * value:.2f} %" if name.removeprefix("valid_").startswith("acc") else f"{value:.4f}"
    )


def plural(n: int, word: str) -> str:
    return f"{n:,} {word}" if n == 1 else f"{n:,} {word}s"


def command(*, without: Sequence[str] = (), add: str = "") -> str:
    """The command as it was given, to be shown or repeated: less the options of `without`, with `add` behind it."""
    kept, skip = [], False
    for word in sys.argv[1:]:
        name, equals, _ = word.partition("=")
        if not skip and name not in without:
            kept.append(word)
        skip = not skip and name in without and name in _VALUED and not equals
    return " ".join([shlex.join(["halfstep", *kept]), *([add] if add else [])])


def code(end: BaseException) -> int:
    """The exit code of a run that a signal ended: 130, or what SystemExit carries."""
    if isinstance(end, SystemExit):
        return end.code if isinstance(end.code, int) else 1
    return 130


def dump(value: Any) -> None:
    """Strict JSON on standard output: NaN and inf are null."""
    typer.echo(encoded(value))


def encoded(value: Any) -> str:
    return json.dumps(_strict(value), indent=1, allow_nan=False)


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _strict(each) for name, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, list | tuple) else value
