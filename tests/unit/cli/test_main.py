"""The command around the subcommands: help, completion, notices, exit codes, mistakes."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import halfstep as hs
from halfstep import nets
from halfstep.cli import main, options
from halfstep.data.download.catalog import CATALOG
from halfstep.experiment.settings import OPTIMIZERS, SCHEDULES
from halfstep.precision.policy import TABLE
from tests.support.command_line import run_command

COMMANDS = ["compare", "report", "train", "eval", "predict", "info", "bench", "diff", "replay"]
COMMANDS += ["data get", "data show", "data check"]


def exit_code_of_main(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["halfstep", *words])
    with pytest.raises(SystemExit) as exit_info:
        main()
    return exit_info.value.code


# Help and completion.


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_by_example(command: str) -> None:
    help_text = run_command(*command.split(), "--help")
    assert help_text.count(f"halfstep {command}") >= 2  # the usage line is one of them


def test_completion_offers_the_names_of_the_tables() -> None:
    assert list(options.NETS) == nets.names()[: len(options.NETS)]
    assert ("sample", *CATALOG) == options.DATASETS
    assert tuple(TABLE) == options.PRECISIONS
    assert tuple(OPTIMIZERS) == options.OPTIMIZERS
    assert SCHEDULES == options.SCHEDULES
    assert options.complete_list("fp32", "O1", "O2")("O1,O") == ["O1,O2"]


def run_process(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, which says at its end whether torch was imported."""
    code = (
        "import atexit, sys\n"
        "from halfstep.cli import main\n"
        "sys.argv[0] = 'halfstep'\n"
        "report = lambda: print('torch:', 'torch' in sys.modules, file=sys.stderr)\n"
        "atexit.register(report)\n"
        "main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )


def test_help_version_and_completion_do_not_import_torch() -> None:
    times_s = []
    for words in (["--help"], ["train", "--help"], ["--version"], ["data", "check", "--help"]):
        start = time.perf_counter()
        process = run_process(*words)
        times_s.append(time.perf_counter() - start)
        assert process.returncode == 0, process.stderr
        assert process.stderr == "torch: False\n"
    assert min(times_s) < 0.5  # the least disturbed; torch alone takes 2 s

    completion = run_process(
        _HALFSTEP_COMPLETE="complete_bash", COMP_WORDS="halfstep train --net res", COMP_CWORD="3"
    )
    assert completion.stdout.split() == [name for name in nets.names() if name.startswith("res")]
    assert completion.stderr == "torch: False\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_completion_script(shell: str) -> None:
    assert "_HALFSTEP_COMPLETE" in run_process(_HALFSTEP_COMPLETE=f"source_{shell}").stdout


def test_version() -> None:
    assert run_command("--version") == f"halfstep {hs.__version__}\n"


# Notices and signals.

USER_MODULE = """
import warnings
from halfstep import Notice
def notes():
    warnings.warn("something to know", Notice)
    raise ValueError("expected another thing, got this")
def interrupted(): raise KeyboardInterrupt
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "odd_build.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_build", raising=False)


@pytest.mark.filterwarnings("default")
def test_a_notice_is_one_line(
    user_module: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code_of_main(monkeypatch, "train", "--build", "odd_build:notes") == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["note: something to know", "halfstep: expected another thing, got this"]
    assert lines[2].startswith("raised by the builder odd_build:notes, ")
    assert lines[2].endswith("odd_build.py, line 6")


def test_an_interrupt_exits_with_130(user_module: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_code_of_main(monkeypatch, "train", "--build", "odd_build:interrupted") == 130


# Mistakes.

MISTAKES = {
    "a name of nothing": (
        ["data", "check", "imagenet"],
        "expected sample, mnist, .*there is no such folder",
    ),
    "nothing to get": (
        ["data", "get", "sample"],
        "sample ships with the package, there is nothing to get",
    ),
    "a path for a folder": (
        ["data", "check", ".", "--path", "x"],
        "--path: expected with a data set of mnist",
    ),
    "a long time": (["info", "--seconds", "100"], "--seconds: expected 0 to 60, got 100"),
    "no time": (["bench", "--seconds", "0"], "--seconds: expected a number above 0"),
    "another suffix": (
        ["predict", "x", "y", "--out", "z.txt"],
        "expected a name that ends in .csv, .json, .npy",
    ),
    "no device": (["info", "--device", "tpu"], "device: expected auto, cpu or cuda, got 'tpu'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_explained(name: str) -> None:
    words, message = MISTAKES[name]
    with pytest.raises(ValueError, match=message):
        run_command(*words)
