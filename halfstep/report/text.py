"""Numbers as text, the same on the page and in Markdown: three digits, a real minus, units."""

import math

NONE = "–"
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def short(value: float | None, digits: int = 3) -> str:
    """`digits` significant digits: 0.0123, 1.23, 12.3, 1,234; powers of ten beyond 10⁻⁴ and 10⁷."""
    if value is None:
        return NONE
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if not -4 <= size < 7:
        return _minus(
            f"{value:.{digits - 1}e}".replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
        )
    return _minus(f"{value:,.{max(0, digits - 1 - size)}f}")


def fixed(value: float | None, places: int) -> str:
    return NONE if value is None else _minus(f"{value:,.{places}f}")


def percent(value: float | None) -> str:
    """A share of 1 as percent."""
    return NONE if value is None else f"{value * 100:.2f} %"


def spread(share: float | None, half: float | None) -> str:
    """Mean and half-width, both shares of 1, in percent: `87.12 ± 0.21 %`."""
    if share is None or half is None:
        return percent(share)
    return f"{share * 100:.2f} ± {half * 100:.2f} %"


def points(value: float | None, half: float | None = None) -> str:
    """A signed difference in percentage points, already in points."""
    if value is None:
        return NONE
    sign = "+" if value > 0 else ""
    return f"{sign}{fixed(value, 2)}" + ("" if half is None else f" ± {half:.2f}")


def size(value: float | None) -> str:
    """Bytes in binary units."""
    if value is None:
        return NONE
    power = min(4, max(0, int(math.log(max(value, 1), 1024))))
    return f"{short(value / 1024**power)} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def scale(value: float | None) -> str:
    """A loss scale: a power of two as such."""
    if value is None:
        return NONE
    exponent = math.log2(value) if value > 0 else 0.5
    if exponent != round(exponent) or abs(exponent) < 4:
        return short(value)
    return "2" + str(round(exponent)).translate(_SUPERSCRIPT)


def count(value: float | None) -> str:
    """How many; a mean over seeds keeps one decimal."""
    return NONE if value is None else f"{value:,.0f}" if value == round(value) else f"{value:,.1f}"


def ratio(value: float | None) -> str:
    return NONE if value is None else f"{fixed(value, 2) if value < 100 else short(value)}×"


def tick(value: float, *, signed: bool = False) -> str:
    """A round value beside an axis: no digits that say nothing."""
    sign = "+" if signed and value > 0 else ""
    return sign + (
        _minus(f"{value:.10g}") if 1e-4 <= abs(value) < 1e7 or value == 0 else short(value, 1)
    )


def over(a: float | None, b: float | None) -> float | None:
    """a ÷ b where both are there."""
    return None if a is None or not b else a / b


def plural(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def _minus(made: str) -> str:
    return made.replace("-", "−")
