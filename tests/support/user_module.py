"""A module of the user's own, in the folder that a test works in."""

import sys
from pathlib import Path

import pytest


def write_user_module(
    source: str, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str = "mine"
) -> None:
    """Makes `folder` the current one and writes the module `name` there; it is imported anew."""
    (folder / f"{name}.py").write_text(source)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)
