"""The table at the end: drawn by rich on a terminal, aligned text anywhere else."""

from collections.abc import Mapping
from typing import Any

from halfstep.compare.summary import short

HEADER = (
    "precision", "ms/step", "s/epoch", "samples/s", "peak memory", "loss", "accuracy", "difference", "skipped",
    "final scale", "verdict",
)  # fmt: skip
_WIDE = 150  # columns of a terminal that takes the table whole; a narrower one gets it in two
_COSTS = ("ms/step", "s/epoch", "samples/s", "peak memory", "skipped", "final scale")
_HALVES = [("precision", *_COSTS), tuple(name for name in HEADER if name not in _COSTS)]
_STYLES = {"same": "green", "better": "green", "worse": "red", "failed": "red", "unknown": "yellow"}


def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    """A row as text; a dash where there is no number."""
    return (
        row["precision"],
        _number(row["ms_per_step"], ".2f"),
        _number(row["s_per_epoch"], ".2f"),
        _number(row["samples_per_s"], ",.0f"),
        "-" if row["peak_memory"] is None else f"{row['peak_memory'] / 2**20:,.0f} MiB",
        _number(row["loss"], ".4f"),
        _percent(row["acc"], row["acc_interval"]),
        _points(row["difference"], row["difference_interval"]),
        _number(row["skipped"], ".3g"),
        _number(row["final_scale"], "g"),
        row["verdict"],
    )


def text(summary: Mapping[str, Any]) -> str:
    """Columns of plain characters, one line per precision, then the recommendation."""
    lines = [HEADER, *(cells(row) for row in summary["rows"])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    made = []
    for line in lines:
        first, *numbers, last = line
        aligned = [cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)]
        made.append("  ".join([first.ljust(widths[0]), *aligned, last]))
    return "\n".join([*made, "", *errors(summary), advice(summary)])


def show(summary: Mapping[str, Any]) -> None:
    """The same on a terminal, with colours for the verdicts."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for part in [HEADER] if console.width >= _WIDE else _HALVES:
        table = Table()
        for name in part:
            table.add_column(name, justify="left" if name in ("precision", "verdict") else "right")
        for row in summary["rows"]:
            style, cell = (
                _STYLES.get(row["verdict_kind"], ""),
                dict(zip(HEADER, cells(row), strict=True)),
            )
            table.add_row(
                *(Text(cell[name], style=style if name == "verdict" else "") for name in part)
            )
        console.print(table)
    for line in [*errors(summary), advice(summary)]:
        console.print(line, markup=False)


def errors(summary: Mapping[str, Any]) -> list[str]:
    """What failed, each error whole and once, where the table's cell has cut it."""
    found: dict[str, list[str]] = {}
    for run in summary["runs"]:
        if run["status"] == "failed":
            found.setdefault(run["error"], []).append(f"{run['precision']} seed {run['seed']}")
    return [
        f"{', '.join(runs)} failed: {error}\n"
        for error, runs in found.items()
        if short(error) != error
    ]


def advice(summary: Mapping[str, Any]) -> str:
    found = summary["recommendation"]
    words = (
        f"Use {found['precision']}: {found['reason']}"
        if found["precision"]
        else f"No advice: {found['reason']}"
    )
    return words if words.endswith((".", "…")) else f"{words}."


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(share: float | None, half: float | None) -> str:
    if share is None:
        return "-"
    return f"{100 * share:.2f} %" if half is None else f"{100 * share:.2f} ± {100 * half:.2f} %"


def _points(value: float | None, half: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:+.2f}" if half is None else f"{value:+.2f} ± {half:.2f}"
