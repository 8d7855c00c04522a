"""The README and the docs are true: every python block runs, page by page, top to bottom."""

import re
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
NO_RUN = re.compile(r"<!--\s*no-run\b:?((?:(?!-->).)*)-->\s*\Z", re.DOTALL)


class Block(NamedTuple):
    """A block of python on a page."""

    line: int  # the line of the page above its first one
    code: str
    no_run: str | None
    """The reason not to run it, "" when none is given; None when the block runs."""


def read_blocks(text: str) -> list[Block]:
    blocks = []
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(1))
        no_run_comment = NO_RUN.search(text[: match.start()])
        reason = None
        if no_run_comment is not None:
            reason = no_run_comment[1].strip()
        blocks.append(Block(line, match[1], reason))
    return blocks


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # what a block writes lands here
    monkeypatch.setenv("HALFSTEP_OUT", str(tmp_path / "out"))
    namespace: dict[str, object] = {"__name__": "docs"}
    for block in read_blocks(page.read_text()):
        if block.no_run is None:
            # With leading newlines a traceback shows the page's own line numbers.
            source = "\n" * block.line + block.code
            exec(compile(source, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_blocks_that_do_not_run_have_a_reason(page: Path) -> None:
    lines = [block.line for block in read_blocks(page.read_text()) if block.no_run == ""]
    assert not lines, f"{page_id(page)}: blocks after line {lines} say no-run without a reason"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_between_pages_exist(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert not missing, f"{page_id(page)} links to {missing}"


def test_the_readme_has_a_block_that_runs_within_30_lines() -> None:
    first = read_blocks((ROOT / "README.md").read_text())[0]
    assert first.no_run is None
    assert first.line + first.code.count("\n") < 30


def test_read_blocks_finds_lines_code_and_reasons() -> None:
    runs = "a\n```python\nx = 1\n```\n"
    reason = "<!-- no-run: needs a GPU -->\n```python\ny\n```\n"
    comment = "<!-- anything else -->\n```python\nz\n```\n"
    bare = "<!-- no-run -->\n\n```python\nw\n```\n"
    expected = [
        Block(2, "x = 1\n", None),
        Block(6, "y\n", "needs a GPU"),
        Block(10, "z\n", None),
        Block(15, "w\n", ""),
    ]
    assert read_blocks(runs + reason + comment + bare) == expected
