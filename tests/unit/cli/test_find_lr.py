"""`halfstep find-lr` gives what hs.find_lr gives for the same run, and leaves nothing behind."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import halfstep as hs
from halfstep.cli.main import app
from halfstep.experiment import reading_progress
from halfstep.experiment.training_run import TrainSettings, build_run
from tests.support.command_line import CommandLine, run_command, run_json

BUILDER = """
import torch
from torch import nn
import halfstep as hs


def build():
    net = hs.nets.mlp()
    images, labels = hs.data.sample()
    data = hs.data.Dataset({"image": images, "label": labels})
    data = data.map(hs.data.Rescale(1 / 255), "image")
    optimizer = torch.optim.Adam(net.parameters())
    return hs.Model(net, nn.CrossEntropyLoss(), optimizer, "O2"), data.shuffle().batch(64)
"""


def test_json_is_the_curve_of_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--precision", "O2", "--samples", "2048", "--updates", "40", "--low", "1e-4")
    printed = run_json("find-lr", *options)
    built = build_run(TrainSettings(precision="O2", samples=2048))
    expected = hs.find_lr(built.model, built.data, low=1e-4, updates=40)
    assert printed["losses"] == list(expected.losses)
    assert printed["suggestion"] == expected.suggestion
    assert list(tmp_path.iterdir()) == []


def write_houses(path: Path) -> None:
    """A table with a price that follows from two numbers and a category."""
    g = np.random.default_rng(0)
    lines = ["area,rooms,city,price"]
    for _ in range(120):
        area, rooms, city = g.uniform(30, 200), int(g.integers(1, 7)), int(g.integers(2))
        lines.append(f"{area:.1f},{rooms},{'ab'[city]},{3000 * area + 9000 * rooms + city:.0f}")
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.filterwarnings("default::halfstep.errors.Notice")
def test_a_table_is_tested_as_train_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_houses(Path("houses.csv"))
    line = "--data csv:houses.csv --target price --drop rooms --batch 16 --test-share 0.25"
    code, shown = CommandLine(monkeypatch, capsys)(f"find-lr {line} --updates 40 --json")
    assert code == 0, shown
    printed, _ = json.JSONDecoder().raw_decode(shown)
    settings = TrainSettings(
        data="csv:houses.csv", target="price", drop="rooms", batch=16, test_share=0.25
    )
    built = build_run(settings)
    expected = hs.find_lr(built.model, built.data, updates=40)
    assert printed["losses"] == list(expected.losses)

    # What is chosen for the user is said in a line each, as `train` says it.
    assert "note: data: target 'price': a regression" in shown
    assert "note: data: learns from 1 number (area) and 1 category (city). --drop" in shown
    assert "note: net: the usual network, mlp. --net resnet18 chooses another\n" in shown


@pytest.mark.filterwarnings("default::halfstep.errors.Notice")
def test_photos_are_brought_to_a_size_and_notes_say_what_was_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    monkeypatch.chdir(tmp_path)
    g = np.random.default_rng(0)
    for label, name in enumerate(("cat", "dog")):
        Path("photos", name).mkdir(parents=True)
        for i in range(10):
            shape = (20 + i, 30, 3)
            pixels = g.integers(120 * label, 120 * label + 60, shape, dtype=np.uint8)
            image.fromarray(pixels).save(f"photos/{name}/{i}.png")
    line = "find-lr --data photos/ --size 8x12 --net mlp --batch 4 --updates 30"
    code, shown = CommandLine(monkeypatch, capsys)(f"{line} --json")
    assert code == 0, shown
    printed, _ = json.JSONDecoder().raw_decode(shown)
    built = build_run(TrainSettings(data="photos/", size="8x12", batch=4))
    expected = hs.find_lr(built.model, built.data, updates=30)
    assert printed["losses"] == list(expected.losses)
    assert "the usual network" not in shown

    code, shown = CommandLine(monkeypatch, capsys)(line.replace("--size 8x12 --net mlp", ""))
    assert code == 0, shown
    assert "suggested learning rate: " in shown
    assert "note: data: photos/ has no test part: 20% of each class" in shown
    assert "resized to cover 24 × 24" in shown
    assert "the usual network, mlp" in shown


def test_a_long_test_says_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_progress, "LINE_EVERY_S", 0.0)
    line = "find-lr --samples 1024 --updates 20 --high 0.1"
    result = CliRunner().invoke(app, line.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines() == [
        f"range test, updates: {done} of 20" for done in range(1, 21)
    ]


def test_a_builder_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_run.py").write_text(BUILDER)
    printed = run_command(
        *("find-lr", "--build", "my_run.py:build", "--updates", "40", "--plot", "lr.svg")
    )
    assert printed.startswith("suggested learning rate: ")
    assert printed.endswith("written: lr.svg\n")
    assert "<svg" in (tmp_path / "lr.svg").read_text("utf-8")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--plot lr.png", "--plot: expected a file that ends in .svg"),
        ("--low -1", "--low: expected a finite number above 0"),
        ("--updates 3", "--updates: expected a whole number, 10 or more, received 3"),
        (
            "--build mine:build --batch 32",
            "find-lr: --batch beside --build, whose builder makes the model",
        ),
        ("--high 1.1e-7 --samples 2048", "the loss does not fall"),
    ],
)
def test_mistakes_are_one_line(
    options: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, shown = CommandLine(monkeypatch, capsys)(f"find-lr {options}")
    assert code == 2
    assert message in shown
    assert "Traceback" not in shown
