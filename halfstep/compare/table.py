"""The table at the end of a comparison: drawn by rich on a terminal, aligned text elsewhere."""

from collections.abc import Mapping
from typing import Any

from halfstep.compare.summary import shorten_error
from halfstep.utils.text import printable

COLUMNS = (
    "precision",
    "ms/step",
    "s/epoch",
    "samples/s",
    "peak memory",
    "loss",
    "accuracy",
    "difference",
    "skipped",
    "final scale",
    "verdict",
)

# A narrower terminal gets the table in two: costs first, then scores.
MIN_TERMINAL_WIDTH = 150  # columns of characters
COST_COLUMNS = ("ms/step", "s/epoch", "samples/s", "peak memory", "skipped", "final scale")
SCORE_COLUMNS = tuple(name for name in COLUMNS if name not in COST_COLUMNS)

LEFT_ALIGNED = ("precision", "verdict")
VERDICT_STYLES = {
    "same": "green",
    "better": "green",
    "worse": "red",
    "failed": "red",
    "unknown": "yellow",
}


def text(summary: Mapping[str, Any]) -> str:
    """The table as plain text: a line for each precision, then errors and the recommendation."""
    lines = [COLUMNS, *(format_row(row) for row in summary["rows"])]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned_lines: list[str] = []
    for precision, *numbers, verdict in lines:
        cells = [precision.ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(numbers, widths[1:-1], strict=True)]
        cells.append(verdict)
        aligned_lines.append("  ".join(cells))
    return "\n".join([*aligned_lines, "", *list_errors(summary), recommendation_line(summary)])


def print_table(summary: Mapping[str, Any]) -> None:
    """Prints the same on a terminal, with colours for the verdicts."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if console.width >= MIN_TERMINAL_WIDTH:
        tables: list[tuple[str, ...]] = [COLUMNS]
    else:
        tables = [("precision", *COST_COLUMNS), SCORE_COLUMNS]
    for column_names in tables:
        table = Table()
        for name in column_names:
            table.add_column(name, justify="left" if name in LEFT_ALIGNED else "right")
        for row in summary["rows"]:
            verdict_style = VERDICT_STYLES.get(row["verdict_kind"], "")
            cells = dict(zip(COLUMNS, format_row(row), strict=True))
            styled = [
                Text(cells[name], style=verdict_style if name == "verdict" else "")
                for name in column_names
            ]
            table.add_row(*styled)
        console.print(table)
    for line in [*list_errors(summary), recommendation_line(summary)]:
        console.print(line, markup=False, emoji=False)


def format_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    """The printable cells of a row, in the order of COLUMNS; a dash where there is no number."""
    memory = "-"
    if row["peak_memory"] is not None:
        memory = f"{row['peak_memory'] / 2**20:,.0f} MiB"
    return (
        printable(row["precision"]),
        _format_number(row["ms_per_step"], ".2f"),
        _format_number(row["s_per_epoch"], ".2f"),
        _format_number(row["samples_per_s"], ",.0f"),
        memory,
        _format_number(row["loss"], ".4f"),
        _format_percent(row["acc"], row["acc_interval"]),
        _format_points(row["difference"], row["difference_interval"]),
        _format_number(row["skipped"], ".3g"),
        _format_number(row["final_scale"], "g"),
        printable(row["verdict"]),
    )


def list_errors(summary: Mapping[str, Any]) -> list[str]:
    """Complete errors of failed runs, each once, where the table's cell has only their start."""
    runs_of_error: dict[str, list[str]] = {}
    for run in summary["runs"]:
        if run["status"] == "failed":
            name = printable(f"{run['precision']} seed {run['seed']}")
            runs_of_error.setdefault(run["error"], []).append(name)
    return [
        f"{', '.join(runs)} failed: {_indent(error)}\n"
        for error, runs in runs_of_error.items()
        if shorten_error(error) != error
    ]


def _indent(error: str) -> str:
    """The error with its further lines indented: none of them can pass for a line of ours."""
    return printable(error, lines=True).replace("\n", "\n  ")


def recommendation_line(summary: Mapping[str, Any]) -> str:
    recommendation = summary["recommendation"]
    reason = printable(recommendation["reason"])
    if recommendation["precision"]:
        sentence = f"Use {printable(recommendation['precision'])}: {reason}"
    else:
        sentence = f"No advice: {reason}"
    return sentence if sentence.endswith((".", "…")) else f"{sentence}."


def _format_number(value: float | None, format_spec: str) -> str:
    return "-" if value is None else format(value, format_spec)


def _format_percent(share: float | None, half_width: float | None) -> str:
    if share is None:
        return "-"
    if half_width is None:
        return f"{100 * share:.2f} %"
    return f"{100 * share:.2f} ± {100 * half_width:.2f} %"


def _format_points(difference: float | None, half_width: float | None) -> str:
    if difference is None:
        return "-"
    if half_width is None:
        return f"{difference:+.2f}"
    return f"{difference:+.2f} ± {half_width:.2f}"
