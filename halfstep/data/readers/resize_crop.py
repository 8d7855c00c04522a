"""Images of any size brought to one: the shorter side resized, then the centre cropped.

The same pixels as torchvision's Resize(size) and CenterCrop(size) on a Pillow image.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from halfstep.utils.checks import whole_number

ByteArray = npt.NDArray[np.uint8]
Size: TypeAlias = tuple[int, int]  # height, width

EXPECTED = "a side such as 224, or a height and a width such as (224, 160)"


def parse_image_size(name: str, size: object) -> Size:
    """(height, width) of 224, (224, 160), "224" or "224x160"."""
    sides: object = size
    if isinstance(size, str):
        parts = size.lower().replace("×", "x").split("x")
        if not all(part.strip().isdecimal() for part in parts):
            raise ValueError(f"{name}: expected 224, or 224x160 (height x width), got {size!r}")
        sides = tuple(int(part) for part in parts)
        if len(parts) == 1:
            sides = int(parts[0])
    if isinstance(sides, int) and not isinstance(sides, bool):
        sides = (sides, sides)
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        raise ValueError(f"{name}: expected {EXPECTED}, got {size!r}")
    height, width = (whole_number(name, side, minimum=1) for side in sides)
    return height, width


def format_image_size(size: Size) -> str:
    """As it is typed: 224, or 224x160."""
    height, width = size
    return str(height) if height == width else f"{height}x{width}"


def covering_size(height: int, width: int, target: Size) -> Size:
    """The size with the image's aspect ratio that just covers the target.

    One side is the target's. The other is rounded down, and at least the target's.
    """
    target_height, target_width = target
    if height * target_width <= width * target_height:  # relatively as wide as the target, or wider
        return target_height, target_height * width // height
    return target_width * height // width, target_width


def resize_and_crop(pixels: ByteArray, target: Size) -> ByteArray:
    """uint8 [H, W, C] as [*target, C]: Pillow's bilinear filter, which widens where it shrinks."""
    from PIL import Image

    height, width = covering_size(pixels.shape[0], pixels.shape[1], target)
    if (height, width) != pixels.shape[:2]:
        channels = pixels.shape[2]
        image = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.array(resized).reshape(height, width, channels)
    # Half a pixel goes to the even side, as torchvision rounds.
    top = round((height - target[0]) / 2)
    left = round((width - target[1]) / 2)
    cropped = pixels[top : top + target[0], left : left + target[1]]
    return np.ascontiguousarray(cropped)
