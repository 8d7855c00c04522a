"""Images of any size brought to one: against Pillow's own resize and crop, and torchvision's."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from halfstep.data import Dataset, ImageFolder
from halfstep.data.readers.image_folder import read_image_head
from halfstep.data.readers.image_survey import survey_images
from halfstep.data.readers.resize_crop import covering_size, parse_image_size, resize_and_crop

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
ORIENTATION_TAG = 0x0112

SIZES = [(48, 64), (64, 48), (33, 200), (200, 33), (32, 32), (7, 7), (31, 32), (1, 5)]


def noise(height: int, width: int, channels: int = 3) -> np.ndarray:
    shape = (height, width, channels)
    return np.random.default_rng(height * 1000 + width).integers(0, 256, shape, dtype=np.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", [32, 17, 1])
def test_a_square_is_pillows_resize_and_crop(size: tuple[int, int], side: int) -> None:
    height, width = size
    pixels = noise(height, width)
    if height <= width:
        resized = Image.fromarray(pixels).resize((int(side * width / height), side), 2)
    else:
        resized = Image.fromarray(pixels).resize((side, int(side * height / width)), 2)
    left = round((resized.width - side) / 2)
    top = round((resized.height - side) / 2)
    expected = np.asarray(resized.crop((left, top, left + side, top + side)))
    assert np.array_equal(resize_and_crop(pixels, (side, side)), expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", [(32, 32), (20, 31), (31, 20)])
@pytest.mark.parametrize("channels", [1, 3])
def test_torchvision_makes_the_same_pixels(
    size: tuple[int, int], target: tuple[int, int], channels: int
) -> None:
    transforms = pytest.importorskip("torchvision.transforms.v2", exc_type=ImportError)
    pixels = noise(*size, channels)
    image = Image.fromarray(pixels[..., 0] if channels == 1 else pixels)
    to = target[0] if target[0] == target[1] else covering_size(*size, target)
    expected = transforms.CenterCrop(target)(transforms.Resize(to)(image))
    actual = resize_and_crop(pixels, target)
    assert np.array_equal(actual, np.asarray(expected).reshape(*target, channels))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("target", [(32, 32), (20, 31), (90, 4), (1, 1)])
def test_the_covering_size_covers_and_one_side_is_exact(
    size: tuple[int, int], target: tuple[int, int]
) -> None:
    height, width = covering_size(*size, target)
    assert height >= target[0]
    assert width >= target[1]
    assert height == target[0] or width == target[1]


def test_a_folder_of_mixed_sizes_stacks(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for i, (height, width) in enumerate(SIZES):
        Image.fromarray(noise(height, width)).save(tmp_path / "a" / f"{i}.png")
    folder = ImageFolder(tmp_path, size=(12, 20))
    (images, labels) = next(iter(Dataset(folder, ["image", "label"]).batch(len(SIZES))))
    assert images.shape == (len(SIZES), 12, 20, 3)
    assert labels.tolist() == [0] * len(SIZES)
    for i, (height, width) in enumerate(SIZES):
        expected = resize_and_crop(noise(height, width), (12, 20))
        assert np.array_equal(images[i].numpy(), expected)
        assert torch.equal(folder[i][0], images[i])


def test_images_stand_upright_before_they_are_resized(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    pixels = noise(20, 30)
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = 6  # to be turned by 90 degrees clockwise
    Image.fromarray(pixels).rotate(90, expand=True).save(tmp_path / "a" / "x.png", exif=exif)
    assert read_image_head(tmp_path / "a" / "x.png") == ((20, 30), "RGB")
    image, _ = ImageFolder(tmp_path, size=(10, 15))[0]
    assert np.array_equal(image.numpy(), resize_and_crop(pixels, (10, 15)))


@pytest.mark.parametrize(
    ("mode", "suffix"),
    [("L", "jpg"), ("LA", "png"), ("RGBA", "png"), ("P", "png"), ("CMYK", "jpg"), ("1", "png")],
)
def test_other_colours_are_converted_as_pillow_does(tmp_path: Path, mode: str, suffix: str) -> None:
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / f"x.{suffix}"
    Image.fromarray(noise(40, 50)).convert(mode).save(path)
    with Image.open(path) as image:
        expected = resize_and_crop(np.array(image.convert("RGB")), (8, 8))
    assert np.array_equal(ImageFolder(tmp_path, size=8)[0][0].numpy(), expected)
    survey = survey_images([str(path)])
    assert survey.describe_modes() is not None or mode == "L"
    assert survey.sizes == {(40, 50): 1}


def test_a_survey_counts_and_names_the_damage(tmp_path: Path) -> None:
    files = []
    for i, mode in enumerate(("RGB", "RGBA", "P", "RGB")):
        files.append(str(tmp_path / f"{i}.png"))
        Image.fromarray(noise(5 + i, 9)).convert(mode).save(files[-1])
    files.insert(1, str(tmp_path / "x.jpg"))
    Path(files[1]).write_bytes(b"<html>404")
    read: list[int] = []
    survey = survey_images(files, on_read=read.append)
    assert sum(read) == len(files)
    assert survey.sizes == {(5, 9): 1, (6, 9): 1, (7, 9): 1, (8, 9): 1}
    assert list(survey.damage) == [1]
    assert "x.jpg: expected an image that Pillow can decode" in survey.damage[1]
    assert survey.describe_modes() == "1 with alpha (dropped), 1 with a palette"
    assert survey.median_short_side == 7


def test_a_stripe_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("L", (200_000, 1)).save(tmp_path / "a" / "x.png")
    assert ImageFolder(tmp_path)[0][0].shape == (1, 200_000, 3)
    with pytest.raises(ValueError, match=r"makes 44,800,000 × 224, over max_pixels=33,554,432"):
        ImageFolder(tmp_path, size=224)[0]


@pytest.mark.parametrize("size", [0, -1, "x", "224x", 1.5, True, (1, 2, 3), ()])
def test_what_is_no_size_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="size: expected"):
        parse_image_size("size", size)


def test_sizes_may_be_written_in_several_ways() -> None:
    assert parse_image_size("size", "224") == parse_image_size("size", 224) == (224, 224)
    assert parse_image_size("size", "224x160") == parse_image_size("size", [224, 160]) == (224, 160)


def test_many_are_read_in_order_and_the_first_error_is_raised(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for i in range(30):
        Image.new("L", (4, 4), i).save(tmp_path / "a" / f"{i:02d}.png")
    folder = ImageFolder(tmp_path, mode="L")
    samples = folder.__getitems__(range(29, -1, -1))
    assert [int(image[0, 0, 0]) for image, _ in samples] == list(range(29, -1, -1))
    for i in (7, 3):
        (tmp_path / "a" / f"{i:02d}.png").write_bytes(b"")
    with pytest.raises(ValueError, match=r"03\.png: .* an empty file"):
        folder.__getitems__(range(30))
