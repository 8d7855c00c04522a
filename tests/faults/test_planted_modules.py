"""The command in a folder of planted modules: every one of them leaves a mark if it is run.

There is one for each module of the standard library and for each installed package, and some that
libraries look for and do not find. Only what the user names may be imported.
"""

import os
import shlex
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

import halfstep as hs
from tests.support.command_line import every_command, run_command

ROOT = Path(hs.__file__).resolve().parents[1]
# Modules that installed packages try to import, whether they are installed or not.
OPTIONAL = {"triton", "cupy", "tensorboard", "torchmetrics", "matplotlib", "pandas", "cv2"}
STARTUP = {"sitecustomize", "usercustomize", "conftest", "halfstep", "__main__", "setup"}

# What an installed command looks like: its folder, and not the current one, is on the path.
CONSOLE_SCRIPT = """from halfstep.cli import main

if __name__ == "__main__":
    main()
"""

MARK = """
import builtins, os
builtins.open(os.path.join({folder!r}, "ran-{name}"), "w").close()
"""

USER_MODULE = """
import json, torch, numpy
import sibling
from torch import nn
import halfstep as hs

assert sibling.VALUE == 3

def net(inputs=784, classes=10):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))

def data():
    x = torch.rand(64, 4)
    y = (x.sum(1) > 2).long()
    return (x, y), (x, y)

def build():
    net = nn.Linear(4, 2)
    x = torch.randn(64, 4)
    model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    return model, hs.data.Dataset((x, (x.sum(1) > 0).long())).batch(8), [(x, x.sum(1).long() * 0)]

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.ones(4), 0

def spawned():
    net = nn.Linear(4, 2)
    model = hs.Model(net, nn.CrossEntropyLoss(), torch.optim.SGD(net.parameters(), lr=0.1))
    loader = torch.utils.data.DataLoader(
        Samples(), batch_size=8, num_workers=1, multiprocessing_context="spawn"
    )
    return model, loader
"""

SMALL = "--samples 64 --test-samples 16 --epochs 1 --device cpu"
# A line for each command, with words that make it work to its end. {clean} is a folder without
# planted modules, which holds two runs and the user's module.
LINES = {
    "compare": f"compare {SMALL} --precisions fp32 --seeds 1 --out o",
    "report": "report {clean}/a --out pages",
    "train": f"train {SMALL} --out o",
    "eval": "eval {clean}/a",
    "predict": "predict {clean}/a sample --out o.csv",
    "find-lr": "find-lr --samples 640 --updates 20 --device cpu",
    "info": "info --seconds 0",
    "bench": "bench --net ffnn --seconds 0.05 --precisions fp32",
    "data get": "data get fashion-mnist --path {sample}",
    "data show": "data show sample --out sheet.png",
    "data check": "data check .",
    "diff": "diff {clean}/a {clean}/b",
    "replay": "replay {clean}/a --step 1",
}
# The user names a module that lies here, or elsewhere by its file, or one that is installed.
NAMED = {
    "a builder": "train --build mine:build --epochs 1 --out o",
    "a network": f"train --net mine:net {SMALL} --out o",
    "a data function": "train --net ffnn --data mine:data --epochs 1 --device cpu --out o",
    "a network to measure": "bench --net mine:net --shape 784 --seconds 0.05 --precisions fp32",
    "a builder to replay": "replay {clean}/own --step 1 --build mine:build",
    "a builder of two runs": "diff {clean}/own {clean}/own --build mine:build",
    "a builder's file": "train --build {clean}/mine.py:build --epochs 1 --out o",
    "a network's file": f"train --net {{clean}}/mine.py:net {SMALL} --out o",
    "a file of a name that is taken": "train --build {clean}/torch.py:build --epochs 1 --out o",
    "workers that are not forked": "train --build {clean}/mine.py:spawned --epochs 1 --out o",
}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a user's module and three small runs."""
    folder = tmp_path_factory.mktemp("clean")
    for name in ("mine.py", "torch.py"):
        (folder / name).write_text(USER_MODULE)
    (folder / "sibling.py").write_text("VALUE = 3\n")
    for name in ("a", "b"):
        run_command("train", *SMALL.split(), "--out", str(folder / name))
    words = ["train", "--build", f"{folder}/mine.py:build", "--epochs", "1"]
    run_command(*words, "--out", str(folder / "own"))
    return folder


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder with a module for every name that anything may import."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    names = set(sys.stdlib_module_names) | set(packages_distributions()) | OPTIONAL | STARTUP
    for name in sorted(names):
        if name.isidentifier():
            mark = MARK.format(folder=str(folder), name=name)
            (folder / f"{name}.py").write_text(mark)
    (folder / "bag").mkdir()
    return folder


def run_there(folder: Path, line: str, *start: str) -> tuple[int, str]:
    """The exit code and the output of a command that is started in this folder."""
    script = folder.parent / "bin" / "halfstep"
    script.parent.mkdir(exist_ok=True)
    script.write_text(CONSOLE_SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("PYTHONSAFEPATH", None)
    process = subprocess.run(
        [sys.executable, *(start or (str(script),)), *shlex.split(line)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    return process.returncode, process.stdout + process.stderr


def marks(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("ran-*"))


def test_there_is_a_line_for_every_command() -> None:
    assert sorted(LINES) == sorted(every_command())


@pytest.mark.parametrize("command", LINES)
def test_no_command_imports_from_the_current_folder(
    command: str, planted: Path, clean: Path
) -> None:
    sample = ROOT / "halfstep" / "data" / "sample"
    line = LINES[command].format(clean=clean, sample=sample)
    code, output = run_there(planted, line)
    # The folder that is checked is no folder of images, which is said.
    assert code == (2 if command == "data check" else 0), output
    assert marks(planted) == []


@pytest.mark.parametrize("what", NAMED)
def test_only_the_named_module_is_imported(what: str, planted: Path, clean: Path) -> None:
    line = NAMED[what].format(clean=clean)
    if "{clean}/" not in NAMED[what] or "mine:build" in line:
        (planted / "mine.py").write_text(USER_MODULE)
        (planted / "sibling.py").write_text("VALUE = 3\n")
    code, output = run_there(planted, line)
    assert code == 0, output
    assert marks(planted) == []


@pytest.mark.parametrize("name", ["torch", "json", "profile", "rich"])
def test_a_name_with_two_meanings_is_refused(name: str, planted: Path) -> None:
    code, output = run_there(planted, f"train --build {name}:build --epochs 1")
    assert code == 2
    assert f"name its file: ./{name}.py" in output
    assert marks(planted) == []


def test_python_m_takes_nothing_but_what_python_itself_imports_first(planted: Path) -> None:
    """`python -m` puts the folder first; what runs before halfstep does is Python's to decide."""
    code, output = run_there(planted, "info --seconds 0", "-P", "-m", "halfstep")
    assert code == 0, output
    assert marks(planted) == []

    standard = set(sys.stdlib_module_names) | {"halfstep"}
    for name in standard:
        (planted / f"{name}.py").unlink(missing_ok=True)
    code, output = run_there(planted, "info --seconds 0", "-m", "halfstep")
    assert code == 0, output
    assert marks(planted) == []
