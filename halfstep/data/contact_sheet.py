"""A contact sheet: samples as they were read, and below each what the pipeline makes of it in the first epochs."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.data.pipeline.dataset import Dataset
from halfstep.data.pipeline.plan import Plan
from halfstep.data.transforms.axes import Layout, check_layout, image_axes
from halfstep.utils.checks import whole_number

if TYPE_CHECKING:
    from PIL.Image import Image

_TILE, _GAP, _TEXT = 112, 8, 18  # pixels
_INK, _PAPER = (32, 32, 32), (255, 255, 255)


def sheet(
    data: Dataset, path: str | Path | None = None, *, samples: int = 8, epochs: int = 3, image: str | None = None,
    label: str | None = None, layout: Layout | None = None,
) -> "Image":  # fmt: skip
    """Draw the first `samples` of epoch 0 with their labels: raw on top, then as delivered in each epoch; save as PNG.

    uint8 is shown as it is, and so are floats from 0 to 1; others are stretched from the smallest to the largest finite
    value of their image. `layout` says HWC or CHW where a shape leaves it open.
    """
    if (
        whole_number("sheet: samples", samples, type_error=TypeError) < 1
        or whole_number("sheet: epochs", epochs, type_error=TypeError) < 0
    ):
        raise ValueError(
            f"sheet: expected at least 1 sample and 0 epochs, got {samples} and {epochs}"
        )
    if path is not None and Path(path).suffix.lower() != ".png":
        raise ValueError(f"sheet: expected a path that ends in .png, got {str(path)!r}")
    check_layout("sheet", layout)
    numbers = _first(data.plan, samples)
    raw = Plan(data.plan.source).fetch(numbers, torch.zeros_like(numbers))
    image, label = image or _image(raw), label or _label(raw)
    rows = [("raw", raw[image])]
    for epoch in range(epochs):
        made = replace(data.plan, batch=0).fetch(
            numbers, torch.full_like(numbers, epoch)
        )  # nothing need stack
        if image not in made:
            raise ValueError(
                f"sheet: expected a column {image!r} in what the pipeline delivers, got {list(made)}"
            )
        rows.append((f"epoch {epoch}", made[image]))
    names = [_name(data, raw[label][i]) if label else str(int(n)) for i, n in enumerate(numbers)]
    page = _draw(rows, names, layout)
    if path is not None:
        page.save(Path(path), format="PNG")
    return page


def _first(plan: Plan, count: int) -> Tensor:
    tokens = plan.tokens(0, 0, min(plan.size, -(-count // (plan.batch or 1))))
    numbers = torch.cat([tokens[i][0] for i in range(len(tokens))])[:count]
    return numbers.to(plan.source.device)


def _image(raw: dict[str, Any]) -> str:
    for name, column in raw.items():
        if getattr(column[0], "ndim", 0) >= 2:
            return name
    raise ValueError(
        f"sheet: expected a column of images [H, W] or [H, W, C], got {list(raw)}. Name it: image='…'"
    )


def _label(raw: dict[str, Any]) -> str | None:
    return next((name for name, column in raw.items() if getattr(column[0], "ndim", 0) == 0), None)


def _name(data: Dataset, label: Any) -> str:
    number = label.item() if isinstance(label, Tensor) else label
    return (
        data.classes[number]
        if isinstance(number, int) and 0 <= number < len(data.classes)
        else str(number)
    )


def _draw(rows: list[tuple[str, Any]], names: list[str], layout: Layout | None) -> "Image":
    from PIL import Image, ImageDraw, ImageFont

    side, margin = _TILE + _GAP, 64
    page = Image.new("RGB", (margin + side * len(names), _TEXT + _GAP + side * len(rows)), _PAPER)
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(12)
    for column, name in enumerate(names):
        pen.text((margin + column * side, 4), name[:18], _INK, font)
    for row, (title, tiles) in enumerate(rows):
        top = _TEXT + _GAP + row * side
        pen.text((_GAP, top + _TILE // 2 - 6), title, _INK, font)
        for column in range(len(names)):
            pixels = _pixels(tiles[column], layout)
            height, width = (
                max(1, round(n * _TILE / max(pixels.shape[:2]))) for n in pixels.shape[:2]
            )
            tile = Image.fromarray(pixels.numpy()).resize((width, height), Image.Resampling.NEAREST)
            page.paste(
                tile, (margin + column * side + (_TILE - width) // 2, top + (_TILE - height) // 2)
            )
    return page


def _pixels(image: Any, layout: Layout | None) -> Tensor:
    """uint8 [H, W, 3] of an image in any layout and dtype."""
    tile: Tensor = torch.as_tensor(image).detach().cpu()
    tile = tile if tile.dtype == torch.uint8 else _stretched(tile.float())
    try:
        channel = image_axes("sheet", tile[None], None).channel
    except ValueError:
        if layout is None or tile.dim() != 3:
            raise
        channel = image_axes("sheet", tile[None], layout).channel
    tile = tile.unsqueeze(-1) if channel is None else tile.movedim(channel - 1, -1)
    return tile[..., : 3 if tile.shape[-1] >= 3 else 1].expand(-1, -1, 3).contiguous()


def _stretched(tile: Tensor) -> Tensor:
    finite = tile[tile.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 1.0)
    if low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    tile = tile.nan_to_num(nan=low, posinf=high, neginf=low)
    return ((tile - low) / max(high - low, 1e-12) * 255).round().to(torch.uint8)
