"""The columns of the table of results, one list for the page and for Markdown."""

from collections.abc import Callable
from typing import NamedTuple

from halfstep.report import number_format as fmt
from halfstep.report.report_data import Report, Row

# A sign beside the colour: not everybody sees the difference between green and red.
VERDICT_SIGNS = {
    "reference": "•",
    "same": "=",
    "better": "▲",
    "worse": "▼",
    "unknown": "?",
    "failed": "✕",
}

NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"


class Column(NamedTuple):
    """A column that is shown when some row has the number `needs`."""

    heading: str
    needs: str
    format_cell: Callable[[Row], str]


def _accuracy(row: Row) -> str:
    return fmt.format_share(row["acc"], row["acc_interval"]).removesuffix(" %")


def _difference(row: Row) -> str:
    return fmt.format_points(row["difference"], row["difference_interval"])


def _run_count(row: Row) -> str:
    count = fmt.format_count(row["n"])
    if not row["failed"]:
        return count
    return f"{count}, {fmt.format_count(row['failed'])} failed"


COLUMNS = (
    Column("Accuracy, %", "acc", _accuracy),
    Column("Difference", "difference", _difference),
    Column("Loss", "loss", lambda row: fmt.format_fixed(row["loss"], 4)),
    Column("ms/step", "ms_per_step", lambda row: fmt.format_number(row["ms_per_step"])),
    Column("s/epoch", "s_per_epoch", lambda row: fmt.format_number(row["s_per_epoch"])),
    Column("samples/s", "samples_per_s", lambda row: fmt.format_number(row["samples_per_s"])),
    Column("Peak memory", "peak_memory", lambda row: fmt.format_bytes(row["peak_memory"])),
    Column("Skipped", "skipped", lambda row: fmt.format_count(row["skipped"])),
    Column("Final scale", "final_scale", lambda row: fmt.format_loss_scale(row["final_scale"])),
    Column("Runs", "n", _run_count),
)


def visible_columns(report: Report) -> list[Column]:
    """The columns with a number in some row. "Runs" only where the rows differ, or runs failed."""
    run_counts = {(row["n"], row["failed"]) for row in report.rows}
    any_failed = any(row["failed"] for row in report.rows)
    same_run_counts = len(run_counts) == 1 and not any_failed

    columns = []
    for column in COLUMNS:
        if column.needs == "n" and same_run_counts:
            continue
        if any(row[column.needs] is not None for row in report.rows):
            columns.append(column)
    return columns


def first_heading(report: Report) -> str:
    """The heading of the names: a log alone does not say its precision."""
    return "Run" if report.alone else "Precision"


def verdict_text(row: Row) -> str:
    """The verdict after its sign. No line break parts a number from its ±, or from "about"."""
    sign = VERDICT_SIGNS.get(row.kind, "?")
    text = f"{sign} {row.verdict or 'no verdict'}"
    text = text.replace(" ± ", f"{NO_BREAK_SPACE}±{NO_BREAK_SPACE}")
    return text.replace(" about ", f" about{NO_BREAK_SPACE}")


def verdict_kind(row: Row) -> str:
    """The kind of the verdict if it is a known one: the page makes a class of CSS from it."""
    return row.kind if row.kind in VERDICT_SIGNS else "unknown"
