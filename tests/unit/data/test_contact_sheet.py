"""The contact sheet, read back as pixels."""

from pathlib import Path

import pytest
import torch
from PIL import Image

from halfstep.data import Dataset, Flip, Normalize, Rescale, ToCHW, sample, sheet


def coloured_data(size: int = 12) -> Dataset:
    """Sample i is a picture whose left half is (20 i, 0, 0) and whose right half is black."""
    images = torch.zeros(size, 8, 8, 3, dtype=torch.uint8)
    images[:, :, :4, 0] = (torch.arange(size) * 20).to(torch.uint8).view(-1, 1, 1)
    return Dataset(
        {"image": images, "label": torch.arange(size) % 3}, classes=["ape", "bear", "cat"]
    )


def red(page: Image.Image, column: int, row: int) -> tuple[int, int]:
    """Red in the middle of the left and of the right half of a tile."""
    x = 64 + column * 120 + 28
    y = 26 + row * 120 + 56
    return page.getpixel((x, y))[0], page.getpixel((x + 56, y))[0]  # type: ignore[index]


def test_the_sheet_shows_the_samples_of_the_first_epoch_raw_and_as_delivered(
    tmp_path: Path,
) -> None:
    data = coloured_data().map(Flip(p=1.0), "image").shuffle(seed=1).batch(4)
    numbers = Dataset({"i": torch.arange(12)}).shuffle(seed=1).batch(4)
    order = torch.cat([i for (i,) in numbers])
    path = tmp_path / "sheet.png"
    sheet(data, path, samples=6, epochs=2)
    page = Image.open(path)
    assert page.format == "PNG"
    assert page.size == (64 + 6 * 120, 26 + 3 * 120)
    for column in range(6):
        value = int(order[column]) * 20
        assert red(page, column, 0) == (value, 0)
        # p=1: flipped in every epoch.
        assert red(page, column, 1) == red(page, column, 2) == (0, value)


def test_labels_are_written_by_their_names() -> None:
    """The text of two sheets differs where only a class name differs."""

    def label_pixels(data: Dataset) -> list[bytes]:
        page = sheet(data, samples=3, epochs=0)
        lefts = [64 + column * 120 for column in range(3)]
        return [page.crop((left, 0, left + 112, 20)).tobytes() for left in lefts]

    with_cat = coloured_data()
    with_dog = coloured_data()
    with_dog.classes = ("ape", "bear", "dog")
    pairs = zip(label_pixels(with_cat), label_pixels(with_dog), strict=True)
    assert [a == b for a, b in pairs] == [True, True, False]


def test_floats_in_chw_are_stretched_to_what_the_eye_sees() -> None:
    data = coloured_data(3).map(
        [ToCHW(), Rescale(1 / 255, 0.0), Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))], "image"
    )
    page = sheet(data, samples=3, epochs=1)
    assert red(page, 2, 1) == (255, 0)


def test_the_shipped_sample_is_gray() -> None:
    images, labels = sample(train=False)
    page = sheet(Dataset((images, labels)), samples=4, epochs=0)
    enlarged = page.crop((64, 26, 64 + 112, 26 + 112)).getchannel(0)
    original = enlarged.resize((28, 28), Image.Resampling.NEAREST)
    pixels = torch.frombuffer(bytearray(original.tobytes()), dtype=torch.uint8)
    assert torch.equal(pixels.view(28, 28), images[0])


def test_fewer_samples_than_requested_make_a_smaller_sheet() -> None:
    assert sheet(coloured_data(3), samples=8, epochs=1).size == (64 + 3 * 120, 26 + 2 * 120)


def test_mistakes() -> None:
    with pytest.raises(
        ValueError, match="sheet: samples: expected a whole number, 1 or more, received 0"
    ):
        sheet(coloured_data(), samples=0, epochs=1)
    with pytest.raises(
        ValueError, match=r"expected a column of images .* got \['x', 'y'\]\. Name it"
    ):
        sheet(Dataset((torch.zeros(4), torch.zeros(4))))
    with pytest.raises(
        ValueError,
        match=r"got shape \(1, 5, 6, 7\), where neither would do\. State layout='HWC' or",
    ):
        sheet(Dataset({"x": torch.zeros(4, 5, 6, 7)}))
    with pytest.raises(ValueError, match=r"expected a path that ends in \.png, got 'sheet\.jpg'"):
        sheet(coloured_data(), "sheet.jpg")


def first_tile(page: Image.Image) -> torch.Tensor:
    """The first tile of the first row, [112, 112, 3]."""
    part = page.crop((64, 26, 64 + 112, 26 + 112))
    return torch.frombuffer(bytearray(part.tobytes()), dtype=torch.uint8).view(112, 112, 3)


def test_floats_from_0_to_1_are_shown_as_they_are_and_others_by_their_finite_values() -> None:
    half = torch.full((1, 8, 8), 0.5)
    assert first_tile(sheet(Dataset({"x": half}), epochs=0)).unique().tolist() == [128]
    wide = torch.full((1, 8, 8), -3.0)
    wide[0, :, 4:] = 5.0
    expected = first_tile(sheet(Dataset({"x": wide}), epochs=0))
    assert expected.unique().tolist() == [0, 255]
    wide[0, 0, 0] = float("nan")
    wide[0, 0, 1] = float("-inf")
    wide[0, 0, 7] = float("inf")
    assert torch.equal(first_tile(sheet(Dataset({"x": wide}), epochs=0)), expected)


def test_a_long_image_keeps_its_shape() -> None:
    page = first_tile(sheet(Dataset({"x": torch.zeros(1, 8, 32, dtype=torch.uint8)}), epochs=0))
    black = (page == 0).all(-1)
    assert (int(black.any(1).sum()), int(black.any(0).sum())) == (28, 112)


def test_an_open_layout_is_an_error_unless_it_is_stated() -> None:
    red = torch.zeros(1, 3, 20, 4, dtype=torch.uint8)
    red[:, 0] = 255
    with pytest.raises(
        ValueError, match=r"where both would do\. State layout='HWC' or layout='CHW'"
    ):
        sheet(Dataset({"x": red}), epochs=0)
    assert first_tile(sheet(Dataset({"x": red}), epochs=0, layout="CHW"))[56, 56].tolist() == [
        255,
        0,
        0,
    ]


def test_samples_that_do_not_stack_and_labels_that_are_text_are_drawn() -> None:
    rows = [(torch.zeros(8 + i, 8, 3, dtype=torch.uint8), f"n{i}") for i in range(3)]
    page = sheet(Dataset(rows, ["image", "name"]).batch(3), epochs=1)
    assert page.size == (64 + 3 * 120, 26 + 2 * 120)
