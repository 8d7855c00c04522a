"""A contact sheet: samples as they were read, and below each what the pipeline makes of it in the first epochs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.data.flow.dataset import Dataset
from halfstep.data.flow.plan import Plan

if TYPE_CHECKING:
    from PIL.Image import Image

_TILE, _GAP, _TEXT = 112, 8, 18  # pixels
_INK, _PAPER = (32, 32, 32), (255, 255, 255)


def sheet(
    data: Dataset, path: str | Path | None = None, *, samples: int = 8, epochs: int = 3, image: str | None = None,
    label: str | None = None,
) -> "Image":  # fmt: skip
    """Draw the first `samples` of epoch 0 with their labels: raw on top, then as delivered in each epoch; save as PNG.

    A float image is stretched from its smallest to its largest value; uint8 is shown as it is.
    """
    if samples < 1 or epochs < 0:
        raise ValueError(f"sheet: expected at least 1 sample and 0 epochs, got {samples} and {epochs}")
    numbers = _first(data.plan, samples)
    raw = Plan(data.plan.source).fetch(numbers, torch.zeros_like(numbers))
    image, label = image or _image(raw), label or _label(raw)
    rows = [("raw", raw[image])]
    for epoch in range(epochs):
        made = data.plan.fetch(numbers, torch.full_like(numbers, epoch))
        if image not in made:
            raise ValueError(f"sheet: expected a column {image!r} in what the pipeline delivers, got {list(made)}")
        rows.append((f"epoch {epoch}", made[image]))
    names = [_name(data, raw[label][i]) if label else str(int(n)) for i, n in enumerate(numbers)]
    page = _draw(rows, names)
    if path is not None:
        page.save(Path(path), format="PNG")
    return page


def _first(plan: Plan, count: int) -> Tensor:
    tokens = plan.tokens(0, 0, min(plan.size, -(-count // (plan.batch or 1))))
    numbers = torch.cat([tokens[i][0] for i in range(len(tokens))])[:count]
    device = getattr(plan.source, "device", "cpu")
    return numbers.to(device)


def _image(raw: dict[str, Any]) -> str:
    for name, column in raw.items():
        if getattr(column[0], "ndim", 0) >= 2:
            return name
    raise ValueError(f"sheet: expected a column of images [H, W] or [H, W, C], got {list(raw)}. Name it: image='…'")


def _label(raw: dict[str, Any]) -> str | None:
    return next((name for name, column in raw.items() if getattr(column[0], "ndim", 0) == 0), None)


def _name(data: Dataset, label: Any) -> str:
    number = label.item() if isinstance(label, Tensor) else label
    return data.classes[number] if isinstance(number, int) and 0 <= number < len(data.classes) else str(number)


def _draw(rows: list[tuple[str, Any]], names: list[str]) -> "Image":
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
            tile = Image.fromarray(_pixels(tiles[column]).numpy()).resize((_TILE, _TILE), Image.Resampling.NEAREST)
            page.paste(tile, (margin + column * side, top))
    return page


def _pixels(image: Any) -> Tensor:
    """uint8 [H, W, 3] of an image in any layout and dtype."""
    tile: Tensor = torch.as_tensor(image).detach().cpu()
    if tile.dim() == 2:
        tile = tile.unsqueeze(-1)
    if tile.dim() != 3 or not {tile.shape[0], tile.shape[2]} & {1, 3, 4}:
        raise ValueError(f"sheet: expected images [H, W], [H, W, C] or [C, H, W], got {list(tile.shape)}")
    if tile.shape[2] not in (1, 3, 4):
        tile = tile.permute(1, 2, 0)
    if tile.dtype != torch.uint8:
        tile = tile.float()
        low, high = tile.min(), tile.max()
        tile = ((tile - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    return tile[..., :3].expand(-1, -1, 3).contiguous()
