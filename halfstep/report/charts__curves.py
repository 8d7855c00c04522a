"""Line charts as HTML: the drawing is one stretched SVG, the words are HTML beside it, so that both fit any width."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from halfstep.report import html as markup
from halfstep.report import text as numbers
from halfstep.report.series import Curves, Line, Series
from halfstep.report.series__axes import Axis

UNITS = 1000  # of the drawing, each way; strokes do not scale with it
_DOTS = 16  # with fewer places than this each is marked
_ROWS = 8  # of the table that says the same


@dataclass(frozen=True)
class Chart:
    """What to draw, and how its numbers are written; `kind` tells the page's script the same."""

    id: str
    title: str
    note: str
    curves: Curves
    x_name: str
    y_axis: Axis
    kind: str
    write: Callable[[float | None], str]
    tick: Callable[[float], str] = numbers.tick
    stairs: bool = False

    @property
    def x_axis(self) -> Axis:
        x = self.curves.x
        first = x[0] if self.x_name == "epoch" else 0.0
        return Axis(first, x[-1]) if x[-1] > first else Axis(first - 0.5, first + 0.5)


def chart(c: Chart) -> str:
    """A figure: heading, drawing, marks, and the table behind them."""
    marks = c.y_axis.ticks()
    up = [(round(c.y_axis.at(v) * UNITS), c.tick(v)) for v in marks]
    across = [(round(c.x_axis.at(v) * UNITS), f"{v:,.0f}") for v in _whole(c.x_axis.ticks(6))]
    grid = "".join(f"M0 {UNITS - y}H{UNITS}" for y, _ in up)
    lines = "".join(_line(c, each) for each in c.curves.lines)
    return (
        f'<figure class="chart" id="{c.id}"><figcaption><h3>{escape(c.title)}</h3><p>{escape(c.note)}</p></figcaption>'
        f'<div class="plot" data-chart="{c.id}">'
        f'<div class="area"><svg viewBox="0 0 {UNITS} {UNITS}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(summary(c))}"><path class="grid" d="{grid}"/>{lines}</svg></div>'
        + "".join(
            f'<span class="y" style="bottom:{y / 10:g}%">{escape(word)}</span>' for y, word in up
        )
        + "".join(
            f'<span class="x" style="left:{x / 10:g}%">{escape(word)}</span>' for x, word in across
        )
        + f'</div><p class="x-name" aria-hidden="true">{escape(c.x_name)}</p>{_table(c)}</figure>'
    )


def data(c: Chart) -> dict[str, Any]:
    """What the script needs to read values out under the pointer."""
    return {
        "x": _round(c.curves.x),
        "xs": [c.x_axis.lo, c.x_axis.hi],
        "ys": [c.y_axis.lo, c.y_axis.hi, int(c.y_axis.log)],
        "name": c.x_name,
        "kind": c.kind,
        "lines": [
            {"i": s.index, "name": s.name, "mid": _round(s.mid)}
            | ({"lo": _round(s.lo), "hi": _round(s.hi)} if s.seeds > 1 else {})
            for s in c.curves.lines
        ],
    }


def summary(c: Chart) -> str:
    """The chart in words, for those who cannot see it."""
    ends = []
    for s in c.curves.lines:
        known = [v for v in s.mid if v is not None]
        ends.append(f"{s.name} from {c.write(known[0])} to {c.write(known[-1])}")
    return f"{c.title} by {c.x_name}: " + "; ".join(ends)


def _line(c: Chart, s: Series) -> str:
    made = f'<g class="s s{s.index % 8} dash{s.index // 8 % 3} k{s.index}">'
    if s.seeds > 1:
        made += "".join(f'<path class="band" d="{d}"/>' for d in _bands(c, s))
    d = "".join(_path(part, stairs=c.stairs) for part in _parts(c, s.mid))
    under = (
        len(c.curves.lines) - c.curves.lines.index(s) - 1 if c.stairs else 0
    )  # equal stairs hide one another
    made += f'<path class="line" d="{d}"' + (
        f' style="stroke-width:{min(9, 2 + 3 * under)}"/>' if under else "/>"
    )
    if len(c.curves.x) < _DOTS and not c.stairs:
        dots = "".join(f"M{x} {y}h0" for part in _parts(c, s.mid) for x, y in part)
        made += f'<path class="dots" d="{dots}"/>'
    return made + "</g>"


def _parts(c: Chart, line: Line) -> list[list[tuple[int, int]]]:
    """Points of the drawing, cut where a value is missing."""
    parts: list[list[tuple[int, int]]] = [[]]
    for x, y in zip(c.curves.x, line, strict=True):
        if y is None:
            parts.append([])
        else:
            parts[-1].append((round(c.x_axis.at(x) * UNITS), round((1 - c.y_axis.at(y)) * UNITS)))
    return [part for part in parts if part]


def _path(points: Sequence[tuple[int, int]], *, stairs: bool) -> str:
    (x, y), rest = points[0], points[1:]
    return f"M{x} {y}" + ("".join(f"H{x}V{y}" if stairs else f"L{x} {y}" for x, y in rest) or "h0")


def _bands(c: Chart, s: Series) -> list[str]:
    """Along the highest from left to right, and back along the lowest."""
    parts = zip(_parts(c, s.lo), _parts(c, s.hi), strict=True)
    return [_path(high, stairs=c.stairs) + _back(low, stairs=c.stairs) + "Z" for low, high in parts]


def _back(points: Sequence[tuple[int, int]], *, stairs: bool) -> str:
    x, y = points[-1]
    return f"L{x} {y}" + "".join(
        f"V{y}H{x}" if stairs else f"L{x} {y}" for x, y in reversed(points[:-1])
    )


def _table(c: Chart) -> str:
    """The same in numbers, at a few places: for screen readers, and for those who want to copy them."""
    count = len(c.curves.x)
    picks = (
        sorted({round(i * (count - 1) / (_ROWS - 1)) for i in range(_ROWS)})
        if count > _ROWS
        else range(count)
    )
    rows = (
        markup.row(f"{c.curves.x[i]:,.0f}", [markup.cell(_cell(c, s, i)) for s in c.curves.lines])
        for i in picks
    )
    title = f"{c.title} in numbers"
    heads = [escape(c.x_name), *(markup.name(s.name) for s in c.curves.lines)]
    return markup.folded(title, markup.table(title, heads, rows, kind="numbers"))


def _cell(c: Chart, s: Series, i: int) -> str:
    lo, hi = s.lo[i], s.hi[i]
    return c.write(s.mid[i]) + (
        f" ({c.write(lo)} to {c.write(hi)})" if s.seeds > 1 and lo != hi else ""
    )


def _round(line: Sequence[float | None]) -> Line:
    """Six digits; whole numbers without a point: half the bytes of a loss scale."""
    short = [None if v is None else float(f"{v:.6g}") for v in line]
    return [int(v) if v is not None and v.is_integer() and abs(v) < 1e15 else v for v in short]


def _whole(ticks: Sequence[float]) -> list[float]:
    return [v for v in ticks if v == round(v)]
