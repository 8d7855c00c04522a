"""What `halfstep train` shows while it trains: the display of `fit`, in pipes and on terminals."""

import json
import re
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfstep.cli.main import app
from tests.support.pseudo_terminal import CONTROL, run_on_terminal, visible_lines
from tests.support.user_module import write_user_module

EPOCH_LINE = r"epoch (\d)/2  loss \S+  acc \S+  valid_loss \S+  valid_acc \S+  lr 0\.1  \d+\.\d s"
USER_MODULE = """
import torch
from torch import nn
import halfstep as hs

def parts(callbacks=(), **how):
    net = nn.Linear(6, 3)
    x = torch.randn(40, 6)
    y = x[:, :3].argmax(1)
    model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1),
                     metrics={"acc": hs.metrics.Accuracy()})
    data = hs.data.Dataset((x, y)).batch(8)
    valid = hs.data.Dataset((x[:13], y[:13])).batch(4)
    return {"model": model, "data": data, "valid": valid, "callbacks": callbacks, **how}

def with_bar():
    return parts([hs.ProgressBar()])

def with_monitor():
    return parts([hs.LossMonitor(5)])

def silent():
    return parts(progress=False)
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_user_module(USER_MODULE, tmp_path, monkeypatch)
    return tmp_path


def train(build: str, *words: str) -> tuple[list[str], list[str]]:
    """The lines on standard output and on standard error."""
    arguments = ["train", "--build", f"mine:{build}", "--epochs", "2", "--out", "r", *words]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines(), result.stderr.splitlines()


def numbers_of_epochs(lines: list[str]) -> list[str]:
    matches = [re.fullmatch(EPOCH_LINE, line) for line in lines]
    return [match[1] for match in matches if match is not None]


def test_a_pipe_gets_a_line_per_epoch_among_the_commands_own() -> None:
    out, err = train("parts")
    assert numbers_of_epochs(out[:2]) == ["1", "2"]
    assert out[2].startswith("written: r/{log.jsonl, ")
    assert len(out) == 3
    assert err == []


def test_json_has_standard_output_for_itself() -> None:
    out, err = train("parts", "--json")
    assert json.loads("\n".join(out))["steps"] == 10
    assert numbers_of_epochs(err) == ["1", "2"]


def test_plain_has_lines_within_epochs_too() -> None:
    out, _ = train("parts", "--plain")
    assert numbers_of_epochs(out) == ["1", "2"]
    assert sum(line.startswith("loss: ") for line in out) == 2


def test_a_builders_own_bar_is_the_only_one() -> None:
    out, err = train("with_bar")
    assert numbers_of_epochs(out) == []
    assert numbers_of_epochs(err) == ["1", "2"]


def test_a_builders_lines_have_the_scores_beside_them() -> None:
    out, _ = train("with_monitor")
    assert numbers_of_epochs(out) == ["1", "2"]
    assert sum(", loss is " in line for line in out) == 2


def test_a_builder_may_ask_for_silence() -> None:
    out, err = train("silent")
    assert len(out) == 1
    assert out[0].startswith("written: ")
    assert err == []


@pytest.mark.parametrize("build", ["parts", "with_monitor"])
def test_a_terminal_gets_a_bar_or_the_builders_lines(build: str, project: Path) -> None:
    code = "from halfstep.cli import main; main()"
    words = ["train", "--build", f"mine:{build}", "--epochs", "2", "--out", "r"]
    status, drawn = run_on_terminal([sys.executable, "-c", code, *words], cwd=project)
    assert status == 0, drawn
    lines = [line for line in visible_lines(drawn) if line]
    assert numbers_of_epochs(lines) == ["1", "2"]
    assert lines[-1].startswith("written: ")
    assert len(lines) == (3 if build == "parts" else 5)
    assert ("━ 0/5" in CONTROL.sub("", drawn)) == (build == "parts")
