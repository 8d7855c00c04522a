"""The progress of `fit` in a notebook: a table that replaces itself, executed by a real kernel.

Needs ipykernel and nbclient for that; the rest of IPython's display machinery needs IPython alone.
"""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from halfstep.callbacks import progress_bar
from halfstep.callbacks.notebook_table import FIRST_ROWS, LAST_ROWS, NotebookTable
from halfstep.callbacks.progress_displays import Number, Position, labelled
from tests.support.pseudo_terminal import ROOT
from tests.unit.callbacks.test_monitors import fit, make_samples

HOSTILE = '<img src=x onerror="alert(1)">&'


class Cells(HTMLParser):
    """The texts of a table, row by row; every tag that was opened, and those left open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.bars: list[dict[str, Any]] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "progress":
            self.bars.append(dict(attrs))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1] in ("td", "th"):
            self.rows[-1][-1] += data


class Shown(NotebookTable):
    """Keeps what a notebook would show in place of showing it."""

    def __init__(self) -> None:
        super().__init__()
        self.pages: list[str] = []

    def _show(self) -> None:
        self.pages.append(self.as_html())


# The table itself


def test_columns_are_scores_as_they_came_then_settings_and_pace() -> None:
    table = Shown()
    pace = [Number("steps/s", "812", ""), Number("time", "1.2 s", "1.2 s")]
    table.keep("epoch 1/2", [labelled("loss", "0.5000"), labelled("lr", "0.1"), *pace])
    scores = [labelled("loss", "0.4000"), labelled("valid_acc", "0.8000")]
    table.keep("epoch 2/2", [*scores, labelled("lr", "0.1"), labelled("skipped", "1"), *pace])
    assert Cells(table.as_html()).rows == [
        ["", "loss", "valid_acc", "lr", "skipped", "steps/s", "time"],
        ["epoch 1/2", "0.5000", "", "0.1", "", "812", "1.2 s"],
        ["epoch 2/2", "0.4000", "0.8000", "0.1", "1", "812", "1.2 s"],
    ]
    assert table.as_text() == (
        "epoch 1/2  loss 0.5000  lr 0.1  1.2 s\n"
        "epoch 2/2  loss 0.4000  valid_acc 0.8000  lr 0.1  skipped 1  1.2 s"
    )


def test_the_running_epoch_is_a_row_with_a_bar() -> None:
    table = Shown()
    table.move("epoch 1/2", Position(3, 12), [labelled("loss", "0.5000"), labelled("lr", "0.1")])
    table.move("epoch 1/2", Position(4, None), [])
    first, second = map(Cells, table.pages)
    # A line breaks only behind a point, never between a name and its number.
    moving = " 3/12~· loss~0.5000~· lr~0.1".replace("~", "\N{NO-BREAK SPACE}")
    assert first.rows == [["epoch 1/2", moving]]
    assert first.bars == [{"value": "3", "max": "12"}]
    assert second.rows == [["epoch 1/2", " 4"]]
    assert second.bars == [{}]  # it swings


def test_the_running_epoch_does_not_repeat_the_row_above_it() -> None:
    table = Shown()
    scores = [labelled("loss", "0.5000"), labelled("valid_acc", "0.8000"), labelled("lr", "0.1")]
    table.keep("epoch 1/2", scores)
    moving = [labelled("loss", "0.4000"), labelled("lr", "0.05"), labelled("valid_acc", "0.8000")]
    table.move("epoch 2/2", Position(3, 12), moving)
    last_row = Cells(table.pages[-1]).rows[-1]
    assert last_row[1].replace("\N{NO-BREAK SPACE}", " ") == " 3/12 · loss 0.4000 · lr 0.05"


def test_names_and_notes_are_text_and_nothing_else() -> None:
    table = Shown()
    table.keep(HOSTILE, [labelled(HOSTILE, HOSTILE)])
    table.move(HOSTILE, Position(1, 2), [labelled(HOSTILE, "1")])
    table.note(HOSTILE)
    cells = Cells(table.pages[-1])
    assert cells.tags <= {"table", "thead", "tbody", "tr", "th", "td", "div", "progress"}
    assert cells.rows[0] == ["", HOSTILE]
    assert cells.rows[1] == [HOSTILE, HOSTILE]


def test_a_long_run_shows_its_first_and_its_last_epochs() -> None:
    table = Shown()
    for epoch in range(1, 1001):
        table.keep(f"epoch {epoch}/1000", [labelled("loss", "0.5000")])
    rows = Cells(table.as_html()).rows
    assert len(rows) == 1 + FIRST_ROWS + 1 + LAST_ROWS
    assert rows[FIRST_ROWS + 1][0] == f"… {1000 - FIRST_ROWS - LAST_ROWS} more in run.history …"
    assert rows[-1][0] == "epoch 1000/1000"
    assert len(table.as_html()) < 40_000


# IPython's own display machinery


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What a shell of IPython that has a kernel is asked to show, with update and display_id."""
    pytest.importorskip("IPython")
    from IPython.core.displaypub import DisplayPublisher
    from IPython.core.interactiveshell import InteractiveShell

    shown: list[tuple[dict[str, Any], dict[str, Any]]] = []

    class Publisher(DisplayPublisher):
        def publish(self, data: Any, metadata: Any = None, **how: Any) -> None:
            shown.append((data, how))

    class Shell(InteractiveShell):
        kernel = "a kernel"

    shell = Shell.instance(display_pub_class=Publisher)
    yield shown
    shell.restore_sys_module_state()
    shell.history_manager.end_session()
    Shell.clear_instance()


def test_one_output_is_replaced_and_ends_as_the_whole_run(
    published: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress_bar, "REFRESH_EVERY_S", 0.0)
    run = fit(2, valid=make_samples(30).batch(7), sink=4)
    assert capfd.readouterr() == ("", "")
    assert [how.get("update", False) for _, how in published] == [False] + [True] * (
        len(published) - 1
    )
    assert len({how["transient"]["display_id"] for _, how in published}) == 1
    data, _ = published[-1]
    rows = Cells(data["text/html"]).rows
    assert rows[0] == ["", "loss", "acc", "valid_loss", "valid_acc", "lr", "steps/s", "time"]
    for number, (row, entry) in enumerate(zip(rows[1:], run.history, strict=True), 1):
        names = ("loss", "acc", "valid_loss", "valid_acc")
        scores = [f"{entry[name]:#.4g}" for name in names]
        assert row[:6] == [f"epoch {number}/2", *scores, "0.5"]
    lines = data["text/plain"].splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    pages = [data["text/html"].replace("\N{NO-BREAK SPACE}", " ") for data, _ in published[:-1]]
    moves = [Cells(page).rows[-1][-1] for page in pages]
    assert any(move.startswith(" 8/13 · loss") for move in moves)
    assert any(move.startswith(" 3/5 · loss") for move in moves)  # the validation

    before = len(published)
    fit(1)  # another output
    assert published[before][1].get("update", False) is False
    fit(1, progress=False)
    fit(1, progress="lines")
    assert {how["transient"]["display_id"] for _, how in published[before:]} != {
        published[0][1]["transient"]["display_id"]
    }
    assert re.fullmatch(r"epoch 1/1  loss .* s\n", capfd.readouterr().err)


# A real kernel

CELLS = (
    """
import sys
sys.path.insert(0, {root!r})
from halfstep.callbacks import Lambda
from tests.unit.callbacks.test_monitors import fit, make_samples
fit(3, valid=make_samples(30).batch(7))
""",
    """
fit(2, Lambda(epoch_end=lambda run: print("printed")))
""",
    """
import time, os, signal
def interrupt(run):
    if run.position == 7:
        os.kill(os.getpid(), signal.SIGINT)
fit(2, Lambda(visit=interrupt), sink=7)
""",
    """
import threading
thread = threading.Thread(target=fit, args=(1,))
thread.start()
thread.join()
""",
)


def outputs_of(cell: Any, kind: str) -> list[Any]:
    return [output for output in cell.outputs if output.output_type == kind]


def test_a_notebook_that_a_real_kernel_executes_and_saves(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook()
    notebook.cells = [
        nbformat.v4.new_code_cell(c.replace("{root!r}", repr(str(ROOT)))) for c in CELLS
    ]
    client = nbclient.NotebookClient(
        notebook, timeout=240, kernel_name="python3", allow_errors=True
    )
    client.execute(cwd=str(tmp_path))
    nbformat.write(notebook, tmp_path / "run.ipynb")

    plain, printing, interrupted, threaded = nbformat.read(tmp_path / "run.ipynb", 4).cells
    for cell in (plain, printing, interrupted, threaded):
        assert len(outputs_of(cell, "display_data")) == 1, cell.outputs
    heads = {
        "plain": ["epoch 1/3", "epoch 2/3", "epoch 3/3"],
        "printing": ["epoch 1/2", "epoch 2/2"],
        "interrupted": ["epoch 1/2 step 7/13"],
        "threaded": ["epoch 1/1"],
    }
    for cell, expected in zip(
        (plain, printing, interrupted, threaded), heads.values(), strict=True
    ):
        data = outputs_of(cell, "display_data")[0]["data"]
        assert [row[0] for row in Cells(data["text/html"]).rows[1:]] == expected
        assert [line.split("  ")[0] for line in data["text/plain"].splitlines()] == expected
    assert outputs_of(printing, "stream")[0]["text"] == "printed\nprinted\n"
    assert outputs_of(interrupted, "error")[0]["ename"] == "KeyboardInterrupt"
    result = outputs_of(plain, "execute_result")[0]["data"]["text/plain"]
    assert result.startswith("Run(epoch 3/3, step 39, loss=")
