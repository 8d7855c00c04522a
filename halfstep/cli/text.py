"""What is printed: columns, bars, JSON; plain text that reads the same in a pipe."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import typer


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
    return "  ".join(f"{name} {number(name, value)}" for name, value in values.items() if isinstance(value, float))


def number(name: str, value: float) -> str:
    return f"{100 * value:.2f} %" if name.removeprefix("valid_").startswith("acc") else f"{value:.4f}"


def dump(value: Any) -> None:
    """Strict JSON on standard output: NaN and inf are null."""
    typer.echo(json.dumps(_strict(value), indent=1, allow_nan=False))


def _strict(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _strict(each) for name, each in value.items()}
    return [_strict(each) for each in value] if isinstance(value, list | tuple) else value
