"""A folder that holds another comparison: what differs, the commands that go on, and the question.

In real processes: a pipe gets the message, a terminal the question, and the answer is run.
"""

import json
import os
import pty
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from halfstep.cli.other_comparison import list_choices
from halfstep.compare import Settings, compare
from halfstep.experiment.output_folder import OtherComparisonError
from halfstep.experiment.typed_command import (
    command_for_all,
    format_seeds,
    option_value,
    replace_option,
)

SMALL = "compare --samples 160 --test-samples 100 --batch 32 --device cpu --epochs 1"
COMMAND = f"halfstep {SMALL} --precisions fp32 --seeds 1 --out out"


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def error_of(command: str, *, threads: int | None = None, **facts: bool) -> OtherComparisonError:
    same_spec = facts.get("same_spec", False)
    same_machine = facts.get("same_machine", True)
    return OtherComparisonError(
        "…", "…", command=command, same_spec=same_spec, same_machine=same_machine, threads=threads
    )


def commands(error: OtherComparisonError, typed: str) -> list[str]:
    words = shlex.split(typed)[1:]
    return [choice.command() for choice in list_choices(error, Path("runs/a"), words)]


def test_the_ways_on_are_commands() -> None:
    before = "halfstep compare --epochs 10 --net mlp --out=elsewhere --fresh"
    typed = "halfstep compare --epochs 20 --seeds 5 --out runs/a --retry"
    Path("runs/a-2").mkdir(parents=True)
    assert commands(error_of(before), typed) == [
        "halfstep compare --epochs 10 --net mlp --out runs/a --seeds 5",
        "halfstep compare --epochs 20 --seeds 5 --out runs/a-3",
        "halfstep compare --epochs 20 --seeds 5 --out runs/a --fresh",
    ]


def test_another_number_of_threads_is_set() -> None:
    typed = "halfstep compare --out runs/a"
    error = error_of("halfstep compare", threads=2, same_spec=True)
    assert commands(error, typed)[0] == "OMP_NUM_THREADS=2 halfstep compare --out runs/a"


@pytest.mark.parametrize(
    "error",
    [
        error_of("halfstep compare --epochs 3", same_machine=False),
        error_of("halfstep.compare.compare"),
        error_of("halfstep 'compare"),
        error_of(""),
    ],
)
def test_what_cannot_go_on_here_is_not_offered(error: OtherComparisonError) -> None:
    first, second = commands(error, "halfstep compare")
    assert first == "halfstep compare --out runs/a-2"
    assert second == "halfstep compare --fresh"


def test_options_of_a_typed_command() -> None:
    words = ["--out=a", "--net", "mlp", "--out", "b"]
    assert option_value(words, "--out") == "b"
    assert option_value(["--out"], "--out") is None
    assert replace_option(words, "--out", "c") == ["--net", "mlp", "--out", "c"]
    assert format_seeds([0, 1, 2]) == "3"
    assert format_seeds([7]) == "7,"
    assert format_seeds([1, 0]) == "1,0"


def test_the_command_of_a_comparison_that_was_added_to_trains_all_of_it() -> None:
    usual = ["fp32", "O2"]
    added = "halfstep compare --precisions O1 --out x"
    assert command_for_all(added, ["fp32", "O2", "O1"], [0, 1, 2, 3], usual) == (
        "halfstep compare --out x --precisions fp32,O2,O1 --seeds 4"
    )
    same = "halfstep compare --out x"
    assert command_for_all(same, usual, [0, 1, 2], usual) == same
    program = "halfstep.compare.compare"
    assert command_for_all(program, usual, [0], usual) == program


def begin() -> dict[str, float]:
    """A comparison in out/, as COMMAND makes it. Returns when its results were written."""
    settings = Settings(
        precisions=("fp32",),
        seeds=(0,),
        samples=160,
        test_samples=100,
        batch=32,
        device="cpu",
        epochs=1,
    )
    code = (
        "import torch; torch.set_num_threads(1); from halfstep.compare import Settings, compare; "
        f"compare({settings!r}, 'out', command={COMMAND!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    return {str(path): path.stat().st_mtime_ns for path in Path("out/runs").glob("*/*.json")}


def run_in_terminal(words: list[str], answer: str) -> tuple[int, str]:
    """Exit code and output of the command on a terminal of its own, with this answer typed."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "halfstep", *words])
    output = b""
    is_answered = False
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1)[0]:
            continue
        try:
            piece = os.read(terminal, 65536)
        except OSError:  # Linux: the other end is closed
            break
        if not piece:
            break
        output += piece
        if b"none of them" in output and not is_answered:
            os.write(terminal, answer.encode() + b"\n")
            is_answered = True
    _, status = os.waitpid(child, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), output.decode()


def test_a_terminal_asks_and_runs_the_answer() -> None:
    before = begin()
    words = [*shlex.split(SMALL), "--epochs", "2", "--out", "out"]
    code, output = run_in_terminal(words, "")
    assert code == 2
    assert "out holds another comparison: epochs was 1 and is 2" in output
    assert not Path("out-2").exists()

    # Go on with the one that is there, with a seed more.
    code, output = run_in_terminal([*words, "--seeds", "2"], "1")
    assert code == 0, output
    content = json.loads(Path("out/compare.json").read_text())
    assert content["spec"]["epochs"] == 1
    assert [run["seed"] for run in content["runs"]] == [0, 1]
    after = {path: Path(path).stat().st_mtime_ns for path in before}
    assert after == before  # what was finished was not trained again

    # Put this one beside it.
    code, output = run_in_terminal([*words, "--precisions", "fp32", "--seeds", "1"], "2")
    assert code == 0, output
    assert json.loads(Path("out-2/compare.json").read_text())["spec"]["epochs"] == 2
    assert json.loads(Path("out/compare.json").read_text()) == content


def test_a_pipe_gets_the_message_and_no_question() -> None:
    begin()
    words = [*shlex.split(SMALL), "--epochs", "2", "--out", "out"]
    process = subprocess.run(
        [sys.executable, "-m", "halfstep", *words], capture_output=True, text=True, check=False
    )
    assert process.returncode == 2
    assert process.stdout == ""
    lines = process.stderr.splitlines()
    assert lines[0] == "halfstep: out holds another comparison: epochs was 1 and is 2"
    shown = [line.strip() for line in lines if line.startswith("     halfstep ")]
    assert shown == [
        COMMAND,
        f"halfstep {SMALL} --epochs 2 --out out-2",
        f"halfstep {SMALL} --epochs 2 --out out --fresh",
    ]
    # The first of them works as it stands.
    go_on = subprocess.run(
        [sys.executable, "-m", "halfstep", *shlex.split(shown[0])[1:]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert go_on.returncode == 0, go_on.stderr
    assert "1 runs are done already" in go_on.stdout or "1 run is done already" in go_on.stdout


def test_the_python_call_raises_what_differs() -> None:
    begin()
    settings = Settings(samples=160, test_samples=100, batch=32, epochs=2, device="cpu")
    with pytest.raises(OtherComparisonError, match="epochs was 1 and is 2"):
        compare(settings, "out")
