"""The table of precisions: one list of columns for the page, Markdown and whoever else prints it."""

from collections.abc import Callable
from html import escape
from typing import NamedTuple

from halfstep.report import html as markup
from halfstep.report import text as numbers
from halfstep.report.load__values import Report, Row

# A sign besides the colour: not everybody sees the difference between green and red.
SIGNS = {"reference": "•", "same": "=", "better": "▲", "worse": "▼", "unknown": "?", "failed": "✕"}


class Column(NamedTuple):
    """A heading, the numbers it needs (shown when some row has one), and a row's text."""

    head: str
    needs: str
    cell: Callable[[Row], str]


COLUMNS = (
    Column(
        "Accuracy, %",
        "acc",
        lambda r: numbers.spread(r["acc"], r["acc_interval"]).removesuffix(" %"),
    ),
    Column(
        "Difference",
        "difference",
        lambda r: numbers.points(r["difference"], r["difference_interval"]),
    ),
    Column("Loss", "loss", lambda r: numbers.fixed(r["loss"], 4)),
    Column("ms/step", "ms_per_step", lambda r: numbers.short(r["ms_per_step"])),
    Column("s/epoch", "s_per_epoch", lambda r: numbers.short(r["s_per_epoch"])),
    Column("samples/s", "samples_per_s", lambda r: numbers.short(r["samples_per_s"])),
    Column("Peak memory", "peak_memory", lambda r: numbers.size(r["peak_memory"])),
    Column("Skipped", "skipped", lambda r: numbers.count(r["skipped"])),
    Column("Final scale", "final_scale", lambda r: numbers.scale(r["final_scale"])),
    Column("Runs", "n", lambda r: _runs(r)),
)


def columns(report: Report) -> list[Column]:
    """Those that some row has a number for; how many runs, only where the rows differ in it."""
    alike = len({(row["n"], row["failed"]) for row in report.rows}) == 1 and not any(
        r["failed"] for r in report.rows
    )
    found = [c for c in COLUMNS if any(row[c.needs] is not None for row in report.rows)]
    return [c for c in found if c.needs != "n" or not alike]


def first(report: Report) -> str:
    """What the first column holds: a log alone does not say its precision."""
    return "Run" if report.alone else "Precision"


def verdict(row: Row) -> str:
    """The sign and the words; a number is not parted from its ±."""
    return f"{SIGNS.get(row.kind, '?')} {row.verdict or 'no verdict'}".replace(
        " ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"
    )


def html_table(report: Report) -> str:
    """The same columns on the page."""
    shown, judged = columns(report), not report.alone
    heads = [first(report), *(["Verdict"] if judged else []), *(escape(c.head) for c in shown)]
    rows = (
        _row(row, shown, judged=judged, chosen=row.precision == report.recommended)
        for row in report.rows
    )
    return markup.table(
        "Results by precision", heads, rows, kind="results judged" if judged else "results"
    )


def _row(row: Row, shown: list[Column], *, judged: bool, chosen: bool) -> str:
    kind = row.kind if row.kind in SIGNS else "unknown"
    said = [markup.cell(verdict(row), f"v-{kind}")] if judged else []
    name = markup.key(row.index) + markup.name(row.precision)
    return markup.row(name, [*said, *(markup.cell(c.cell(row)) for c in shown)], chosen=chosen)


def _runs(row: Row) -> str:
    failed = row["failed"] or 0
    return numbers.count(row["n"]) + (f", {numbers.count(failed)} failed" if failed else "")
