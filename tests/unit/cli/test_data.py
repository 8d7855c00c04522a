"""`halfstep data`: data sets that are found, drawn, and read to their end."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli.main import app
from halfstep.data.download.find import SAMPLE
from tests.support.command_line import run_command, run_json


def test_check_reads_all_of_the_sample() -> None:
    parts = run_json("data", "check", "sample")["parts"]
    for part, train in zip(parts, (True, False), strict=True):
        images, labels = hs.data.sample(train)
        pixels = images.numpy().astype(np.float64) / 255
        assert part["samples"] == len(images)
        assert part["sizes"] == [[[28, 28, 1], len(images)]]
        assert list(part["classes"].values()) == torch.bincount(labels).tolist()
        # Tolerances: float64 sums of 1e7 values, and a difference of squares.
        assert part["mean"] == pytest.approx([pixels.mean()], rel=1e-12)
        assert part["deviation"] == pytest.approx([pixels.std()], rel=1e-9)
        assert part["damage"] == []


@pytest.fixture
def damaged_folder(tmp_path: Path) -> Path:
    """Fashion-MNIST's sample with the test images cut short."""
    for file in SAMPLE.glob("*.gz"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    archive = tmp_path / "t10k-images-idx3-ubyte.gz"
    content = gzip.decompress(archive.read_bytes())
    archive.unlink()
    archive.with_suffix("").write_bytes(content[:-100])
    return tmp_path


def test_a_damaged_file_exits_with_1_and_is_named(damaged_folder: Path) -> None:
    words = ["data", "check", "fashion-mnist", "--path", str(damaged_folder), "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1
    train, test = json.loads(result.output)["parts"]
    assert train["samples"] == 11_000
    assert train["damage"] == []
    assert len(test["damage"]) == 1
    assert "t10k-images-idx3-ubyte" in test["damage"][0]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images of two classes, in train and test, of different widths."""
    for split, count in (("train", 3), ("test", 1)):
        for name in ("cat", "dog"):
            folder = tmp_path / "photos" / split / name
            folder.mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (8 + i, 6), (255, 0, 51)).save(folder / f"{i}.png")
    return tmp_path / "photos"


NOTES = """\
note: images of 8 × 6, 9 × 6, 10 × 6: halfstep train and compare resize the shorter side and crop \
the centre; --size 224 says to which size
note: 2 test photos are among the training photos too, byte for byte, which makes scores better \
than they are: test/cat/0.png = train/dog/0.png, test/dog/0.png = train/dog/0.png
"""


def test_check_reads_every_image_and_names_the_damaged_ones(photos: Path) -> None:
    train, test = run_json("data", "check", str(photos))["parts"]
    assert train["samples"] == 6
    assert train["classes"] == {"cat": 3, "dog": 3}
    assert sorted(size for size, _ in train["sizes"]) == [[6, 8, 3], [6, 9, 3], [6, 10, 3]]
    assert test["mean"] == [1.0, 0.0, 0.2]
    assert test["deviation"] == [0.0, 0.0, 0.0]

    assert "\nnothing is damaged\n" in run_command("data", "check", str(photos))

    damaged_files = [photos / "train" / "cat" / "0.png", photos / "train" / "dog" / "1.png"]
    for file in damaged_files:
        file.write_bytes(b"no image")
    result = CliRunner().invoke(app, ["data", "check", str(photos)])
    assert result.exit_code == 1
    assert [str(file) in result.output for file in damaged_files] == [True, True]
    assert result.stdout.endswith("\n2 damaged\n")
    assert result.stderr == NOTES


def test_show_draws_a_sheet(photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "sheet.png"
    run_command("data", "show", "sample", "--samples", "3", "--out", str(out))
    with Image.open(out) as sheet:
        narrow_width = sheet.width
    run_command("data", "show", str(photos), "--samples", "4", "--out", str(out))
    with Image.open(out) as sheet:
        assert sheet.format == "PNG"
        assert sheet.width > narrow_width


def test_get_finds_what_is_there(tmp_path: Path) -> None:
    result = run_json("data", "get", "fashion-mnist", "--path", str(SAMPLE))
    assert result["folder"] == str(SAMPLE)
    assert result["origin"] == "path"
    assert result["sample"] is True
