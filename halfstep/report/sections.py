"""What some sections of the page show: figures, notes and rows that only the page has."""

from typing import NamedTuple

from halfstep.report import number_format as fmt
from halfstep.report.lane_charts import LaneChart, bar_chart
from halfstep.report.report_data import PROCESS_MEMORY_NOISE, Report, Row, Run
from halfstep.report.sentences import Fact
from halfstep.report.series import Curves

MEMORY_NOTES = {
    "device": "Allocated on the device",
    "process": "By which the process grew during the run",
}

RUN_HEADINGS = ("Run", "Accuracy", "Loss", "ms/step", "Memory", "Skipped")


class Choices(NamedTuple):
    """What halfstep chose by itself for a precision."""

    precision: str
    facts: list[Fact]


def advice_figures(report: Report) -> list[Fact]:
    """The figures behind the recommendation; of a single run, its own."""
    precision = report.recommended
    if report.alone and report.rows:
        precision = report.rows[0].precision
    rows = [row for row in report.rows if row.precision == precision]
    if not rows:
        return []

    row = rows[0]
    figures = [("accuracy", fmt.format_share(row["acc"], row["acc_interval"]))]
    if row is report.rows[0]:
        figures += _own_figures(row)
    else:
        figures += _figures_against_first(report, row)
    return [(label, text) for label, text in figures if text != fmt.MISSING]


def _own_figures(row: Row) -> list[Fact]:
    return [
        ("loss", fmt.format_fixed(row["loss"], 4)),
        ("per step", fmt.format_ms(row["ms_per_step"])),
        ("peak memory", fmt.format_bytes(row["peak_memory"])),
        ("skipped steps", fmt.format_count(row["skipped"])),
        ("final loss scale", fmt.format_loss_scale(row["final_scale"])),
    ]


def _figures_against_first(report: Report, row: Row) -> list[Fact]:
    first = report.rows[0]
    difference = fmt.format_points(row["difference"], row["difference_interval"])
    speedup = None
    if first["ms_per_step"] is not None and row["ms_per_step"]:
        speedup = first["ms_per_step"] / row["ms_per_step"]
    memory_ratio = report.ratio_to_first("peak_memory", row, first)
    return [
        (f"points against {first.precision}", difference),
        (f"the speed of {first.precision}", fmt.format_ratio(speedup)),
        (f"the memory of {first.precision}", fmt.format_ratio(memory_ratio)),
    ]


def cost_charts(report: Report) -> list[LaneChart]:
    """Time and memory of each precision."""
    has_rings = any(len(report.runs_of(row.precision)) > 1 for row in report.rows)
    time_note = "Shorter is better."
    if has_rings:
        time_note = "The bar is the median, each run a ring. Shorter is better."

    memory_kinds = {run.memory_kind for run in report.runs}
    notes = [note for kind, note in MEMORY_NOTES.items() if kind in memory_kinds]
    memory_note = "; ".join(notes) or "At its highest"
    if has_rings:
        memory_note += "; the bar is the median, each run a ring"
    memory_note += "."
    if report.measures_process_memory:
        memory_note += f" Differences below {PROCESS_MEMORY_NOISE >> 20} MiB mean nothing."
    memory_note += " Shorter is better."

    time_chart = bar_chart(
        report,
        "ms_per_step",
        title="Time per step",
        note=time_note,
        format_value=fmt.format_ms,
    )
    memory_chart = bar_chart(
        report,
        "peak_memory",
        title="Peak memory",
        note=memory_note,
        format_value=fmt.format_bytes,
    )
    return [chart for chart in (time_chart, memory_chart) if chart is not None]


def loss_scale_note(report: Report, curves: Curves, *, has_chart: bool) -> str:
    """Scales that never moved, where no chart shows them, and precisions without a scale."""
    sentences = []
    if not has_chart:
        for line in curves.lines:
            scale = fmt.format_loss_scale(line.known_values()[0])
            sentences.append(f"{line.name}: {scale} at every step.")
    scaled = {line.index for line in curves.lines}
    unscaled = ", ".join(row.precision for row in report.rows if row.index not in scaled)
    if unscaled:
        sentences.append(f"Without loss scaling: {unscaled}.")
    return " ".join(sentences)


def automatic_choices(report: Report) -> list[Choices]:
    """For each precision, the choices of its first run that has recorded any."""
    choices = {}
    for row in report.rows:
        recorded = [run.choices for run in report.runs_of(row.precision) if run.choices]
        if recorded:
            choices[row.precision] = Choices(row.precision, list(recorded[0].items()))
    return list(choices.values())


def run_cells(run: Run) -> list[str]:
    """A run's row in the table of every run, without its name."""
    numbers = run.numbers
    return [
        fmt.format_percent(numbers.get("acc")),
        fmt.format_fixed(numbers.get("loss"), 4),
        fmt.format_number(numbers.get("ms_per_step")),
        fmt.format_bytes(numbers.get("peak_memory")),
        fmt.format_count(numbers.get("skipped")),
    ]
