"""Three programs of the usual kind, moved to halfstep: ten lines at most, and not one bit of the result changed.

A blank line counts, and so does every removed and every added line: a line that was changed is two.
"""

import difflib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
NAMES = ["plain", "hf", "gan"]
LOW = {"plain": ('"fp32"', '"O2"'), "hf": ('"fp32"', '"O2"'), "gan": ('"float32"', '"float16"')}


def result(path: Path, out: Path) -> dict[str, Any]:
    """What the program saved, run as it stands."""
    if path.stem.startswith("hf"):
        pytest.importorskip("transformers")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(str(out))
    saved: dict[str, Any] = torch.load(out, weights_only=True)
    return saved


@pytest.fixture(scope="module", params=NAMES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, dict[str, Any], Path]:
    """The program's name, what it saved before it was moved, and a folder."""
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, result(HERE / f"{request.param}_before.py", folder / "before.pt"), folder


def changed(name: str) -> list[str]:
    old, new = (
        (HERE / f"{name}_{when}.py").read_text().splitlines() for when in ("before", "after")
    )
    return [line for line in difflib.ndiff(old, new) if line[0] in "+-"]


@pytest.mark.parametrize("name", NAMES)
def test_moving_over_takes_ten_lines_at_most(name: str) -> None:
    lines = changed(name)
    assert 0 < len(lines) <= 10, "\n".join(lines)


def test_the_moved_program_gives_the_same_bits(pair: tuple[str, dict[str, Any], Path]) -> None:
    name, old, folder = pair
    new = result(HERE / f"{name}_after.py", folder / "after.pt")
    assert old["losses"] == new["losses"]
    assert old["net"].keys() == new["net"].keys()
    assert [
        key for key, value in old["net"].items() if not torch.equal(value, new["net"][key])
    ] == []


# the first update overflows at 2^16 and is no step; the program's own scheduler, which counts calls, remarks on it
@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step:UserWarning")
def test_one_word_then_makes_it_half(pair: tuple[str, dict[str, Any], Path]) -> None:
    """Float16's unit roundoff is 5e-4: the first loss differs by a few of those, and by something."""
    name, before, folder = pair
    text = (HERE / f"{name}_after.py").read_text()
    assert text.count(LOW[name][0]) == (2 if name == "gan" else 1)
    half = folder / f"{name}_half.py"
    half.write_text(text.replace(*LOW[name]))
    old, new = (
        torch.tensor(before["losses"]),
        torch.tensor(result(half, folder / "half.pt")["losses"]),
    )
    assert not torch.equal(old, new)
    torch.testing.assert_close(new[0], old[0], rtol=4e-3, atol=0)
    assert (new[-10:].mean(0) / old[-10:].mean(0) - 1).abs().max() < 0.2
