"""A step again, bit for bit, and where two runs part: the library and the command."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import halfstep as hs
from halfstep.again import diff, replay
from halfstep.callbacks import Checkpoint
from halfstep.cli.app import app
from halfstep.engine import Callback, Row, Run
from halfstep.model import Model

X = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(2))


class Nudge(nn.Module):
    """Changes its input a little at one forward: a run that parts from the other there."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return torch.where(self.count == self.at, x * (1 + 2**-6), x) if self.training else x


def build(nudge: int = 0, fingerprint_every: int = 1) -> dict[str, Any]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), Nudge(nudge), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model = Model(net, nn.CrossEntropyLoss(), optimizer, "O2", ema=0.9, fingerprint_every=fingerprint_every)
    return {"model": model, "data": hs.data.Dataset({"x": X, "y": Y}).shuffle().batch(8), "epochs": 3}


def run(folder: Path, every: int = 6, **options: Any) -> Any:
    parts = build(**options)
    callbacks = [hs.JSONLLog(folder / "log.jsonl"), Checkpoint(folder, every_steps=every, every_epochs=None, keep=100)]
    result = parts["model"].fit(parts["epochs"], parts["data"], callbacks=callbacks)
    return parts["model"], result


class Caught(Callback):
    """What a step looked like while the run was first made."""

    exact = True

    def __init__(self, at: int) -> None:
        self.at, self.row, self.output, self.weights = at, None, None, None

    def begin(self, run: Run) -> None:
        run.model.net.register_forward_hook(self.hook)
        self.run = run

    def hook(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if self.run.position == self.at - 1:
            self.output = output.detach().clone()

    def step(self, run: Run, row: Row) -> None:
        if row.global_step == self.at:
            self.row, self.weights = row, [p.detach().clone() for p in run.net.parameters()]


@pytest.mark.parametrize("step", [1, 2, 6, 7, 11, 24])
def test_a_replayed_step_is_that_very_step(tmp_path: Path, step: int) -> None:
    caught = Caught(step)
    parts = build()
    callbacks = [caught, Checkpoint(tmp_path, every_steps=6, every_epochs=None, keep=100)]
    parts["model"].fit(parts["epochs"], parts["data"], callbacks=callbacks)
    found = replay(build, tmp_path, step)
    assert found.row == caught.row
    assert torch.equal(found.outputs[""], caught.output)  # dropout and precision included
    assert set(found.gradients) == {"0.weight", "0.bias", "4.weight", "4.bias"}
    assert set(found.inputs) == {"", "0", "1", "2", "3", "4"}
    moved = [name for name in found.before if found.before[name] != found.after[name]]
    assert "net.0.weight" in moved
    expected = "the beginning" if step < 7 else f"step-{(step - 1) // 6 * 6:09d}"
    assert expected in found.origin


def test_gradients_of_a_replay_explain_its_update(tmp_path: Path) -> None:
    run(tmp_path)
    found = replay(build, tmp_path, 9)
    assert found.row is not None
    norm = torch.stack([g.double().norm() / found.row.scale for g in found.gradients.values()]).norm()
    assert float(norm) == pytest.approx(found.row.grad_norm, rel=1e-6)  # float32 sums


def test_runs_that_are_equal_are_found_equal(tmp_path: Path) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b")
    found = diff(tmp_path / "a", tmp_path / "b", build=(build, build))
    assert [(d.by, d.step) for d in found] == [("by the logs", None), ("by the checkpoints", None), ("by replay", None)]
    assert found[0].equal_until == 24


@pytest.mark.parametrize("at", [1, 5, 14])
def test_the_first_differing_step_and_its_tensors_are_named(tmp_path: Path, at: int) -> None:
    run(tmp_path / "a")
    run(tmp_path / "b", nudge=at)
    logs, checkpoints, by_replay = diff(tmp_path / "a", tmp_path / "b", build=(build, lambda: build(nudge=at)))
    assert logs.step == at
    assert "fingerprint" in logs.names
    assert logs.equal_until == at - 1
    assert checkpoints.step == -(-at // 6) * 6
    assert by_replay.step == at
    assert "net.4.weight" in by_replay.names
    assert by_replay.equal_until == at - 1


def test_fingerprints_see_what_the_loss_does_not(tmp_path: Path) -> None:
    """The update of step 5 differs; its loss, computed before, may not: without fingerprints the logs are late."""
    run(tmp_path / "a")
    run(tmp_path / "b", nudge=5)
    logs = diff(tmp_path / "a", tmp_path / "b")[0]
    assert logs.step == 5
    assert "fingerprint" in logs.names


MISTAKES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no folder": (lambda p: replay(build, p / "none", 3), "expected a folder of checkpoints, found nothing"),
    "step 0": (lambda p: replay(build, p, 0), "expected a step of 1 or more, got 0"),
    "beyond the end": (lambda p: replay(build, p, 99), "the run ended before step 99"),
    "a builder of nothing": (lambda p: replay(lambda: 3, p, 1), "expected a function that returns .model, data."),
    "an unknown argument": (lambda p: replay(lambda: {**build(), "epoch": 3}, p, 1), "epoch is no argument of fit"),
    "diff without a folder": (lambda p: diff(p, p / "none"), "expected the folder of a run"),
    "diff without anything": (lambda p: diff(p, p), "share neither a log.jsonl nor a checkpoint"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name: str, tmp_path: Path) -> None:
    act, message = MISTAKES[name]
    with pytest.raises((ValueError, TypeError, FileNotFoundError), match=message):
        act(tmp_path)


# the command

BUILDER = """
import torch
from torch import nn
import halfstep as hs
from halfstep.model import Model

def build():
    torch.manual_seed(0)
    net = nn.Linear(6, 3)
    x = torch.randn(40, 6); y = torch.randint(0, 3, (40,))
    model = Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    return {"model": model, "data": hs.data.Dataset((x, y)).batch(8), "epochs": 2}
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with a builder and a run of it."""
    (tmp_path / "my_build.py").write_text(BUILDER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_build", raising=False)
    import my_build  # type: ignore[import-not-found]

    for name in ("a", "b"):
        parts = my_build.build()
        parts["model"].fit(parts["epochs"], parts["data"], callbacks=[Checkpoint(tmp_path / name)])
    return tmp_path


def test_the_commands(project: Path) -> None:
    runner = CliRunner()
    shown = runner.invoke(app, ["replay", "a", "--step", "7", "--build", "my_build:build", "--save", "s.safetensors"])
    assert shown.exit_code == 0, shown.output
    assert "step 7, from" in shown.output
    assert "grad weight" in shown.output
    assert (project / "s.safetensors").is_file()
    same = runner.invoke(app, ["diff", "a", "b", "--json"])
    assert same.exit_code == 0
    assert json.loads(same.output) == [{"by": "by the checkpoints", "step": None, "names": [], "equal_until": 10}]


def test_the_installed_command_tells_mistakes_without_a_traceback(project: Path) -> None:
    command = [sys.executable, "-c", "from halfstep.cli import main; main()", "replay", "a", "--step", "7"]
    told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert told.returncode == 2
    assert "halfstep: replay: say how the run was built: --build package.module:function" in told.stderr
    assert "Traceback" not in told.stderr
