"""Where rows, columns and channels are in a batch of images; checks that image transforms share."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from halfstep.utils.checks import expect

Layout: TypeAlias = Literal["HWC", "CHW"]


class Axes(NamedTuple):
    """The dimensions of a batch that hold rows, columns and channels (None in gray batches)."""

    row: int
    column: int
    channel: int | None


GRAY_AXES = Axes(row=1, column=2, channel=None)
AXES_BY_LAYOUT: dict[str, Axes] = {
    "HWC": Axes(row=1, column=2, channel=3),
    "CHW": Axes(row=2, column=3, channel=1),
}
USUAL_CHANNEL_COUNTS = (1, 3, 4)  # gray, colour, colour with alpha


def image_axes(name: str, batch: Tensor, layout: Layout | None) -> Axes:
    """The axes of the stated layout, or of the only one that fits the shape of the batch.

    `name` is the transform that asks; errors begin with it.
    """
    if layout is None and batch.dim() == 3:
        return GRAY_AXES
    if batch.dim() != 4:
        if layout is None:
            expected = "[B, H, W], [B, H, W, C] or [B, C, H, W]"
            advice = "Add the dimension that is missing."
        else:
            expected = f"[B, {', '.join(layout)}]"
            advice = "Add the dimension that is missing, or leave layout= out for gray."
        raise ValueError(
            f"{name}: expected a batch {expected}, got shape {tuple(batch.shape)}. {advice}"
        )
    if layout is None:
        layout = _infer_layout(name, batch)
    return AXES_BY_LAYOUT[layout]


def _infer_layout(name: str, batch: Tensor) -> Layout:
    """The layout whose channel dimension has a usual size; an error if both fit, or none."""
    hwc_fits = batch.shape[3] in USUAL_CHANNEL_COUNTS
    chw_fits = batch.shape[1] in USUAL_CHANNEL_COUNTS
    if hwc_fits != chw_fits:
        return "HWC" if hwc_fits else "CHW"
    both_or_neither = "both" if hwc_fits else "neither"
    raise ValueError(
        f"{name}: expected 1, 3 or 4 channels in either the last or the second place, "
        f"got shape {tuple(batch.shape)}, where {both_or_neither} would do. "
        "State layout='HWC' or layout='CHW'."
    )


def to_chw(batch: Tensor, channel_axis: int | None) -> Tensor:
    """The batch as a view [B, C, H, W]; gray images get one channel."""
    if channel_axis is None:
        return batch.unsqueeze(1)
    return batch.movedim(channel_axis, 1)


def check_layout(name: str, layout: Any) -> None:
    """Raises a ValueError unless the layout is "HWC", "CHW" or None."""
    choices = ", ".join(map(repr, AXES_BY_LAYOUT))
    is_known = layout is None or layout in AXES_BY_LAYOUT
    expect(is_known, name, f"layout {choices} or None", layout)


def parse_size(name: str, size: Any) -> tuple[int, int]:
    """(height, width) of a size that is written as one number or two."""
    pair = (size, size) if _is_int(size) else size
    is_pair = isinstance(pair, Sequence) and len(pair) == 2
    ok = is_pair and all(_is_int(n) and n >= 1 for n in pair)
    expect(ok, name, "size as a positive integer or (height, width)", size)
    return pair[0], pair[1]


def parse_padding(name: str, padding: Any) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of a padding that is written as one number or four."""
    sides = (padding,) * 4 if _is_int(padding) else padding
    is_four = isinstance(sides, Sequence) and len(sides) == 4
    ok = is_four and all(_is_int(n) and n >= 0 for n in sides)
    expected = "padding as an integer of at least 0 or (left, top, right, bottom)"
    expect(ok, name, expected, padding)
    return sides[0], sides[1], sides[2], sides[3]


def to_python(value: Any) -> Any:
    """Numbers and vectors of numpy or torch as Python's own, which hold every float32 exactly."""
    return value.tolist() if hasattr(value, "tolist") else value


def check_fill(name: str, fill: float, dtype: torch.dtype) -> None:
    """Raises a ValueError for a fill that the dtype would change: 0.5 in uint8 would become 0."""
    if dtype.is_floating_point:
        largest = torch.finfo(dtype).max
        fits = abs(fill) <= largest
        expected = f"within ±{largest:.4g}"
    else:
        if dtype == torch.bool:
            low = 0
            high = 1
        else:
            low = torch.iinfo(dtype).min
            high = torch.iinfo(dtype).max
        fits = low <= fill <= high and fill == int(fill)
        expected = f"a whole number in {low}..{high}"
    expect(fits, name, f"fill {expected} for a {dtype} batch", fill)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def from_chw(images: Tensor, channel_axis: int | None) -> Tensor:
    """What `to_chw` changed, changed back."""
    if channel_axis is None:
        return images.squeeze(1)
    return images.movedim(1, channel_axis)


def check_channels(name: str, batch: Tensor, channel_axis: int | None) -> int:
    """The number of channels. Raises a ValueError unless it is 1 or 3."""
    count = 1 if channel_axis is None else batch.shape[channel_axis]
    if count not in (1, 3):
        raise ValueError(
            f"{name}: expected 1 or 3 channels, got {count} in a batch of shape "
            f"{tuple(batch.shape)}. Leave the other channels out before it."
        )
    return count


def check_pixel_dtype(name: str, batch: Tensor) -> None:
    """Raises a TypeError unless the pixels are uint8 or floats."""
    if not (batch.is_floating_point() or batch.dtype == torch.uint8):
        raise TypeError(
            f"{name}: expected a uint8 or floating batch, got {batch.dtype}. Put a Cast before it."
        )


def parse_range(
    name: str, what: str, value: Any, *, low: float, high: float, around: float | None = None
) -> tuple[float, float]:
    """(smallest, largest) of a range that is written as two numbers within low..high.

    With `around`, one number d stands for around − d to around + d, cut off at `low`.
    """
    value = to_python(value)
    pair = value
    expected = f"{what} as two numbers, the smaller one first, in {low:g}..{high:g}"
    if around is not None:
        expected = f"{what} as a number of at least 0, or two numbers in {low:g}..{high:g}"
        if _is_number(value):
            expect(value >= 0, name, expected, value)
            pair = (max(low, around - value), around + value)
    is_pair = isinstance(pair, Sequence) and len(pair) == 2 and all(map(_is_number, pair))
    ok = is_pair and low <= pair[0] <= pair[1] <= high
    expect(ok, name, expected, value)
    return float(pair[0]), float(pair[1])


def check_probability(name: str, p: Any) -> None:
    """Raises a ValueError unless p is in 0..1."""
    expect(_is_number(p) and 0 <= p <= 1, name, "a probability p in 0..1", p)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
