"""One line chart: coordinates, paths and texts, from which the template makes the figure.

The drawing is an SVG that is stretched to the width of the page; the words stand beside it as
HTML, so that they keep their size.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from halfstep.report.axis import Axis
from halfstep.report.number_format import format_tick
from halfstep.report.series import Curves, Series, Values

# Width and height of a drawing in its own units. The page stretches it; strokes keep their width.
DRAWING_SIZE = 1000

# With fewer points than this, each is a dot.
MAX_DOTS = 16

# Marks of all lines together, as far as each has two: on a phone they are 10 pixels apart.
MAX_MARKS = 20

# More lines than this have no names at their ends: they would not fit beside the drawing.
MAX_END_NAMES = 8

# "O2+bf16+kahan" has room, the longest name of a precision that comes with halfstep.
MAX_END_CHARACTERS = 14

# The least distance between two names at the ends, in percent of the drawing's height.
END_NAME_DISTANCE = 9.0

# Widths of lines in pixels. The first is the widest and lies at the bottom, so that it can be seen
# under lines that coincide with it.
FIRST_WIDTH = 3.5
OTHER_WIDTH = 2

# Rows of the table that shows the same values.
MAX_TABLE_ROWS = 8

Point = tuple[int, int]


class Mark(NamedTuple):
    """A text beside an axis, at a position in percent of its length."""

    percent: str
    text: str


class DrawnLine(NamedTuple):
    """One precision in the drawing. Each path is the `d` of an SVG path; "" where there is none."""

    row_index: int
    band_paths: list[str]
    line_path: str
    dots_path: str
    stroke_width: float  # pixels
    marks: list["Place"]


class Place(NamedTuple):
    """A place of the drawing, in percent from the left and from the bottom."""

    left: str
    bottom: str


class EndName(NamedTuple):
    """The name of a line beside its end; both places in percent from the top.

    The name is as near to the line as the other names allow.
    """

    row_index: int
    name: str
    line_top: str
    name_top: str


class TableRow(NamedTuple):
    """A place of the x axis and the value of each line there."""

    heading: str
    cells: list[str]


@dataclass(frozen=True)
class LineChart:
    """What to draw, and how its numbers are written."""

    id: str
    title: str
    note: str
    curves: Curves
    x_name: str  # "step" or "epoch"
    y_axis: Axis
    kind: str  # tells the page's script how to write a value: "number", "percent" or "scale"
    format_value: Callable[[float | None], str]
    format_tick: Callable[[float], str] = format_tick
    stairs: bool = False  # a value holds until the next one; without it, lines are straight

    @property
    def x_axis(self) -> Axis:
        first = self.curves.x[0] if self.x_name == "epoch" else 0.0
        last = self.curves.x[-1]
        if last > first:
            return Axis(first, last)
        return Axis(first - 0.5, first + 0.5)  # a single point is drawn in the middle

    def y_marks(self) -> list[Mark]:
        """The ticks of the y axis, from the bottom."""
        return [Mark(f"{y / 10:g}", self.format_tick(tick)) for tick, y in self._y_ticks()]

    def x_marks(self) -> list[Mark]:
        """The ticks of the x axis, from the left; steps and epochs are whole numbers."""
        marks = []
        for tick in self.x_axis.ticks():
            if tick == round(tick):
                x = round(self.x_axis.fraction(tick) * DRAWING_SIZE)
                marks.append(Mark(f"{x / 10:g}", f"{tick:,.0f}"))
        return marks

    def grid_path(self) -> str:
        """A horizontal line at each tick of the y axis."""
        return "".join(f"M0 {DRAWING_SIZE - y}H{DRAWING_SIZE}" for _, y in self._y_ticks())

    def drawn_lines(self) -> list[DrawnLine]:
        """All precisions, the first at the bottom. Each has marks where no other has them."""
        line_count = len(self.curves.lines)
        has_dots = len(self.curves.x) < MAX_DOTS and not self.stairs
        lines = []
        for position, series in enumerate(self.curves.lines):
            parts = self._connected_points(series.mid)
            dots_path = ""
            if has_dots:
                dots_path = "".join(f"M{x} {y}h0" for part in parts for x, y in part)
            lines.append(
                DrawnLine(
                    row_index=series.index,
                    band_paths=self._band_paths(series),
                    line_path="".join(_path(part, stairs=self.stairs) for part in parts),
                    dots_path=dots_path,
                    stroke_width=self._stroke_width(position),
                    marks=self._marks(series, position) if line_count > 1 else [],
                )
            )
        return lines

    def end_names(self) -> list[EndName]:
        """The names at the ends of the lines, in their order from the bottom, none on another.

        None for a single line, and for more than fit.
        """
        if not 1 < len(self.curves.lines) <= MAX_END_NAMES:
            return []
        ends = []
        for series in self.curves.lines:
            last = [value for value in series.mid if value is not None][-1]
            height = 100 * min(1.0, max(0.0, self.y_axis.fraction(last)))
            ends.append((height, series))
        ends.sort(key=lambda end: (end[0], -end[1].index))
        heights = spread([height for height, _ in ends], END_NAME_DISTANCE)
        return [
            EndName(series.index, series.name, f"{100 - height:.4g}", f"{100 - name_height:.4g}")
            for (height, series), name_height in zip(ends, heights, strict=True)
        ]

    def description(self) -> str:
        """The chart in words, for those who cannot see it."""
        parts = []
        for series in self.curves.lines:
            values = [value for value in series.mid if value is not None]
            first = self.format_value(values[0])
            last = self.format_value(values[-1])
            parts.append(f"{series.name} from {first} to {last}")
        return f"{self.title} by {self.x_name}: " + "; ".join(parts)

    def table_rows(self) -> list[TableRow]:
        """The values at a few places: for screen readers, and for those who want to copy them."""
        count = len(self.curves.x)
        if count <= MAX_TABLE_ROWS:
            positions = list(range(count))
        else:
            last_row = MAX_TABLE_ROWS - 1
            spaced = {round(i * (count - 1) / last_row) for i in range(MAX_TABLE_ROWS)}
            positions = sorted(spaced)
        rows = []
        for i in positions:
            cells = [self._table_cell(series, i) for series in self.curves.lines]
            rows.append(TableRow(f"{self.curves.x[i]:,.0f}", cells))
        return rows

    def script_data(self) -> dict[str, Any]:
        """What the page's script needs to show values under the pointer."""
        lines = []
        for series in self.curves.lines:
            line: dict[str, Any] = {"i": series.index, "name": series.name}
            line["mid"] = _six_digits(series.mid)
            if series.seeds > 1:
                line["lo"] = _six_digits(series.low)
                line["hi"] = _six_digits(series.high)
            lines.append(line)
        return {
            "x": _six_digits(self.curves.x),
            "xs": [self.x_axis.low, self.x_axis.high],
            "ys": [self.y_axis.low, self.y_axis.high, int(self.y_axis.log)],
            "name": self.x_name,
            "kind": self.kind,
            "lines": lines,
        }

    def _y_ticks(self) -> list[tuple[float, int]]:
        """Round values of the y axis, with their height in the drawing."""
        ticks = self.y_axis.ticks()
        return [(tick, round(self.y_axis.fraction(tick) * DRAWING_SIZE)) for tick in ticks]

    def end_name_length(self) -> int:
        """Characters of the longest name at the ends; what is longer is cut."""
        longest = max(len(series.name) for series in self.curves.lines)
        return min(longest + 1, MAX_END_CHARACTERS)

    def _stroke_width(self, position: int) -> float:
        if self.stairs:
            # Equal stairs would hide one another entirely, so that all the lower ones are wider.
            lines_on_top = len(self.curves.lines) - position - 1
            return min(9, OTHER_WIDTH + 3 * lines_on_top)
        return FIRST_WIDTH if position == 0 else OTHER_WIDTH

    def _marks(self, series: Series, position: int) -> list[Place]:
        """Places on a line, at even distances along the x axis and between those of other lines.

        Stairs have none: they differ by their widths.
        """
        if self.stairs:
            return []
        line_count = len(self.curves.lines)
        mark_count = max(2, MAX_MARKS // line_count)
        fractions = [self.x_axis.fraction(x) for x in self.curves.x]
        places = []
        for i in range(mark_count):
            left = (i + (position + 0.5) / line_count) / mark_count
            height = self._height_at(series, fractions, left)
            if height is not None and 0 <= height <= 1:
                places.append(Place(f"{100 * left:.4g}", f"{100 * height:.4g}"))
        return places

    def _height_at(self, series: Series, fractions: Sequence[float], left: float) -> float | None:
        """The height of a line as it is drawn, from 0 to 1; None where it is not."""
        after = bisect_left(fractions, left)
        if not 0 < after < len(fractions):
            return None
        low = series.mid[after - 1]
        high = series.mid[after]
        if low is None or high is None:
            return None
        share = (left - fractions[after - 1]) / (fractions[after] - fractions[after - 1])
        return (1 - share) * self.y_axis.fraction(low) + share * self.y_axis.fraction(high)

    def _connected_points(self, values: Values) -> list[list[Point]]:
        """The points of a line in the drawing, in several parts where values are missing."""
        parts: list[list[Point]] = [[]]
        for x_value, y_value in zip(self.curves.x, values, strict=True):
            if y_value is None:
                parts.append([])
                continue
            x = round(self.x_axis.fraction(x_value) * DRAWING_SIZE)
            y = round((1 - self.y_axis.fraction(y_value)) * DRAWING_SIZE)
            parts[-1].append((x, y))
        return [part for part in parts if part]

    def _band_paths(self, series: Series) -> list[str]:
        """From left to right along the highest run, and back along the lowest."""
        if series.seeds <= 1:
            return []
        low_parts = self._connected_points(series.low)
        high_parts = self._connected_points(series.high)
        paths = []
        for low, high in zip(low_parts, high_parts, strict=True):
            there = _path(high, stairs=self.stairs)
            back = _path_back(low, stairs=self.stairs)
            paths.append(f"{there}{back}Z")
        return paths

    def _table_cell(self, series: Series, i: int) -> str:
        text = self.format_value(series.mid[i])
        if series.seeds > 1 and series.low[i] != series.high[i]:
            low = self.format_value(series.low[i])
            high = self.format_value(series.high[i])
            text = f"{text} ({low} to {high})"
        return text


def spread(heights: Sequence[float], distance: float) -> list[float]:
    """Rising heights moved apart to at least this distance, each as little as possible.

    They stay within 0 to 100 where there is room. Heights that touch become a group around their
    mean; groups that touch are joined.
    """
    groups: list[list[float]] = []  # each: its middle, and the number of its names
    for height in heights:
        groups.append([height, 1])
        while len(groups) > 1:
            (low, low_count), (high, high_count) = groups[-2:]
            if high - low >= distance * (low_count + high_count) / 2:
                break
            count = low_count + high_count
            groups[-2:] = [[(low * low_count + high * high_count) / count, count]]
    # The lowest group may not begin below 0; what it pushes up is pushed again.
    result: list[float] = []
    for middle, count in groups:
        first = middle - distance * (count - 1) / 2
        result += [first + distance * i for i in range(int(count))]
    floor = 0.0
    for i, height in enumerate(result):
        result[i] = max(height, floor)
        floor = result[i] + distance
    ceiling = 100.0
    for i in reversed(range(len(result))):
        result[i] = min(result[i], ceiling)
        ceiling = result[i] - distance
    return result


def _path(points: Sequence[Point], *, stairs: bool) -> str:
    """The points from left to right. A single one is a line of length 0, which shows as a dot."""
    x, y = points[0]
    start = f"M{x} {y}"
    if len(points) == 1:
        return f"{start}h0"
    if stairs:
        return start + "".join(f"H{x}V{y}" for x, y in points[1:])
    return start + "".join(f"L{x} {y}" for x, y in points[1:])


def _path_back(points: Sequence[Point], *, stairs: bool) -> str:
    """The points from right to left, joined to the path before."""
    x, y = points[-1]
    start = f"L{x} {y}"
    if stairs:
        return start + "".join(f"V{y}H{x}" for x, y in reversed(points[:-1]))
    return start + "".join(f"L{x} {y}" for x, y in reversed(points[:-1]))


def _six_digits(values: Sequence[float | None]) -> Values:
    """Values of six digits, whole ones without a point: half the bytes of a loss scale."""
    result: Values = []
    for value in values:
        if value is None:
            result.append(None)
            continue
        rounded = float(f"{value:.6g}")
        is_whole = rounded.is_integer() and abs(rounded) < 1e15
        result.append(int(rounded) if is_whole else rounded)
    return result
