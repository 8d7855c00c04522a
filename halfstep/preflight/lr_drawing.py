"""The curve of a range test as an SVG picture, and as a sketch for a terminal."""

import math
from collections.abc import Sequence
from html import escape

from halfstep.report.axis import Axis, linear_axis
from halfstep.report.number_format import format_tick

# The picture, in pixels.
WIDTH = 720
HEIGHT = 420
LEFT = 64
RIGHT = 24
TOP = 48
BOTTOM = 52

# The axis ends above the first loss by this share of the descent: what diverges leaves the picture,
# and does not flatten what falls.
HEADROOM = 0.5

SKETCH_WIDTH = 60
SKETCH_HEIGHT = 12

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #444; }
.title { font-size: 15px; font-weight: 600; fill: #222; }
.grid { stroke: #e4e4e4; }
.losses { fill: #9db7d5; }
.smoothed { fill: none; stroke: #1f5fa8; stroke-width: 2.5; stroke-linejoin: round; }
.suggestion { stroke: #b3471b; stroke-width: 1.5; stroke-dasharray: 5 4; }
.mark { fill: #b3471b; }
.suggested { fill: #b3471b; font-weight: 600; }
"""


def draw_svg(
    rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], suggestion: float
) -> str:
    """The picture: every loss a dot, the smoothed curve, and the suggested rate."""
    x_axis = Axis(rates[0], rates[-1], log=True)
    y_axis = _loss_axis(smoothed)

    def x(rate: float) -> float:
        return round(LEFT + x_axis.fraction(rate) * (WIDTH - LEFT - RIGHT), 1)

    def y(loss: float) -> float:
        return round(HEIGHT - BOTTOM - y_axis.fraction(loss) * (HEIGHT - TOP - BOTTOM), 1)

    bottom = HEIGHT - BOTTOM
    parts = []
    for tick in y_axis.ticks():
        parts.append(f'<path class="grid" d="M{LEFT} {y(tick)}H{WIDTH - RIGHT}"/>')
        label = escape(format_tick(tick))
        parts.append(f'<text x="{LEFT - 8}" y="{y(tick) + 4}" text-anchor="end">{label}</text>')
    for tick in _powers_of_ten(rates[0], rates[-1]):
        parts.append(f'<path class="grid" d="M{x(tick)} {TOP}V{bottom}"/>')
        label = f"{tick:g}"
        parts.append(f'<text x="{x(tick)}" y="{bottom + 18}" text-anchor="middle">{label}</text>')

    for rate, loss in zip(rates, losses, strict=True):
        if y_axis.low <= loss <= y_axis.high:
            parts.append(f'<circle class="losses" cx="{x(rate)}" cy="{y(loss)}" r="2.5"/>')
    points = " ".join(f"{x(r)},{y(loss)}" for r, loss in zip(rates, smoothed, strict=True))
    parts.append(f'<polyline class="smoothed" points="{points}" clip-path="url(#plot)"/>')

    # The suggested rate: a line, a mark on the curve, and its number on the side with more space.
    at = x(suggestion)
    height = y(smoothed[list(rates).index(suggestion)])
    parts.append(f'<path class="suggestion" d="M{at} {TOP}V{bottom}"/>')
    parts.append(f'<circle class="mark" cx="{at}" cy="{height}" r="5"/>')
    is_left = at < WIDTH / 2
    anchor = "start" if is_left else "end"
    offset = 8 if is_left else -8
    parts.append(
        f'<text class="suggested" x="{at + offset}" y="{TOP + 14}" text-anchor="{anchor}">'
        f"{suggestion:.3g}</text>"
    )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle:g}" y="{HEIGHT - 10}" text-anchor="middle">learning rate</text>'
    )
    title = f"Loss by learning rate: suggested is {suggestion:.3g}"
    parts.append(f'<text class="title" x="{LEFT}" y="26">{title}</text>')
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{title}">\n'
        f"<style>{STYLE}</style>\n"
        f'<clipPath id="plot"><rect x="{LEFT}" y="{TOP}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{HEIGHT - TOP - BOTTOM}"/></clipPath>\n'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def sketch_lines(rates: Sequence[float], smoothed: Sequence[float], suggestion: float) -> list[str]:
    """The smoothed curve in characters, the suggested rate as a column of its own."""
    x_axis = Axis(rates[0], rates[-1], log=True)
    y_axis = _loss_axis(smoothed, padding=0.01)
    grid = [[" "] * SKETCH_WIDTH for _ in range(SKETCH_HEIGHT)]
    suggested_column = round(x_axis.fraction(suggestion) * (SKETCH_WIDTH - 1))
    for row in grid:
        row[suggested_column] = "|"
    for rate, loss in zip(rates, smoothed, strict=True):
        column = round(x_axis.fraction(rate) * (SKETCH_WIDTH - 1))
        line = round((1 - y_axis.fraction(loss)) * (SKETCH_HEIGHT - 1))
        if line >= 0:
            grid[line][column] = "*"

    high = f"{y_axis.high:.3g}"
    low = f"{y_axis.low:.3g}"
    label_width = max(len(high), len(low))
    labels = ["" for _ in grid]
    labels[0] = high
    labels[-1] = low
    lines = [
        f"{label:>{label_width}} |{''.join(row)}".rstrip()
        for label, row in zip(labels, grid, strict=True)
    ]
    first = f"{rates[0]:.2g}"
    last = f"{rates[-1]:.2g}"
    lines.append(f"{'':>{label_width}} +{'-' * SKETCH_WIDTH}")
    lines.append(f"{'':>{label_width}}  {first}{last:>{SKETCH_WIDTH - len(first)}}")
    return lines


def _loss_axis(smoothed: Sequence[float], padding: float = 0.05) -> Axis:
    """An axis that holds the curve up to somewhat above where it begins."""
    low = min(smoothed)
    high = smoothed[0] + HEADROOM * (smoothed[0] - low)
    shown = [loss for loss in smoothed if loss <= high]
    floor = 0.0 if low >= 0 else None
    return linear_axis([*shown, min(high, max(smoothed))], padding=padding, floor=floor)


def _powers_of_ten(low: float, high: float) -> list[float]:
    first = math.ceil(math.log10(low) - 1e-9)
    last = math.floor(math.log10(high) + 1e-9)
    return [10.0**i for i in range(first, last + 1)]
