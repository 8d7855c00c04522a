"""The table at the end of a comparison: drawn by rich on a terminal, aligned text elsewhere."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from halfstep.compare.summary import shorten_error
from halfstep.utils.text import printable

if TYPE_CHECKING:
    from rich.console import Console

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

# A narrower terminal gets the table in two, costs first, then scores, or in more.
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

    console = Console(highlight=False)
    if console.width >= MIN_TERMINAL_WIDTH:
        _print_columns(console, summary, COLUMNS[1:])
    else:
        _print_columns(console, summary, COST_COLUMNS)
        _print_columns(console, summary, SCORE_COLUMNS[1:])
    for line in [*list_errors(summary), recommendation_line(summary)]:
        console.print(line, markup=False, emoji=False)


def _print_columns(
    console: "Console", summary: Mapping[str, Any], columns: tuple[str, ...]
) -> None:
    """Prints the precisions with these columns: as two tables where a word would be cut."""
    from rich.table import Table
    from rich.text import Text

    rows = [dict(zip(COLUMNS, format_row(row), strict=True)) for row in summary["rows"]]
    names = ("precision", *columns)
    table = Table()
    for name in names:
        has_spaces = any(" " in text for text in [name, *(row[name] for row in rows)])
        justify: Literal["left", "right"] = "left" if name in LEFT_ALIGNED else "right"
        table.add_column(name, justify=justify, no_wrap=not has_spaces)
    for row, cells in zip(summary["rows"], rows, strict=True):
        styles = {"verdict": VERDICT_STYLES.get(row["verdict_kind"], "")}
        table.add_row(*(Text(cells[name], style=styles.get(name, "")) for name in names))

    # The columns that the words need. Without `options`, it would be the terminal's at most.
    endless = console.options.update_width(10_000)
    is_cut = console.measure(table, options=endless).minimum > console.width
    if is_cut and len(columns) > 1:
        half = (len(columns) + 1) // 2
        _print_columns(console, summary, columns[:half])
        _print_columns(console, summary, columns[half:])
    else:
        console.print(table)


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
