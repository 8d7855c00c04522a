"""Image folders: order and labels, and pixels against Pillow and bytes written by hand."""

import io
import os
import pickle
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.data.readers.image_folder import ImageFolder

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
LOSSLESS_FORMATS = {
    "png": "PNG",
    "bmp": "BMP",
    "ppm": "PPM",
    "tif": "TIFF",
    "TIFF": "TIFF",
    "PNG": "PNG",
}
ORIENTATION_TAG = 0x0112


def pixels(height: int = 5, width: int = 4, channels: int = 3) -> np.ndarray:
    shape = (height, width, channels)[: 2 + (channels > 1)]
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def save_image(path: Path, image: Any, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(path, **options)
    return path


def png_file(
    width: int, height: int, depth: int, colour: int, rows: bytes, extra: bytes = b""
) -> bytes:
    """A PNG by hand; `rows` carry their filter bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + head
        + extra
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def read_only_image(root: Path, mode: Any = "RGB") -> np.ndarray:
    """The one image below `root`."""
    ((image, label),) = [ImageFolder(root, mode=mode)[0]]
    assert (image.dtype, image.is_contiguous(), label) == (torch.uint8, True, 0)
    return image.numpy()


def test_classes_and_files_are_sorted(tmp_path: Path) -> None:
    for name in (
        "cat/b.png",
        "cat/a.JPG",
        "cat/sub/c.png",
        "Bird/1.png",
        "dog/10.png",
        "dog/9.png",
    ):
        save_image(tmp_path / name, pixels())
    for name in (
        "cat/notes.txt",
        "cat/.hidden.png",
        ".git/x.png",
        "cat/.thumbs/t.png",
        "README.png",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"not an image")
    data = ImageFolder(str(tmp_path))
    assert data.classes == ["Bird", "cat", "dog"]
    names = ["Bird/1.png", "cat/a.JPG", "cat/b.png", "cat/sub/c.png", "dog/10.png", "dog/9.png"]
    assert [os.path.relpath(path, tmp_path) for path in data.files] == names
    assert [label for _, label in data] == data.labels == [0, 1, 1, 1, 2, 2]
    assert len(data) == 6
    assert data[-1][1] == 2
    with pytest.raises(IndexError):
        data[6]


@pytest.mark.parametrize("suffix", LOSSLESS_FORMATS)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_lossless_formats_give_their_pixels(tmp_path: Path, suffix: str, mode: str) -> None:
    source = pixels(channels=len(mode))
    save_image(tmp_path / "a" / f"x.{suffix}", source, format=LOSSLESS_FORMATS[suffix])
    assert np.array_equal(read_only_image(tmp_path, mode), source.reshape(5, 4, -1))


@pytest.mark.parametrize("suffix", ["jpg", "jpeg", "webp", "gif"])
def test_other_formats_give_what_pillow_decodes(tmp_path: Path, suffix: str) -> None:
    path = save_image(tmp_path / "a" / f"x.{suffix}", pixels())
    with Image.open(path) as image:
        assert np.array_equal(read_only_image(tmp_path), np.asarray(image.convert("RGB")))


def test_content_decides_not_the_name(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "x.jpg", pixels(), format="PNG")
    assert np.array_equal(read_only_image(tmp_path), pixels())


def test_sizes_may_differ_and_memory_is_writable(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "1.png", pixels(2, 7))
    save_image(tmp_path / "a" / "2.png", pixels(6, 3))
    data = ImageFolder(tmp_path)
    assert [tuple(image.shape) for image, _ in data] == [(2, 7, 3), (6, 3, 3)]
    data[0][0].zero_()
    assert np.array_equal(data[0][0].numpy(), pixels(2, 7))


# what each tag asks of the stored image, by EXIF's definition of the first row and column
TURN_UPRIGHT = {
    1: lambda x: x,
    2: lambda x: x[:, ::-1],
    3: lambda x: x[::-1, ::-1],
    4: lambda x: x[::-1],
    5: lambda x: x.swapaxes(0, 1),
    6: lambda x: x[::-1].swapaxes(0, 1),
    7: lambda x: x[::-1, ::-1].swapaxes(0, 1),
    8: lambda x: x[:, ::-1].swapaxes(0, 1),
}


@pytest.mark.parametrize("tag", TURN_UPRIGHT)
@pytest.mark.parametrize("bits", [8, 16])
def test_exif_orientation_is_applied(tmp_path: Path, tag: int, bits: int) -> None:
    exif = Image.Exif()
    stored = pixels(channels=1)
    exif[ORIENTATION_TAG] = tag
    save_image(
        tmp_path / "a" / "x.png", stored if bits == 8 else stored.astype(np.uint16) << 8, exif=exif
    )
    assert np.array_equal(read_only_image(tmp_path, "L")[..., 0], TURN_UPRIGHT[tag](stored))


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("kind", ["png", "tif", "big-endian tif", "pgm"])
def test_sixteen_bit_gray_keeps_its_high_byte(tmp_path: Path, mode: str, kind: str) -> None:
    source = np.array([[0, 255, 256], [0x7FFF, 0x8000, 0xFFFF]], np.uint16)
    if kind == "pgm":
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "x.pgm").write_bytes(b"P5 3 2 65535\n" + source.astype(">u2").tobytes())
    else:
        save_image(
            tmp_path / "a" / f"x.{kind[-3:]}", source.astype(">u2" if "big" in kind else "<u2")
        )
    gray = np.array([[0, 0, 1], [127, 128, 255]])
    assert np.array_equal(read_only_image(tmp_path, mode), np.stack([gray] * len(mode), axis=2))


def test_sixteen_bit_colour_keeps_its_high_byte(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(
        png_file(1, 1, 16, 2, b"\0" + struct.pack(">3H", 0x12FF, 0x8000, 0xFFFF))
    )
    assert read_only_image(tmp_path).tolist() == [[[0x12, 0x80, 0xFF]]]


def test_palette_and_alpha_lose_their_transparency(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    colours = bytes([1, 2, 3, 200, 100, 50])
    alphas = bytes([0, 128])
    extra = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in ((b"PLTE", colours), (b"tRNS", alphas))
    )
    (tmp_path / "a" / "x.png").write_bytes(png_file(2, 1, 8, 3, b"\0\0\1", extra))
    assert read_only_image(tmp_path).tolist() == [[[1, 2, 3], [200, 100, 50]]]
    (tmp_path / "a" / "x.png").write_bytes(png_file(1, 1, 8, 6, b"\0" + bytes([9, 8, 7, 0])))
    assert read_only_image(tmp_path).tolist() == [[[9, 8, 7]]]


def test_gray_bits_and_cmyk_become_the_mode(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "x.png", Image.fromarray(pixels(channels=1) > 127))
    assert np.array_equal(
        read_only_image(tmp_path), np.stack([(pixels(channels=1) > 127) * 255] * 3, axis=2)
    )
    save_image(tmp_path / "b" / "a" / "x.tif", Image.new("CMYK", (1, 1), (255, 0, 0, 0)))
    assert read_only_image(tmp_path / "b").tolist() == [[[0, 255, 255]]]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_without_a_white_are_refused(tmp_path: Path, dtype: Any) -> None:
    path = save_image(tmp_path / "a" / "x.tif", np.ones((2, 2), dtype))
    with pytest.raises(
        ValueError, match=rf"{path}: .*mode [IF], whose white is not defined: save it with 8 or 16"
    ):
        read_only_image(tmp_path)


def test_a_file_of_another_kind_is_not_run(tmp_path: Path) -> None:
    """EPS is a program that Pillow hands to Ghostscript.

    Under the name of an image it is only an unknown file.
    """
    content = io.BytesIO()
    Image.fromarray(pixels()).save(content, "EPS")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.png").write_bytes(content.getvalue())
    with pytest.raises(ValueError, match=r"found bytes of none of PNG, .*: 25 21 50 53"):
        read_only_image(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["mit leer.png", "ünï-码.png", "a\nb.png", "[x]*?.png", "%s{0}.png", os.fsdecode(b"\xff.png")],
)
def test_odd_names(tmp_path: Path, name: str) -> None:
    save_image(tmp_path / "a [1]" / "x.png", pixels()).rename(tmp_path / "a [1]" / name)
    assert np.array_equal(read_only_image(tmp_path), pixels())


def test_links_are_followed(tmp_path: Path) -> None:
    save_image(tmp_path / "store" / "deep" / "x.png", pixels())
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "a" / "link.png").symlink_to(tmp_path / "store" / "deep" / "x.png")
    (tmp_path / "root" / "a" / "more").symlink_to(tmp_path / "store")
    (tmp_path / "root" / "b").symlink_to(tmp_path / "store")
    assert ImageFolder(tmp_path / "root").labels == [0, 0, 1]
    (tmp_path / "store" / "deep" / "up").symlink_to(tmp_path / "store")
    with pytest.raises(
        ValueError,
        match=r"up: expected images, found a link to a folder it is in\. Remove the link",
    ):
        ImageFolder(tmp_path / "root")


def test_what_cannot_be_read_is_refused_at_construction(tmp_path: Path) -> None:
    with pytest.raises(
        NotADirectoryError, match=r"nowhere: expected a folder with one sub-folder per class"
    ):
        ImageFolder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="expected one sub-folder per class, found none"):
        ImageFolder(tmp_path)
    save_image(tmp_path / "a" / "x.png", pixels())
    (tmp_path / "b").mkdir()
    with pytest.raises(
        ValueError, match=rf"{tmp_path / 'b'}: expected images \(png jpg .*, found none\. Remove"
    ):
        ImageFolder(tmp_path)
    (tmp_path / "b" / "gone.png").symlink_to(tmp_path / "gone.png")
    with pytest.raises(ValueError, match=r"gone\.png: expected an image file, found a broken link"):
        ImageFolder(tmp_path)
    with pytest.raises(ValueError, match=r"mode: expected one of 'RGB', 'L', received 'RGBA'"):
        ImageFolder(tmp_path, mode="RGBA")  # type: ignore[arg-type]


def test_pillow_is_asked_for_at_construction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match=r"expected Pillow, .* Run: pip install pillow"):
        ImageFolder(tmp_path)


def test_another_process_reads_it_and_imports_pillow_only_then(tmp_path: Path) -> None:
    save_image(tmp_path / "a" / "x.png", pixels())
    code = """
import pickle, sys
data = pickle.loads(sys.stdin.buffer.read())
assert len(data) == 1 and "PIL" not in sys.modules
print(int(data[0][0].sum()), "PIL" in sys.modules)
"""
    sent = pickle.dumps(ImageFolder(tmp_path))
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert done.stdout.decode().split() == [str(int(pixels().sum())), "True"]


def test_a_file_that_vanished_keeps_its_name(tmp_path: Path) -> None:
    path = save_image(tmp_path / "a" / "x.png", pixels())
    data = ImageFolder(tmp_path)
    path.unlink()
    with pytest.raises(
        FileNotFoundError, match=rf"{path}: expected a file that can be read, found: No such file"
    ):
        data[0]
