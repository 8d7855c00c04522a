"""Three usual programs, moved to halfstep: at most ten lines change, and no bit of the result.

Blank lines count, and so does every removed and every added line: a changed line counts as two.
"""

import difflib
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

FOLDER = Path(__file__).resolve().parent
NAMES = ["plain", "hf", "gan"]

# The text of a moved program that is its precision, and what makes it half precision.
HALF_PRECISION = {
    "plain": ('"fp32"', '"O2"'),
    "hf": ('"fp32"', '"O2"'),
    "gan": ('"float32"', '"float16"'),
}


def run_program(path: Path, result_path: Path) -> dict[str, Any]:
    """Runs a program as it is; what it saved."""
    if path.stem.startswith("hf"):
        pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(str(result_path))
    result: dict[str, Any] = torch.load(result_path, weights_only=True)
    return result


class OriginalRun(NamedTuple):
    name: str
    result: dict[str, Any]
    folder: Path


@pytest.fixture(scope="module", params=NAMES)
def original(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> OriginalRun:
    """A program before it was moved: its name, what it saved, and the folder with that."""
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    result = run_program(FOLDER / f"{name}_before.py", folder / "before.pt")
    return OriginalRun(name, result, folder)


@pytest.mark.parametrize("name", NAMES)
def test_moving_a_program_changes_at_most_ten_lines(name: str) -> None:
    before = (FOLDER / f"{name}_before.py").read_text().splitlines()
    after = (FOLDER / f"{name}_after.py").read_text().splitlines()
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert 0 < len(changed) <= 10, "\n".join(changed)


def test_the_moved_program_gives_the_same_bits(original: OriginalRun) -> None:
    path = FOLDER / f"{original.name}_after.py"
    result = run_program(path, original.folder / "after.pt")
    assert original.result["losses"] == result["losses"]
    weights_before = original.result["net"]
    weights = result["net"]
    assert weights_before.keys() == weights.keys()
    different = [
        name for name, weight in weights_before.items() if not torch.equal(weight, weights[name])
    ]
    assert different == []


# The first update overflows at a scale of 2^16 and is skipped. The program's own scheduler counts
# calls of optimizer.step(), and warns.
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
def test_one_word_changes_the_moved_program_to_half_precision(original: OriginalRun) -> None:
    """The first loss differs, by a few times float16's unit roundoff of 5e-4."""
    text = (FOLDER / f"{original.name}_after.py").read_text()
    full, half = HALF_PRECISION[original.name]
    assert text.count(full) == (2 if original.name == "gan" else 1)
    half_program = original.folder / f"{original.name}_half.py"
    half_program.write_text(text.replace(full, half))

    half_result = run_program(half_program, original.folder / "half.pt")
    losses = torch.tensor(original.result["losses"])
    half_losses = torch.tensor(half_result["losses"])
    assert not torch.equal(losses, half_losses)
    torch.testing.assert_close(half_losses[0], losses[0], rtol=4e-3, atol=0)
    final_ratio = half_losses[-10:].mean(0) / losses[-10:].mean(0)
    assert (final_ratio - 1).abs().max() < 0.2
