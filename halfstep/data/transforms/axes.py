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
