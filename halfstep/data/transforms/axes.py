"""Where rows, columns and channels are in a batch of images, and the checks that image transforms share."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

Layout: TypeAlias = Literal["HWC", "CHW"]
CHANNELS = (1, 3, 4)  # gray, colour, colour with alpha: what a found layout may have


class Axes(NamedTuple):
    """Dimensions of a batch; gray batches [B, H, W] have no channel."""

    row: int
    column: int
    channel: int | None


GRAY = Axes(1, 2, None)
TABLE: dict[str, Axes] = {"HWC": Axes(1, 2, 3), "CHW": Axes(2, 3, 1)}


def axes(name: str, batch: Tensor, layout: Layout | None) -> Axes:
    """The stated layout's axes, or those that the shape leaves no doubt about."""
    if layout is None and batch.dim() == 3:
        return GRAY
    if batch.dim() != 4:
        wanted = (
            "[B, H, W], [B, H, W, C] or [B, C, H, W]"
            if layout is None
            else f"[B, {', '.join(layout)}]"
        )
        advice = "Add the dimension that is missing" + (
            ", or leave layout= out for gray." if layout else "."
        )
        raise ValueError(
            f"{name}: expected a batch {wanted}, got shape {tuple(batch.shape)}. {advice}"
        )
    return TABLE[layout or _found(name, batch)]


def to_chw(batch: Tensor, channel: int | None) -> Tensor:
    """[B, C, H, W] where it lies; gray has one channel."""
    return batch.unsqueeze(1) if channel is None else batch.movedim(channel, 1)


def check_layout(name: str, layout: Any) -> None:
    if layout is not None and layout not in TABLE:
        raise ValueError(
            f"{name}: expected layout {', '.join(map(repr, TABLE))} or None, got {layout!r}"
        )


def pair(name: str, size: Any) -> tuple[int, int]:
    """(height, width) of a size given as one number or two."""
    given = (size, size) if _is_whole(size) else size
    if (
        not isinstance(given, Sequence)
        or len(given) != 2
        or not all(_is_whole(n) and n >= 1 for n in given)
    ):
        raise ValueError(
            f"{name}: expected size as a positive integer or (height, width), got {size!r}"
        )
    return given[0], given[1]


def borders(name: str, padding: Any) -> tuple[int, int, int, int]:
    """(left, top, right, bottom) of a padding given as one number or four."""
    given = (padding,) * 4 if _is_whole(padding) else padding
    if (
        not isinstance(given, Sequence)
        or len(given) != 4
        or not all(_is_whole(n) and n >= 0 for n in given)
    ):
        wanted = "an integer of at least 0 or (left, top, right, bottom)"
        raise ValueError(f"{name}: expected padding as {wanted}, got {padding!r}")
    return given[0], given[1], given[2], given[3]


def plain(value: Any) -> Any:
    """numpy's and torch's numbers and vectors as Python's; each float32 is exact in them."""
    return value.tolist() if hasattr(value, "tolist") else value


def check_fill(name: str, fill: float, dtype: torch.dtype) -> None:
    """A fill that the batch's dtype would change is refused: 0.5 in uint8 would be 0."""
    if dtype.is_floating_point:
        fits = abs(fill) <= torch.finfo(dtype).max
        wanted = f"within ±{torch.finfo(dtype).max:.4g}"
    else:
        low, high = (
            (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
        )
        fits = low <= fill <= high and fill == int(fill)
        wanted = f"a whole number in {low}..{high}"
    if not fits:
        raise ValueError(f"{name}: expected fill {wanted} for a {dtype} batch, got {fill!r}")


def _found(name: str, batch: Tensor) -> str:
    fits = [layout for layout, at in TABLE.items() if batch.shape[at.channel or 0] in CHANNELS]
    if len(fits) == 1:
        return fits[0]
    both = "both" if fits else "neither"
    raise ValueError(
        f"{name}: expected 1, 3 or 4 channels in either the last or the second place, got shape {tuple(batch.shape)}, "
        f"where {both} would do. State layout='HWC' or layout='CHW'."
    )


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
