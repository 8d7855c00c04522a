"""A comparison that is killed, stopped or fails by itself, and the same command after it."""

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
from halfstep.compare.progress import LineProgress
from tests.support.user_module import write_user_module

# A network that ends its own process. END has the number of the network, in the order they are
# built, its training step, and the signal.
USER_MODULE = """
import os
from torch import nn

built = 0

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        global built
        built += 1
        self.number = built
        self.steps = 0
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(784, 8), nn.ReLU(), nn.Linear(8, 10))

    def forward(self, x):
        if self.training and "END" in os.environ:
            self.steps += 1
            number, step, signal_number = map(int, os.environ["END"].split())
            if (self.number, self.steps) == (number, step):
                os.kill(os.getpid(), signal_number)
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
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_user_module(USER_MODULE, tmp_path, monkeypatch)


def start_process(out: str, end: str) -> subprocess.Popen[str]:
    """Starts the command in a process that ends itself as `end` says."""
    flags = ["--net", "mine:Net", "--seeds", "1", "--precisions", "fp32,O2", "--device", "cpu"]
    for name, count in SIZES.items():
        flags += [f"--{name.replace('_', '-')}", str(count)]
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *flags, "--out", out],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "END": end},
    )


# Everything of a result that no clock decides.
REPRODUCIBLE = (
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


def reproducible_results(summary: dict[str, Any]) -> list[dict[str, Any]]:
    results = []
    for run in summary["runs"]:
        result = {name: run[name] for name in REPRODUCIBLE}
        result["epochs"] = len(run["epochs"])
        results.append(result)
    return results


def test_the_same_command_goes_on_after_a_kill_and_after_signals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The second run of two ends in step 8 of 15. It has the third network."""
    exit_codes = {signal.SIGKILL: -9, signal.SIGTERM: 143, signal.SIGINT: 130}
    children = {kind: start_process(kind.name, f"3 8 {int(kind)}") for kind in exit_codes}
    uninterrupted = reproducible_results(compare(settings(), "whole"))
    for kind, exit_code in exit_codes.items():
        _, errors = children[kind].communicate(timeout=120)
        assert children[kind].returncode == exit_code, errors
        is_kill = kind is signal.SIGKILL
        assert ("The same command goes on from here" in errors) == (not is_kill)

        # The finished run is in the summary, the other one has a checkpoint.
        out = Path(kind.name)
        summary = json.loads((out / "compare.json").read_text())
        assert [run["precision"] for run in summary["runs"]] == ["fp32"]
        assert summary["recommendation"]["reason"] == "1 of 2 runs are done"
        checkpoints = [path.name for path in (out / "runs/O2-s0").glob("step-*")]
        assert checkpoints == ["step-000000005" if is_kill else "step-000000008"]

        # Going on gives the same results; the finished run is not repeated.
        finished_result = out / "runs/fp32-s0/result.json"
        written_at = finished_result.stat().st_mtime_ns
        capsys.readouterr()
        summary = compare(settings(), out, progress=LineProgress())
        assert reproducible_results(summary) == uninterrupted
        assert capsys.readouterr().out.count("ms/step") == 1
        assert finished_result.stat().st_mtime_ns == written_at


def test_a_process_that_was_killed_between_the_last_save_and_its_result() -> None:
    """All steps are done: what is computed afterwards is the same."""
    from halfstep.compare.comparison import _checkpoints_in, _fit
    from halfstep.compare.curves import RunCurves
    from halfstep.experiment.build import build_model
    from halfstep.experiment.datasets import load_train_test_data
    from halfstep.experiment.output_folder import run_folder

    one_run = settings(precisions=("O2",))
    uninterrupted = reproducible_results(compare(one_run, "whole"))
    data = load_train_test_data(one_run)
    model = build_model(one_run, data, "O2", 0)
    callbacks = [RunCurves(15), _checkpoints_in(run_folder(Path("out"), "O2", 0))]
    _fit(one_run, data, model, 0, callbacks)
    assert reproducible_results(compare(one_run, "out")) == uninterrupted


def test_a_disk_that_fails_ends_the_comparison_and_is_no_result_of_a_precision() -> None:
    """A checkpoint without its files: the run is not recorded as failed, and the advice works."""
    broken = Path("out/runs/fp32-s0/step-000000005")
    broken.mkdir(parents=True)
    with pytest.raises(FileExistsError, match=r"only broken checkpoints.*Remove them"):
        compare(settings(), "out")
    assert json.loads(Path("out/compare.json").read_text())["runs"] == []
    broken.rmdir()
    assert len(compare(settings(), "out")["runs"]) == 2


# A layer that allocates more than any machine has, in float16 only.
GREEDY_MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(784, 10)

    def forward(self, x):
        out = self.last(x.flatten(1))
        if out.dtype == torch.float16:
            return torch.empty(1 << 50, dtype=out.dtype)
        return out
"""


def test_running_out_of_memory_in_one_precision_leaves_the_others() -> None:
    Path("greedy.py").write_text(GREEDY_MODULE)
    precisions = ("fp32", "O2", "fp64")
    runs = compare(settings(net="greedy:Net", precisions=precisions), "out")["runs"]
    assert [run["status"] for run in runs] == ["done", "failed", "done"]
    assert "memory" in runs[1]["error"]
    assert torch.isfinite(torch.tensor(runs[2]["loss"]))
