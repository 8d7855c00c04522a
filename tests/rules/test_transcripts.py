"""tests/golden/transcripts.md shows what the command prints today, and its corrections work."""

import re
import runpy
from pathlib import Path

import pytest
import typer

ROOT = Path(__file__).resolve().parents[2]


def test_the_transcripts_are_not_stale(tmp_path: Path) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "transcripts.py"))
    golden_page = (ROOT / "tests" / "golden" / "transcripts.md").read_text()
    if f"with typer {typer.__version__};" not in golden_page:
        pytest.skip(
            f"written with another typer than {typer.__version__}, "
            "which words its help in its own way"
        )
    tmp_path.chmod(0o755)
    page = tool["write_page"](tmp_path, run_corrections=True)
    assert page == golden_page, "run python tools/transcripts.py, and read what changed"


def test_the_remark_behind_an_example_fits_a_terminal_of_80_columns() -> None:
    """A remark that the terminal breaks goes on in the first column, like a command."""
    golden_page = (ROOT / "tests" / "golden" / "transcripts.md").read_text()
    remarks = re.findall(r"^  halfstep .*\S {2,}[a-z].*$", golden_page, re.MULTILINE)
    assert len(remarks) > 5
    assert [line for line in remarks if len(line) > 80] == []
