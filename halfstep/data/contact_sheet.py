"""A contact sheet: samples as they were read, and below each how the pipeline delivers it."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfstep.data.pipeline.dataset import Dataset
from halfstep.data.pipeline.plan import Plan
from halfstep.data.transforms.axes import Layout, check_layout, image_axes
from halfstep.utils.atomic_files import atomic_file
from halfstep.utils.checks import whole_number

if TYPE_CHECKING:
    from PIL.Image import Image

# Sizes in pixels.
_TILE = 112  # an image's longer side
_GAP = 8  # between tiles
_TITLE_HEIGHT = 18  # of the line with the labels
_MARGIN = 64  # on the left, for the names of the rows
_FONT_SIZE = 12

_MAX_LABEL_LETTERS = 18  # more would run into the next label
_TEXT_COLOUR = (32, 32, 32)
_PAGE_COLOUR = (255, 255, 255)


def sheet(
    data: Dataset,
    path: str | Path | None = None,
    *,
    samples: int = 8,
    epochs: int = 3,
    image: str | None = None,
    label: str | None = None,
    layout: Layout | None = None,
) -> "Image":
    """Draws the first `samples` of epoch 0 with their labels, and saves the page as PNG.

    The top row shows them as they were read, the rows below as the pipeline delivers them in each
    epoch. uint8 is shown as it is, and so are floats from 0 to 1; others are stretched from the
    smallest to the largest finite value of their image. `layout` says HWC or CHW where a shape
    leaves it open.
    """
    sample_count = whole_number("sheet: samples", samples, minimum=1, type_error=TypeError)
    epoch_count = whole_number("sheet: epochs", epochs, minimum=0, type_error=TypeError)
    if path is not None and Path(path).suffix.lower() != ".png":
        raise ValueError(f"sheet: expected a path that ends in .png, got {str(path)!r}")
    check_layout("sheet", layout)

    numbers = _first_samples(data.plan, sample_count)
    raw = Plan(data.plan.source).fetch(numbers, torch.zeros_like(numbers))
    image_column = image or _image_column(raw)
    label_column = label or _label_column(raw)

    # One row for each epoch. Without batches, samples of different sizes need not be stacked.
    rows = [("raw", raw[image_column])]
    plan = replace(data.plan, batch_size=0)
    for epoch in range(epoch_count):
        columns = plan.fetch(numbers, torch.full_like(numbers, epoch))
        if image_column not in columns:
            raise ValueError(
                f"sheet: expected a column {image_column!r} in what the pipeline delivers, "
                f"got {list(columns)}"
            )
        rows.append((f"epoch {epoch}", columns[image_column]))

    if label_column:
        labels = [_label_text(data, raw[label_column][i]) for i in range(len(numbers))]
    else:
        labels = [str(int(number)) for number in numbers]
    page = _draw_page(rows, labels, layout)
    if path is not None:
        with atomic_file(path) as file:
            page.save(file, format="PNG")
    return page


def _first_samples(plan: Plan, count: int) -> Tensor:
    """The numbers of the first `count` samples that epoch 0 delivers; fewer if it has fewer."""
    batch_count = min(plan.size, -(-count // (plan.batch_size or 1)))
    indices = plan.sample_indices(0, 0, batch_count)
    numbers = torch.cat([indices[i][0] for i in range(len(indices))])[:count]
    return numbers.to(plan.source.device)


def _image_column(raw: dict[str, Any]) -> str:
    """The first column whose samples have two dimensions or more."""
    for name, column in raw.items():
        if getattr(column[0], "ndim", 0) >= 2:
            return name
    raise ValueError(
        f"sheet: expected a column of images [H, W] or [H, W, C], got {list(raw)}. "
        "Name it: image='…'"
    )


def _label_column(raw: dict[str, Any]) -> str | None:
    """The first column whose samples are single values."""
    for name, column in raw.items():
        if getattr(column[0], "ndim", 0) == 0:
            return name
    return None


def _label_text(data: Dataset, label: Any) -> str:
    """The name of the class where it has one, else the value itself."""
    value: object = label.item() if isinstance(label, Tensor) else label
    if isinstance(value, int) and 0 <= value < len(data.classes):
        return data.classes[value]
    return str(value)


def _draw_page(rows: list[tuple[str, Any]], labels: list[str], layout: Layout | None) -> "Image":
    from PIL import Image, ImageDraw, ImageFont

    side = _TILE + _GAP
    first_top = _TITLE_HEIGHT + _GAP
    page_size = (_MARGIN + side * len(labels), first_top + side * len(rows))
    page = Image.new("RGB", page_size, _PAGE_COLOUR)
    pen = ImageDraw.Draw(page)
    font = ImageFont.load_default(_FONT_SIZE)

    for column, label in enumerate(labels):
        pen.text((_MARGIN + column * side, 4), label[:_MAX_LABEL_LETTERS], _TEXT_COLOUR, font)
    for row, (title, images) in enumerate(rows):
        top = first_top + row * side
        pen.text((_GAP, top + _TILE // 2 - 6), title, _TEXT_COLOUR, font)
        for column in range(len(labels)):
            pixels = _to_pixels(images[column], layout)

            # The longer side fills the tile; the image stands in its middle.
            longer_side = max(pixels.shape[:2])
            height = max(1, round(pixels.shape[0] * _TILE / longer_side))
            width = max(1, round(pixels.shape[1] * _TILE / longer_side))
            tile = Image.fromarray(pixels.numpy()).resize((width, height), Image.Resampling.NEAREST)
            left = _MARGIN + column * side
            page.paste(tile, (left + (_TILE - width) // 2, top + (_TILE - height) // 2))
    return page


def _to_pixels(image: Any, layout: Layout | None) -> Tensor:
    """uint8 [H, W, 3] of an image in any layout and dtype."""
    pixels: Tensor = torch.as_tensor(image).detach().cpu()
    if pixels.dtype != torch.uint8:
        pixels = _stretch_to_uint8(pixels.float())

    # The channel's axis: by the shape, or by `layout` where the shape leaves it open.
    try:
        channel = image_axes("sheet", pixels[None], None).channel
    except ValueError:
        if layout is None or pixels.dim() != 3:
            raise
        channel = image_axes("sheet", pixels[None], layout).channel
    if channel is None:
        pixels = pixels.unsqueeze(-1)
    else:
        pixels = pixels.movedim(channel - 1, -1)

    # The first three channels as colours, or the first one as grey.
    shown_channels = 3 if pixels.shape[-1] >= 3 else 1
    return pixels[..., :shown_channels].expand(-1, -1, 3).contiguous()


def _stretch_to_uint8(pixels: Tensor) -> Tensor:
    """0 to 255 for 0 to 1, or from the smallest to the largest finite value beyond that range."""
    low, high = 0.0, 1.0
    finite = pixels[pixels.isfinite()]
    if finite.numel() and (float(finite.min()) < 0 or float(finite.max()) > 1):
        low = float(finite.min())
        high = float(finite.max())
    pixels = pixels.nan_to_num(nan=low, posinf=high, neginf=low)
    return ((pixels - low) / max(high - low, 1e-12) * 255).round().to(torch.uint8)
