"""A comparison that is killed, asked to stop, or runs into trouble of its own, and the same command after it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from halfstep.compare import Settings, compare
from halfstep.compare.progress import Lines
from tests.support.user_module import work_beside

# A network that ends its own process in the given training step of the given network that it builds.
MINE = """
import os
from torch import nn

built = 0

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        global built
        built += 1
        self.number, self.steps = built, 0
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 10))

    def forward(self, x):
        if self.training and "END" in os.environ:
            self.steps += 1
            number, step, which = map(int, os.environ["END"].split())
            if (self.number, self.steps) == (number, step):
                os.kill(os.getpid(), which)
        return self.layers(x)
"""
PROGRAM = """
import sys
import torch, typer
from halfstep.cli.compare import compare
torch.set_num_threads(1)
app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(compare)
app()
"""
SIZES = {"samples": 160, "test_samples": 100, "epochs": 3, "batch": 32}
SMALL = {**SIZES, "net": "mine:Net", "seeds": (0,), "device": "cpu"}


def settings(**changes: Any) -> Settings:
    return Settings(**{**SMALL, "precisions": ("fp32", "O2"), **changes})


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_beside(MINE, tmp_path, monkeypatch)


def start(out: str, end: str) -> subprocess.Popen[str]:
    sizes = [word for name, n in SIZES.items() for word in (f"--{name.replace('_', '-')}", str(n))]
    flags = ["--net", "mine:Net", "--seeds", "1", "--precisions", "fp32,O2", "--device", "cpu"]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *sizes, *flags, "--out", out], text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, "END": end},
    )  # fmt: skip


def numbers(told: dict[str, Any]) -> list[dict[str, Any]]:
    """All of a run that no clock decides."""
    names = (
        "precision",
        "seed",
        "status",
        "curve",
        "loss",
        "acc",
        "correct",
        "steps",
        "updates",
        "samples",
        "dtypes",
    )
    return [
        {name: run[name] for name in names} | {"epochs": len(run["epochs"])} for run in told["runs"]
    ]


def test_the_same_command_goes_on_after_a_kill_and_after_signals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second run of two (the third network: the first is that of the check) ends in step 8 of 15."""
    kinds = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
    children = {kind: start(kind.name, f"3 8 {int(kind)}") for kind in kinds}
    whole = numbers(compare(settings(), "whole"))
    for kind, code in kinds.items():
        _, said = children[kind].communicate(timeout=120)
        assert children[kind].returncode == code, said
        assert ("The same command goes on from here" in said) == (kind is not signal.SIGKILL)
        out = Path(kind.name)
        left = json.loads((out / "compare.json").read_text())
        assert [run["precision"] for run in left["runs"]] == ["fp32"]
        assert left["recommendation"]["reason"] == "1 of 2 runs are done"
        saved = [path.name for path in (out / "runs/O2-s0").glob("step-*")]
        assert saved == ["step-000000005" if kind is signal.SIGKILL else "step-000000008"]
        stamp = (out / "runs/fp32-s0/result.json").stat().st_mtime_ns
        capsys.readouterr()
        assert numbers(compare(settings(), out, progress=Lines())) == whole
        assert capsys.readouterr().out.count("ms/step") == 1  # the finished one was not run again
        assert (out / "runs/fp32-s0/result.json").stat().st_mtime_ns == stamp


def test_a_process_that_was_killed_between_the_last_save_and_its_result() -> None:
    """All steps are done: what is looked at afterwards is the same."""
    from halfstep.compare.comparison import _checkpoints_in, _fit
    from halfstep.compare.curves import RunCurves
    from halfstep.experiment.build import build_model
    from halfstep.experiment.datasets import material
    from halfstep.experiment.output_folder import run_folder

    asked = settings(precisions=("O2",))
    whole = numbers(compare(asked, "whole"))
    given = material(asked)
    place = run_folder(Path("out"), "O2", 0)
    _fit(asked, given, build_model(asked, given, "O2", 0), 0, [RunCurves(15), _checkpoints_in(place)])
    assert numbers(compare(asked, "out")) == whole


def test_a_disk_that_fails_ends_the_comparison_and_is_no_result_of_a_precision() -> None:
    """A checkpoint without its files: the run is not recorded as failed, and the way out works."""
    broken = Path("out/runs/fp32-s0/step-000000005")
    broken.mkdir(parents=True)
    with pytest.raises(FileExistsError, match=r"only broken checkpoints.*Remove them"):
        compare(settings(), "out")
    assert json.loads(Path("out/compare.json").read_text())["runs"] == []
    broken.rmdir()
    assert len(compare(settings(), "out")["runs"]) == 2


def test_running_out_of_memory_in_one_precision_leaves_the_others() -> None:
    """A layer that allocates more than any machine has, in float16 only."""
    Path("greedy.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.last = nn.Linear(784, 10)\n"
        "    def forward(self, x):\n"
        "        out = self.last(x.flatten(1))\n"
        "        return out if out.dtype != torch.float16 else torch.empty(1 << 50, dtype=out.dtype)\n"
    )
    told = compare(settings(net="greedy:Net", precisions=("fp32", "O2", "fp64")), "out")
    assert [run["status"] for run in told["runs"]] == ["done", "failed", "done"]
    assert "memory" in told["runs"][1]["error"]
    assert torch.isfinite(torch.tensor(told["runs"][2]["loss"]))
