"""Numbers as text, the same on the page and in Markdown: three digits, a real minus, units."""

import math

MISSING = "–"  # shown where there is no number

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def format_number(value: float | None, digits: int = 3) -> str:
    """The number with `digits` significant digits: 0.0123, 1.23, 12.3, 1,234.

    Below 10⁻⁴ and from 10⁷ on as a power of ten: 1.23e12.
    """
    if value is None:
        return MISSING
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if -4 <= exponent < 7:
        decimals = max(0, digits - 1 - exponent)
        return _real_minus(f"{value:,.{decimals}f}")
    # Python writes 1.00e+12 and 1.00e-05; here it is 1.00e12 and 1.00e-5.
    text = f"{value:.{digits - 1}e}"
    text = text.replace("e+0", "e").replace("e+", "e").replace("e-0", "e-")
    return _real_minus(text)


def format_fixed(value: float | None, decimals: int) -> str:
    """The number with a fixed count of decimals."""
    if value is None:
        return MISSING
    return _real_minus(f"{value:,.{decimals}f}")


def format_percent(share: float | None) -> str:
    """A share of 1 in percent: 87.12 %."""
    if share is None:
        return MISSING
    return f"{share * 100:.2f} %"


def format_share(share: float | None, half_width: float | None) -> str:
    """A share of 1 with the half-width of its interval, in percent: 87.12 ± 0.21 %."""
    if share is None or half_width is None:
        return format_percent(share)
    return f"{share * 100:.2f} ± {half_width * 100:.2f} %"


def format_points(points: float | None, half_width: float | None = None) -> str:
    """A difference in percentage points, with its sign: +0.31 ± 0.11."""
    if points is None:
        return MISSING
    text = format_fixed(points, 2)
    if points > 0:
        text = f"+{text}"
    if half_width is not None:
        text = f"{text} ± {half_width:.2f}"
    return text


def format_bytes(count: float | None) -> str:
    """A number of bytes in binary units: 1.50 KiB."""
    if count is None:
        return MISSING
    power = int(math.log(max(count, 1), 1024))
    power = min(power, len(_BYTE_UNITS) - 1)
    return f"{format_number(count / 1024**power)} {_BYTE_UNITS[power]}"


def format_ms(milliseconds: float | None) -> str:
    """A time with its unit: 2.60 ms."""
    if milliseconds is None:
        return MISSING
    return f"{format_number(milliseconds)} ms"


def format_loss_scale(scale: float | None) -> str:
    """A loss scale; a power of two, unless it is small, as such: 2¹⁶."""
    if scale is None:
        return MISSING
    if scale > 0:
        exponent = math.log2(scale)
        if exponent == round(exponent) and abs(exponent) >= 4:
            return "2" + str(round(exponent)).translate(_SUPERSCRIPT)
    return format_number(scale)


def format_count(count: float | None) -> str:
    """How many; a mean over seeds keeps one decimal."""
    if count is None:
        return MISSING
    if count == round(count):
        return f"{count:,.0f}"
    return f"{count:,.1f}"


def format_ratio(ratio: float | None) -> str:
    """A ratio: 1.57×."""
    if ratio is None:
        return MISSING
    text = format_fixed(ratio, 2) if ratio < 100 else format_number(ratio)
    return f"{text}×"


def format_tick(value: float) -> str:
    """A round value beside an axis, without zeros at its end: 0.5."""
    if value == 0 or 1e-4 <= abs(value) < 1e7:
        return _real_minus(f"{value:.10g}")
    return format_number(value, digits=1)


def format_signed_tick(value: float) -> str:
    """A round value beside an axis of differences: +0.5."""
    text = format_tick(value)
    return f"+{text}" if value > 0 else text


def format_percent_tick(share: float) -> str:
    """A round share beside an axis, in percent: 85 %."""
    return f"{format_tick(round(share * 100, 9))} %"


def _real_minus(text: str) -> str:
    return text.replace("-", "−")
