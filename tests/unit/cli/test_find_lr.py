"""`halfstep find-lr` gives what hs.find_lr gives for the same run, and leaves nothing behind."""

from pathlib import Path

import pytest

import halfstep as hs
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
