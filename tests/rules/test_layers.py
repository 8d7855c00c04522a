"""The structure of halfstep: which folder may import which, and which ones can be left out.

The table of layers is the one in docs/architecture.md.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import halfstep as hs

PACKAGE = Path(hs.__file__).parent
REPOSITORY = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))

# Folders inside a folder that count as one of their own.
INNER_FOLDERS = ("step/fast", "engine/captured")

# Folder → the folders it may import, itself aside. From bottom to top.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "utils": {"errors"},
    "kernels": {"errors", "utils"},
    "cuda_graphs": {"errors", "utils"},
    "distributed": {"errors", "utils"},
    "checkpoint": {"errors", "utils"},
    "schedules": {"errors", "utils"},
    "metrics": {"errors", "utils"},
    "report": {"utils"},
    "losses": {"utils"},
    "storage": {"errors", "utils", "checkpoint"},
    "precision": {"errors", "utils"},
    "nets": {"utils"},
    "data": {"errors", "utils", "kernels", "storage"},
    "grads": {"errors", "utils", "precision"},
    "amp": {"errors", "utils", "precision", "grads"},
    "compiler": {"errors", "utils", "kernels", "precision"},
    "step": {"errors", "utils", "distributed", "losses", "precision"},
    "step/fast": {"errors", "utils", "precision", "step", "kernels", "cuda_graphs", "compiler"},
    "engine": {"errors", "utils", "distributed", "data", "metrics", "step"},
    "engine/captured": {
        *("errors", "utils", "data", "metrics", "precision", "step", "engine"),
        *("kernels", "cuda_graphs", "compiler"),
    },
    "callbacks": {"errors", "utils", "checkpoint", "storage", "step", "engine"},
    "model": {
        *("errors", "utils", "distributed", "checkpoint", "schedules", "metrics"),
        *("storage", "precision", "step", "engine", "callbacks"),
    },
    "experiment": {
        *("errors", "utils", "distributed", "checkpoint", "schedules", "metrics", "nets", "data"),
        *("storage", "precision", "engine", "callbacks", "model"),
    },
    "preflight": {"errors", "utils", "report", "data", "precision", "step", "engine", "model"},
    "reproduce": {"errors", "utils", "checkpoint", "engine", "model", "experiment"},
    "compare": {
        *("errors", "utils", "distributed", "checkpoint", "metrics", "data", "precision"),
        *("engine", "callbacks", "model", "experiment"),
    },
    "cli": {
        *("errors", "utils", "distributed", "checkpoint", "nets", "data", "precision", "step"),
        *("engine", "callbacks", "model", "experiment", "preflight", "reproduce", "compare"),
        *("report", "storage"),
    },
}

# Files that may import a folder of speed: it is plugged in here, and left out where it is missing.
PLUGGED_IN_BY = {
    "step/fast": {"step/train_step.py", "step/compiled.py"},
    "engine/captured": {"engine/__init__.py", "model/model.py"},
}


def folder_of(parts: tuple[str, ...]) -> str:
    """The folder that a module belongs to, by the parts of its name behind "halfstep"."""
    inner = "/".join(parts[:2])
    return inner if inner in INNER_FOLDERS else parts[0]


def imported_modules(path: Path) -> set[str]:
    """Every module that a file imports, inside functions and for typing too."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the direction"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def imported_folders(path: Path) -> set[str]:
    folders = set()
    for module in imported_modules(path):
        package, *parts = module.split(".")
        if package == "halfstep" and parts:
            folders.add(folder_of(tuple(parts)))
    return folders


def files_of(folder: str) -> list[Path]:
    paths = []
    for path in FILES:
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if folder_of(parts) == folder:
            paths.append(path)
    return paths


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_one_way(folder: str) -> None:
    paths = files_of(folder)
    assert paths
    forbidden = []
    for path in paths:
        name = str(path.relative_to(PACKAGE))
        for imported in imported_folders(path) - {folder} - MAY_IMPORT[folder]:
            if name not in PLUGGED_IN_BY.get(imported, ()):
                forbidden.append((name, imported))
    assert forbidden == []


def test_the_table_is_ordered_from_bottom_to_top() -> None:
    """A folder imports only those above it in the table, so there is no cycle."""
    seen: set[str] = set()
    for folder, imported in MAY_IMPORT.items():
        assert imported <= seen, folder
        seen.add(folder)


def test_every_folder_is_in_the_table() -> None:
    folders = {folder_of(path.relative_to(PACKAGE).with_suffix("").parts) for path in FILES}
    assert folders - {"__init__", "__main__"} == set(MAY_IMPORT)


def test_the_import_parser_sees_what_it_must() -> None:
    """The checks above would pass on an empty set: known imports must be found."""
    assert "precision" in imported_folders(PACKAGE / "step" / "train_step.py")
    assert "step/fast" in imported_folders(PACKAGE / "step" / "train_step.py")
    assert {"precision", "step", "grads"} <= imported_folders(PACKAGE / "__init__.py")


def test_the_architecture_page_has_the_same_table() -> None:
    page = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
    listed = {}
    for name, imports in re.findall(r"^\| `([a-z_/.]+)` \|[^|]*\| ([^|]*) \|$", page, re.MULTILINE):
        folder = name.removesuffix("/").removesuffix(".py")
        listed[folder] = {word.strip("`/ ") for word in imports.split(",")} - {"nothing"}
    assert listed == MAY_IMPORT


def test_triton_is_imported_only_where_the_file_name_says_so() -> None:
    importers = set()
    for path in FILES:
        modules = imported_modules(path)
        if any(module.split(".")[0] == "triton" for module in modules):
            importers.add(str(path.relative_to(PACKAGE)))
    # launch.py asks Triton whether it interprets, inside a function.
    unexpected = {name for name in importers if "triton" not in Path(name).name}
    assert unexpected <= {"kernels/launch.py"}
    assert importers - unexpected


def test_the_compiler_of_torch_is_imported_only_by_ours() -> None:
    importers = set()
    for path in FILES:
        if any(module.startswith("torch._inductor") for module in imported_modules(path)):
            importers.add(str(path.relative_to(PACKAGE)))
    allowed = {"step/fast/compiled_forward.py"}
    assert {name for name in importers if not name.startswith("compiler/")} <= allowed
    assert importers


def test_no_two_modules_have_one_name() -> None:
    """One name, one thing. Commands in cli/ are named after what they run."""
    names = Counter(
        path.stem
        for path in FILES
        if path.stem not in ("__init__", "__main__") and path.parent.name != "cli"
    )
    assert [name for name, count in names.items() if count > 1] == []


TRAIN_WITHOUT_FAST_PATHS = """
import sys
import tests.support.block_fast_paths
import torch
import halfstep as hs
from torch import nn

net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
model = hs.Model(net, nn.CrossEntropyLoss(), optimizer, "O2")
x, y = torch.randn(32, 4), torch.randint(0, 2, (32,))
data = hs.data.Dataset((x, y)).batch(8)
run = model.fit(3, data)
assert len(run.history) == 3
assert "not there" in str(model.report())
try:
    hs.TrainStep(net, nn.CrossEntropyLoss(), optimizer, compile=True)
except RuntimeError as error:
    assert "compile=True" in str(error), error
else:
    raise AssertionError("compile=True was not refused")
try:
    hs.sink
except ImportError as error:
    assert "captured" in str(error), error
else:
    raise AssertionError("hs.sink was found")
"""


def run_python(*arguments: str, timeout_s: int = 280) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def run_pytest_without_fast_paths(
    *arguments: str, timeout_s: int = 280
) -> subprocess.CompletedProcess[str]:
    plugins = ("-p", "tests.support.block_fast_paths", "-p", "no:cacheprovider")
    return run_python("-m", "pytest", "-q", *plugins, *arguments, timeout_s=timeout_s)


def test_without_the_fast_paths_a_model_still_trains() -> None:
    result = run_python("-c", TRAIN_WITHOUT_FAST_PATHS)
    assert result.returncode == 0, result.stderr


BROKEN = """
import sys, types
import torch
sys.modules["halfstep.compiler.backend"] = {module}
import halfstep as hs
net = torch.nn.Linear(2, 2)
try:
    hs.TrainStep(net, torch.nn.MSELoss(), torch.optim.SGD(net.parameters(), lr=0.1))
except ImportError as error:
    assert "halfstep.compiler.backend" in str(error), error
else:
    raise AssertionError("a fault in a folder of speed was hidden")
"""


@pytest.mark.parametrize(
    "module",
    ['types.ModuleType("halfstep.compiler.backend")', "None"],
    ids=["a name is gone, as after a change in torch", "a file is gone"],
)
def test_a_fault_inside_the_fast_paths_is_not_hidden(module: str) -> None:
    """Only a folder that is not there is left out. Any other failed import is an error."""
    result = run_python("-c", BROKEN.format(module=module))
    assert result.returncode == 0, result.stderr


def test_without_the_fast_paths_the_eager_step_still_equals_torch() -> None:
    """Parity with plain torch, bit for bit, with a part of the cases; `slow` runs all of them."""
    result = run_pytest_without_fast_paths("tests/parity/test_scale.py")
    assert result.returncode == 0, result.stdout[-2000:]
    assert re.search(r"\b[1-9]\d* passed", result.stdout), result.stdout[-500:]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_without_the_fast_paths_all_parity_tests_pass() -> None:
    result = run_pytest_without_fast_paths(
        "tests/parity", "--ignore", "tests/parity/test_captured.py", timeout_s=1100
    )
    assert result.returncode == 0, result.stdout[-2000:]
