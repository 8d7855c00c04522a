"""What a folder of images holds, by the heads of the files alone: sizes, colour, damage."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from halfstep.data.readers.image_folder import read_image_head, read_in_threads
from halfstep.data.readers.resize_crop import Size
from halfstep.utils.text import list_some

MAX_SIZES_NAMED = 4
FILES_AT_ONCE = 256  # whose results wait in memory

# Pillow's modes that ImageFolder converts, in words, with what happens to them as RGB.
MODE_WORDS = {
    "1": "black and white",
    "L": "gray",
    "LA": "gray with alpha (dropped)",
    "La": "gray with alpha (dropped)",
    "I": "16-bit gray (high byte)",
    "F": "floating gray",
    "P": "with a palette",
    "PA": "with a palette and alpha (dropped)",
    "RGBA": "with alpha (dropped)",
    "RGBa": "with alpha (dropped)",
    "RGBX": "with padding",
    "CMYK": "CMYK",
    "YCbCr": "YCbCr",
    "LAB": "Lab",
    "HSV": "HSV",
}


@dataclass
class ImageSurvey:
    """Counts over images: their upright sizes (height, width), their modes, and what is damaged."""

    sizes: Counter[Size] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    damage: dict[int, str] = field(default_factory=dict)
    """The error of each file that is no image, by its place in the list."""

    @property
    def median_short_side(self) -> int:
        """Of all images, the upper of two."""
        sides = sorted(min(size) for size in self.sizes.elements())
        return sides[len(sides) // 2]

    def describe_sizes(self) -> str:
        """Width × height of the smallest and the largest, or of all where they are few."""
        by_area = sorted(self.sizes, key=lambda size: (size[0] * size[1], size))
        words = [f"{width} × {height}" for height, width in by_area]
        if len(words) <= MAX_SIZES_NAMED:
            return ", ".join(words)
        return f"{len(words):,} sizes, {words[0]} to {words[-1]}"

    def describe_modes(self) -> str | None:
        """How many are not plain RGB, by kind; None where all are, or where all are plain gray."""
        others = {mode: count for mode, count in self.modes.items() if mode != "RGB"}
        if not others or set(self.modes) == {"L"}:
            return None
        counts: Counter[str] = Counter()
        for mode, count in others.items():
            base = "I" if mode.startswith("I;16") else mode
            counts[MODE_WORDS.get(base, mode)] += count
        words = [f"{count:,} {name}" for name, count in counts.most_common()]
        return list_some(words, len(words))


def survey_images(
    files: Sequence[str], *, on_read: Callable[[int], None] | None = None
) -> ImageSurvey:
    """Reads the head of every file. `on_read` gets how many files were read since the last call."""
    survey = ImageSurvey()
    for start in range(0, len(files), FILES_AT_ONCE):
        paths = files[start : start + FILES_AT_ONCE]
        for i, head in enumerate(read_in_threads(_head_or_error, paths), start):
            if isinstance(head, str):
                survey.damage[i] = head
                continue
            size, mode = head
            survey.sizes[size] += 1
            survey.modes[mode] += 1
        if on_read is not None:
            on_read(len(paths))
    return survey


def _head_or_error(path: str) -> tuple[Size, str] | str:
    try:
        return read_image_head(Path(path))
    except (ValueError, OSError) as error:
        return str(error)
