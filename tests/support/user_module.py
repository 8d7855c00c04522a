"""A module of the user's own in the folder that a test works in."""

import sys
from pathlib import Path

import pytest


def work_beside(
    text: str, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "mine"
) -> None:
    """`folder` is the current one and holds `name`.py, which is imported anew."""
    (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
