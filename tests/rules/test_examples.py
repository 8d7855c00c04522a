"""Every program under examples/ runs as a user starts it, and its own assertions hold."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
NEEDED_PACKAGES = {"hugging_face": "transformers"}
SLOW = {"resnet_lab", "hugging_face"}  # about 25 s of one core, and 10 s
DATA_FOLDER = os.environ.get("HALFSTEP_DATA", "")

# Examples that take --full → the data set that they need for it.
FULL_DATA = {
    "mlp_precisions": "fashion-mnist",
    "plain_loop": "fashion-mnist",
    "custom_step": "mnist",
    "lenet_sink": "mnist",
    "evaluate_while_training": "fashion-mnist",
    "grad_scaler": "fashion-mnist",
    "resnet_lab": "cifar10",
    "manual_accumulation": "fashion-mnist",
    "hugging_face": "fashion-mnist",
}


def run_example(name: str, folder: Path, *flags: str, threads: str = "1") -> str:
    """What an example prints; where it fails, the assertion shows all of it.

    HALFSTEP_DATA is for --full: without it nothing but the sample is read.
    """
    if name in NEEDED_PACKAGES:
        pytest.importorskip(NEEDED_PACKAGES[name])
    env = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    if not flags:
        env.pop("HALFSTEP_DATA", None)
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *flags]
    process = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def mark_if_slow(name: str) -> Any:
    return pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])


@pytest.mark.parametrize("name", [mark_if_slow(name) for name in NAMES])
def test_it_runs_on_the_sample_and_meets_its_target(name: str, tmp_path: Path) -> None:
    assert run_example(name, tmp_path).count("\n") >= 3, "it shows its user something"
    assert not any(tmp_path.iterdir()), "it leaves nothing behind"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FULL_DATA)
def test_it_meets_its_target_on_full_data(name: str, tmp_path: Path) -> None:
    if not DATA_FOLDER or not (Path(DATA_FOLDER) / FULL_DATA[name]).exists():
        pytest.skip(f"no {FULL_DATA[name]} in HALFSTEP_DATA")
    if name == "resnet_lab":
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("ResNet-50 at 224×224 for 10 epochs is a GPU's work")
    run_example(name, tmp_path, "--full", threads=str(os.cpu_count()))


@pytest.mark.parametrize("name", NAMES)
def test_it_says_what_it_shows_and_ends_in_an_assertion(name: str) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    tree = ast.parse(text)
    docstring = ast.get_docstring(tree) or ""
    assert f"python examples/{name}.py" in docstring
    systems = "torch-tpu|PyTorch|MindSpore|MegEngine|Hugging Face"
    assert re.search(rf"^System: .*({systems})", docstring, re.MULTILINE)
    assert ("--full" in docstring) == (name in FULL_DATA)
    assert any(isinstance(node, ast.Assert) for node in ast.walk(tree))


def test_the_index_lists_each_of_them_once() -> None:
    listed = re.findall(r"\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text())
    assert sorted(listed) == NAMES


def test_the_migration_page_leads_to_each_of_them() -> None:
    text = (ROOT / "docs" / "guide" / "moving.md").read_text()
    assert [name for name in NAMES if f"(../../examples/{name}.py)" not in text] == []
