"""One lane per precision: differences with their margin, bars of time and memory, and the skipped steps."""

from collections.abc import Callable
from html import escape

from halfstep.report import html as markup
from halfstep.report import text as numbers
from halfstep.report.charts__curves import UNITS
from halfstep.report.load__values import Report, Row
from halfstep.report.series__axes import Axis, around

_CELLS = 400  # places on a lane: ticks nearer than this are one


def differences(report: Report) -> str:
    """The accuracy of each precision less the first one's, in points: interval, seeds, and the margin of "same"."""
    rows = [row for row in report.rows[1:] if row["difference"] is not None]
    if not rows:
        return ""
    reference, margin = report.rows[0].precision, report.margin or 0.0
    seeds = {row.index: _paired(report, row) for row in rows}
    reach = [v for row in rows for v in (*seeds[row.index], *_ends(row))]
    axis = around([*reach, margin, -margin, 0.0], pad=0.08)
    lanes = [_difference(row, axis, margin, seeds[row.index]) for row in rows]
    many = any(row["difference_interval"] is not None for row in rows)
    note = f"Accuracy less that of {reference}, in percentage points" + (
        ": mean, 95 % interval, and each seed as a ring." if many else "."
    )
    note += f" The shaded zone is ±{margin:g}." if margin else ""
    marks = [(axis.at(v), numbers.tick(v, signed=True)) for v in _few(axis)]
    return _figure("differences", f"Difference from {reference}", note, lanes, marks)


def bars(
    report: Report, name: str, title: str, note: str, write: Callable[[float | None], str]
) -> str:
    """A bar per precision from 0, each run as a ring on it."""
    rows = [row for row in report.rows if row[name] is not None]
    if not rows:
        return ""
    each = {
        row.index: [
            v for run in report.of(row.precision) if (v := run.numbers.get(name)) is not None
        ]
        for row in rows
    }
    axis = Axis(
        0, max([v for row in rows for v in (row[name] or 0, *each[row.index])] + [1e-12]) * 1.04
    )
    first = rows[0]
    lanes = []
    for row in rows:
        width = round(axis.at(row[name] or 0) * UNITS)
        drawing = f'<rect class="bar" width="{width}" y="150" height="700"/>{_dots(axis, each[row.index])}'
        share = report.share(name, row, first)
        against = "" if row is first or share is None else f" · {numbers.ratio(share)}"
        lanes.append(_lane(row, drawing, write(row[name]) + against))
    return _figure(f"bars-{name.replace('_', '-')}", title, note, lanes, [])


def skips(report: Report, last: float) -> str:
    """When steps were skipped, all seeds of a precision on one lane."""
    rows = [
        row for row in report.rows if any(run.skipped_steps for run in report.of(row.precision))
    ]
    if not rows:
        return ""
    axis = Axis(0, max(last, *(s for run in report.runs for s in run.skipped_steps), 1))
    lanes = []
    for row in rows:
        steps = [s for run in report.of(row.precision) for s in run.skipped_steps]
        places = sorted({round(axis.at(s) * _CELLS) * UNITS // _CELLS for s in steps})
        ticks = "".join(f"M{x} 100V900" for x in places)
        lanes.append(_lane(row, f'<path class="tick" d="{ticks}"/>', f"{len(steps):,}"))
    marks = [(axis.at(v), f"{v:,.0f}") for v in _few(axis) if v == round(v)]
    note = "A mark is a step whose gradients overflowed: nothing of it was kept. The number counts all seeds."
    return _figure("skips", "Skipped steps", note, lanes, marks)


def _difference(row: Row, axis: Axis, margin: float, seeds: list[float]) -> str:
    def x(value: float) -> int:
        return round(axis.at(value) * UNITS)

    low, high = _ends(row)
    zone = (
        f'<rect class="zone" x="{x(-margin)}" width="{x(margin) - x(-margin)}" height="{UNITS}"/>'
        if margin
        else ""
    )
    drawing = f'{zone}<path class="zero" d="M{x(0)} 0V{UNITS}"/><path class="range" d="M{x(low)} 500H{x(high)}"/>'
    drawing += f'{_dots(axis, seeds)}<path class="dots" d="M{x(row["difference"] or 0)} 500h0"/>'
    return _lane(row, drawing, numbers.points(row["difference"], row["difference_interval"]))


def _paired(report: Report, row: Row) -> list[float]:
    """Accuracy less the first precision's with the same seed, in points."""
    first = {run.seed: run.numbers.get("acc") for run in report.of(report.rows[0].precision)}
    pairs = [(run.numbers.get("acc"), first.get(run.seed)) for run in report.of(row.precision)]
    return [(a - b) * 100 for a, b in pairs if a is not None and b is not None]


def _ends(row: Row) -> tuple[float, float]:
    middle, half = row["difference"] or 0.0, row["difference_interval"] or 0.0
    return middle - half, middle + half


def _dots(axis: Axis, values: list[float]) -> str:
    """Rings: round at any width, as strokes are; the smaller one on top makes the hole."""
    if len(values) < 2:
        return ""
    d = "".join(f"M{round(axis.at(v) * UNITS)} 500h0" for v in values)
    return f'<path class="ring" d="{d}"/><path class="hole" d="{d}"/>'


def _lane(row: Row, drawing: str, value: str) -> str:
    """Name, drawing, number: the number is the drawing's alternative text."""
    return (
        f'<li class="s s{row.index % 8} k{row.index}"><span class="name">{markup.name(row.precision)}</span>'
        f'<span class="value">{escape(value)}</span>'
        f'<svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" aria-hidden="true">{drawing}</svg></li>'
    )


def _figure(
    id: str, title: str, note: str, lanes: list[str], marks: list[tuple[float, str]]
) -> str:
    axis = "".join(
        f'<span style="left:{at * 100:.1f}%">{escape(word)}</span>' for at, word in marks
    )
    foot = f'<li class="axis" aria-hidden="true"><div>{axis}</div></li>' if axis else ""
    return (
        f'<figure class="lanes" id="{id}"><figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p></figcaption>'
        f"<ul>{''.join(lanes)}{foot}</ul></figure>"
    )


def _few(axis: Axis) -> list[float]:
    return axis.ticks(6)
