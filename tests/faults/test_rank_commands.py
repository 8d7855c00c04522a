"""`halfstep train --ranks` and `compare --ranks`: real processes, one terminal, one end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from halfstep import checkpoint
from halfstep.cli.rank_options import check_gpu_count
from halfstep.cli.rank_process import RankEnding, describe_failure
from tests.support.command_line import CommandLine, run_command, run_json
from tests.support.pseudo_terminal import run_on_terminal
from tests.support.rank_jobs import run_ranks

ROOT = Path(__file__).parents[2]
HALFSTEP = (sys.executable, "-m", "halfstep")
SMALL = ("--samples", "512", "--test-samples", "100")
TWO_BAD_RANKS = ("train", "--build", "bad:build", "--ranks", "2", "--epochs", "2")
TIMEOUT_S = 120

# One rank's fifth batch raises an error, or kills the process, in the first attempt.
BUILDER = """
import os
import signal

import torch
from torch import nn

import halfstep as hs


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        is_bad_rank = os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if self.calls == 5 and is_bad_rank:
            if "KILL" in os.environ:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("the fifth batch is bad")
        return self.linear(x)


def build():
    net = Net()
    x = torch.linspace(-1, 1, 256).view(64, 4)
    model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    return model, hs.data.Dataset((x, (x.sum(1) > 0).long()), seed=0).shuffle().batch(8)
"""


def run(*words: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        [*HALFSTEP, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=cwd,
        env=environment,
        check=False,
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bad.py").write_text(BUILDER)
    return tmp_path


def same_files(one: Path, other: Path) -> bool:
    names = ("log.jsonl", "weights.safetensors")
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_two_ranks_write_the_files_of_one_process_and_it_goes_on(folder: Path) -> None:
    words = ("train", *SMALL, "--epochs", 1, "--exact", "bits", "--out")
    result = run(*words, "two", "--ranks", 2, cwd=folder)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("epoch 1/1") == 1
    assert result.stdout.count("written:") == 1
    assert result.stderr == ""
    run_command(*map(str, words), str(folder / "one"))
    assert same_files(folder / "one", folder / "two")
    settings = json.loads((folder / "two" / "run.json").read_text())["asked"]
    assert (settings["ranks"], settings["exact"], settings["logical"]) == (2, "bits", 12)
    report = run_command("report", str(folder / "two"))
    assert "report.md" in report
    assert "| Ranks | 2 |" in (folder / "two" / "report.md").read_text()

    # One process goes on with the run of two.
    words = ("train", *SMALL, "--epochs", "2", "--exact", "bits", "--resume", "auto", "--out")
    for name in ("one", "two"):
        run_command(*words, str(folder / name))
    assert same_files(folder / "one", folder / "two")


@pytest.mark.slow
def test_an_error_of_one_rank_is_the_only_message(folder: Path) -> None:
    result = run(*TWO_BAD_RANKS, "--out", "out", cwd=folder)
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
    assert errors[0] == "halfstep: rank 1: the fifth batch is bad"
    assert len(errors) == 3  # the batch it came from, and --debug


@pytest.mark.slow
def test_ranks_start_again_where_one_was_killed(folder: Path) -> None:
    words = (*TWO_BAD_RANKS, "--max-restarts", "1", "--out", "out")
    result = run(*words, cwd=folder, KILL="1")
    assert result.returncode == 0, result.stderr
    assert "note: rank 1: ended without a message" in result.stderr
    assert "epoch 2/2" in result.stdout
    assert load_file(folder / "out" / "weights.safetensors")["linear.weight"].isfinite().all()
    result = run(*TWO_BAD_RANKS, "--out", "once", cwd=folder, KILL="1")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("halfstep: rank 1: ended without a message")


@pytest.mark.slow
def test_ctrl_c_stops_all_ranks_and_the_run_is_saved(folder: Path) -> None:
    words = ("train", *SMALL, "--epochs", "500", "--ranks", "2", "--out", "out")
    status, drawn = run_on_terminal([*HALFSTEP, *words], cwd=folder, typed="\x03")
    assert status == 130, drawn
    assert drawn.count("halfstep: stopped after step") == 1
    assert "Traceback" not in drawn
    assert len(checkpoint.listing(folder / "out")) > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_stops_all_ranks_and_the_run_is_saved(
    folder: Path, number: signal.Signals
) -> None:
    words = ("train", *SMALL, "--epochs", "500", "--ranks", "2", "--out", "out")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = (folder / "log").open("w")
    launcher = subprocess.Popen(
        [*HALFSTEP, *words], cwd=folder, env=environment, stdout=log, stderr=log
    )
    deadline = time.monotonic() + TIMEOUT_S
    while not (folder / "out" / "run.json").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher.send_signal(number)
    assert launcher.wait(TIMEOUT_S) == (143 if number == signal.SIGTERM else -signal.SIGKILL)
    while "halfstep: stopped" not in (folder / "log").read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    log.close()
    assert (folder / "log").read_text().count("halfstep: stopped after step") == 1
    assert len(checkpoint.listing(folder / "out")) > 0


@pytest.mark.slow
def test_the_same_command_under_torchrun(folder: Path) -> None:
    words = ("-m", "halfstep", "train", *SMALL, "--epochs", 1, "--exact", "bits", "--out")
    result = run_ranks(2, *words, folder / "torchrun")
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("written:") == 1
    run_command(*map(str, words[2:]), str(folder / "one"))
    assert same_files(folder / "one", folder / "torchrun")
    # The folder holds a run now: rank 0 refuses it, the other rank is silent.
    result = run_ranks(2, *words, folder / "torchrun")
    assert result.returncode != 0
    assert result.stderr.count("halfstep: ") == 1
    assert "holds a run already" in result.stderr


@pytest.mark.slow
def test_a_comparison_on_two_ranks_has_the_numbers_of_one_process(folder: Path) -> None:
    words = ("compare", *SMALL, "--epochs", "1", "--seeds", "1", "--precisions", "fp32,bf16")
    words = (*words, "--exact", "bits", "--out")
    result = run(*words, "two", "--ranks", "2", "--json", cwd=folder)
    assert result.returncode == 0, result.stderr
    two = json.loads(result.stdout)
    one = run_json(*words, str(folder / "one"))
    for name in ("precision", "seed", "status", "loss", "acc", "correct", "updates", "samples"):
        assert [r[name] for r in two["runs"]] == [r[name] for r in one["runs"]], name
    assert two["spec"]["ranks"] == 2
    # Times belong to a number of ranks: another one is another comparison.
    result = run(*words, "two", cwd=folder)
    assert result.returncode == 2
    assert "ranks was 2 and is 1" in result.stderr


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--ranks 0", "--ranks: expected 1 or more, got 0"),
        ("--ranks 13 --exact bits", "--ranks: expected at most 12, the number of logical"),
        ("--ranks 3 --exact bits --logical 2", "--ranks: expected at most 2"),
        ("--exact all", "--exact: expected bits, got 'all'"),
        ("--logical 4", "--logical: expected it beside --exact bits"),
        ("--exact bits --logical 0", "--logical: expected 1 or more"),
        ("--ranks 2 --max-restarts -1", "--max-restarts: expected 0 or more, got -1"),
        ("--ranks 2 --device cuda:1", "--device: expected auto, cpu or cuda beside --ranks 2"),
        ("--ranks 2 --precision half", "--precision: received 'half'"),
    ],
)
def test_what_no_run_can_have_is_refused_before_anything_starts(
    options: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "out"
    code, text = CommandLine(monkeypatch, capsys)(f"train {options} --out {out}")
    assert code == 2
    assert text.startswith(f"halfstep: {expected}")
    assert not out.exists()


def test_ranks_of_torchrun_are_as_many_as_it_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    command = CommandLine(monkeypatch, capsys)
    code, text = command("train --ranks 4")
    assert code == 2
    assert "--ranks: got 4, and torchrun has started 2" in text
    code, text = command("train --max-restarts 3")
    assert code == 2
    assert "torchrun --max-restarts 3" in text


def test_more_ranks_than_gpus_are_refused() -> None:
    check_gpu_count(8, 8)
    with pytest.raises(ValueError, match="at most 8, one for each GPU"):
        check_gpu_count(9, 8)


def test_the_first_error_of_its_own_names_the_rank() -> None:
    lost = RankEnding(0, 2, time=1.0, message="another rank is missing", is_lost=True)
    early = RankEnding(1, 2, time=2.0, message="a bad batch")
    late = RankEnding(2, 2, time=3.0, message="a later one")
    endings = {ending.rank: ending for ending in (lost, late, early)}
    assert describe_failure(endings, 3) == "rank 1: a bad batch"
    assert describe_failure({0: lost}, 2).startswith("rank 1: ended without a message")
    assert describe_failure({0: lost}, 1) == "rank 0: another rank is missing"
    # What all ranks say is no rank's fault.
    all_alike = {rank: RankEnding(rank, 2, time=rank, message="no such data") for rank in range(3)}
    assert describe_failure(all_alike, 3) == "no such data"
