"""Large images: the memory of decoding them is bounded, and measured; the pixels are Pillow's."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import halfstep as hs
from halfstep.data.readers.image_folder import MAX_PIXELS, STRIP_PIXELS, read_image
from tests.support.command_line import CommandLine

ROOT = Path(hs.__file__).resolve().parents[1]
NOISE_BYTES = 24 << 20  # of an allocator, and of Pillow's plugins

# Peak memory of a new process, before and after an image was read.
PROGRAM = """
import resource, sys
from pathlib import Path
from PIL import Image
from halfstep.data.readers.image_folder import read_image

def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

Image.preinit()
before = peak()
try:
    read_image(Path(sys.argv[1]), sys.argv[2])
except ValueError as error:
    print(error, file=sys.stderr)
print(peak() - before)
"""


def peak_bytes(path: Path, mode: str) -> tuple[int, str]:
    process = subprocess.run(
        [sys.executable, "-P", "-c", PROGRAM, str(path), mode],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return int(process.stdout), process.stderr


def picture(width: int, height: int) -> Image.Image:
    """Noise in 64 rows, repeated: it packs little, and is quick to make."""
    rows = np.random.default_rng(0).integers(0, 255, (64, width, 3), dtype=np.uint8)
    return Image.fromarray(np.tile(rows, (height // 64 + 1, 1, 1))[:height])


# The file and its mode, the mode that is read, and the bytes of a pixel at the peak: Pillow's 4 (1
# for gray, twice that while it is turned), 3 of the result; libwebp holds two pictures of its own.
DECODED = {
    "png": ("RGB", "RGB", 8),
    "png gray": ("L", "RGB", 5),
    "png alpha": ("RGBA", "RGB", 8),
    "jpg": ("RGB", "RGB", 8),
    "jpg turned": ("RGB", "RGB", 9),
    "bmp": ("RGB", "L", 6),
    "webp": ("RGB", "RGB", 18),
}


@pytest.mark.parametrize("what", DECODED)
def test_memory_of_decoding(what: str, tmp_path: Path) -> None:
    file_mode, mode, bytes_per_pixel = DECODED[what]
    image = picture(4000, 3000).convert(file_mode)
    exif = Image.Exif()
    if "turned" in what:
        exif[0x112] = 6
    path = tmp_path / f"x.{what.split()[0]}"
    image.save(path, exif=exif, **({"method": 0} if what == "webp" else {}))
    used, errors = peak_bytes(path, mode)
    assert errors == ""
    assert used < bytes_per_pixel * 4000 * 3000 + NOISE_BYTES


def test_a_file_that_holds_more_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    """30 kB that would take 100 to 300 MB; Pillow alone lets them pass."""
    side = int(MAX_PIXELS**0.5) + 1
    for suffix in ("png", "gif", "tiff", "jpg", "webp"):
        path = tmp_path / f"x.{suffix}"
        options = {"compression": "tiff_deflate"} if suffix == "tiff" else {}
        Image.new("L", (side, side)).save(path, **options)
        used, errors = peak_bytes(path, "RGB")
        assert f"{side:,} × {side:,} pixels, over max_pixels={MAX_PIXELS:,}. Shrink" in errors
        assert used < NOISE_BYTES, suffix


def test_the_limit_is_the_users_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (20, 10)).save(tmp_path / name / "0.png")
    assert hs.data.ImageFolder(tmp_path, max_pixels=200)[0][0].shape == (10, 20, 3)
    folder = hs.data.ImageFolder(tmp_path, max_pixels=199)
    with pytest.raises(ValueError, match=r"20 × 10 pixels, over max_pixels=199\. Shrink.*pass"):
        folder[0]
    with pytest.raises(ValueError, match="max_pixels"):
        hs.data.ImageFolder(tmp_path, max_pixels=0)

    Image.new("1", (8193, 4096)).save(tmp_path / "a" / "1.png")
    code, output = CommandLine(monkeypatch, capsys)(f"data check {tmp_path}")
    assert code == 1
    assert "8,193 × 4,096 pixels, over max_pixels=33,554,432" in output


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("file_mode", ["RGB", "L", "P", "RGBA", "LA", "1", "CMYK"])
def test_strips_are_the_pixels_of_the_whole(file_mode: str, mode: str, tmp_path: Path) -> None:
    """Converted in strips, and at once by Pillow; the last strip is a part of one."""
    image = picture(1500, STRIP_PIXELS // 1500 * 2 + 7).convert(file_mode)
    path = tmp_path / ("x.tiff" if file_mode == "CMYK" else "x.png")
    image.save(path)
    expected = np.array(image.convert(mode))
    received = read_image(path, mode).numpy()
    assert received.shape == (*expected.shape[:2], len(mode))
    assert np.array_equal(received, expected.reshape(received.shape))
