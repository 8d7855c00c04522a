"""Charts with one lane for each precision: differences, bars of time and memory, skipped steps."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from halfstep.report import number_format as fmt
from halfstep.report.axis import Axis, linear_axis
from halfstep.report.line_chart import DRAWING_SIZE, Mark
from halfstep.report.report_data import Report, Row

# The height at which the middle of a lane is drawn.
MIDDLE = DRAWING_SIZE // 2

# Marks of skipped steps that are nearer to one another than 1/400 of the lane become one.
SKIP_POSITIONS = 400


class Rect(NamedTuple):
    """A filled rectangle of the drawing."""

    css_class: str
    x: int
    y: int
    width: int
    height: int


class Path(NamedTuple):
    """A stroke of the drawing."""

    css_class: str
    d: str


class Lane(NamedTuple):
    """One precision. The text stands beside the drawing, and in place of it for who cannot see."""

    row: Row
    text: str
    rects: list[Rect]
    paths: list[Path]


class LaneChart(NamedTuple):
    """A figure with its lanes, and the marks of the axis below them."""

    id: str
    title: str
    note: str
    lanes: list[Lane]
    marks: list[Mark]


def difference_chart(report: Report) -> LaneChart | None:
    """Accuracy of each precision less that of the first: interval, seeds, the margin of "same"."""
    rows = [row for row in report.rows[1:] if row["difference"] is not None]
    if not rows:
        return None
    reference = report.rows[0].precision
    margin = report.margin or 0.0

    # One axis that holds every interval, every seed and the margin.
    seeds = {row.index: _differences_by_seed(report, row) for row in rows}
    values = [margin, -margin, 0.0]
    for row in rows:
        values += [*seeds[row.index], *_interval(row)]
    axis = linear_axis(values, padding=0.08)

    note = f"Accuracy less that of {reference}, in percentage points"
    if any(row["difference_interval"] is not None for row in rows):
        note += ": mean, 95 % interval, and each seed as a ring."
    else:
        note += "."
    if margin:
        note += f" The shaded zone is ±{margin:g}."
    return LaneChart(
        id="differences",
        title=f"Difference from {reference}",
        note=note,
        lanes=[_difference_lane(row, axis, margin, seeds[row.index]) for row in rows],
        marks=[_mark(axis, tick, fmt.format_signed_tick(tick)) for tick in axis.ticks()],
    )


def bar_chart(
    report: Report,
    name: str,
    *,
    title: str,
    note: str,
    format_value: Callable[[float | None], str],
) -> LaneChart | None:
    """A bar from 0 for each precision, with each run as a ring on it."""
    rows = [row for row in report.rows if row[name] is not None]
    if not rows:
        return None
    runs: dict[int, list[float]] = {}
    all_values = [1e-12]  # so that an axis of zeros has a length
    for row in rows:
        values = [run.numbers.get(name) for run in report.runs_of(row.precision)]
        runs[row.index] = [value for value in values if value is not None]
        all_values += [row[name] or 0, *runs[row.index]]
    axis = Axis(0, max(all_values) * 1.04)

    first = rows[0]
    has_ratios = False
    lanes = []
    for row in rows:
        text = format_value(row[name])
        ratio = report.ratio_to_first(name, row, first)
        if row is not first and ratio is not None:
            text = f"{text} · {fmt.format_ratio(ratio)}"
            has_ratios = True
        width = _position(axis, row[name] or 0)
        bar = Rect("bar", x=0, y=150, width=width, height=700)
        lanes.append(Lane(row, text, rects=[bar], paths=_rings(axis, runs[row.index])))
    if has_ratios:
        note += f" 0.5× is half of {first.precision}'s."
    return LaneChart(f"bars-{name.replace('_', '-')}", title, note, lanes, marks=[])


def skip_chart(report: Report) -> LaneChart | None:
    """When steps were skipped, all seeds of a precision on one lane."""
    steps: dict[int, list[int]] = {}
    for row in report.rows:
        runs = report.runs_of(row.precision)
        steps[row.index] = [step for run in runs for step in run.skipped_steps]
    rows = [row for row in report.rows if steps[row.index]]
    if not rows:
        return None

    # The axis ends at the last step that any run has recorded.
    recorded: list[float] = [1]
    for run in report.runs:
        recorded += [step for step in run.curve.get("step", ()) if step is not None]
        recorded += run.skipped_steps
    axis = Axis(0, max(recorded))

    lanes = []
    for row in rows:
        positions = {round(axis.fraction(step) * SKIP_POSITIONS) for step in steps[row.index]}
        lines = [f"M{i * DRAWING_SIZE // SKIP_POSITIONS} 100V900" for i in sorted(positions)]
        count = f"{len(steps[row.index]):,}"
        lanes.append(Lane(row, count, rects=[], paths=[Path("tick", "".join(lines))]))
    return LaneChart(
        id="skips",
        title="Skipped steps",
        note=(
            "A mark is a step whose gradients overflowed: nothing of it was kept. "
            "The number counts all seeds."
        ),
        lanes=lanes,
        marks=[_mark(axis, t, f"{t:,.0f}") for t in axis.ticks() if t == round(t)],
    )


def _difference_lane(row: Row, axis: Axis, margin: float, seeds: Sequence[float]) -> Lane:
    rects = []
    if margin:
        left = _position(axis, -margin)
        width = _position(axis, margin) - left
        rects.append(Rect("zone", x=left, y=0, width=width, height=DRAWING_SIZE))

    low, high = _interval(row)
    paths = [
        Path("zero", f"M{_position(axis, 0)} 0V{DRAWING_SIZE}"),
        Path("range", f"M{_position(axis, low)} {MIDDLE}H{_position(axis, high)}"),
        *_rings(axis, seeds),
        Path("dots", _dots(axis, [row["difference"] or 0])),
    ]
    text = fmt.format_points(row["difference"], row["difference_interval"])
    return Lane(row, text, rects, paths)


def _differences_by_seed(report: Report, row: Row) -> list[float]:
    """Accuracy less that of the first precision with the same seed, in percentage points."""
    first_runs = report.runs_of(report.rows[0].precision)
    first_accuracy = {run.seed: run.numbers.get("acc") for run in first_runs}
    differences = []
    for run in report.runs_of(row.precision):
        accuracy = run.numbers.get("acc")
        base = first_accuracy.get(run.seed)
        if accuracy is not None and base is not None:
            differences.append((accuracy - base) * 100)
    return differences


def _interval(row: Row) -> tuple[float, float]:
    """Both ends of the interval of a row's difference."""
    middle = row["difference"] or 0.0
    half_width = row["difference_interval"] or 0.0
    return middle - half_width, middle + half_width


def _position(axis: Axis, value: float) -> int:
    return round(axis.fraction(value) * DRAWING_SIZE)


def _dots(axis: Axis, values: Sequence[float]) -> str:
    """A stroke of length 0 for each value: its round ends make a circle at any width."""
    return "".join(f"M{_position(axis, value)} {MIDDLE}h0" for value in values)


def _rings(axis: Axis, values: Sequence[float]) -> list[Path]:
    """A ring for each of several runs: a circle, and a smaller one on top as its hole."""
    if len(values) < 2:
        return []
    dots = _dots(axis, values)
    return [Path("ring", dots), Path("hole", dots)]


def _mark(axis: Axis, value: float, text: str) -> Mark:
    return Mark(f"{axis.fraction(value) * 100:.1f}", text)
