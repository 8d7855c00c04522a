"""Modules of the user's: from the folder or the file that is named, and nothing else from there."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfstep.experiment.builders import import_function
from halfstep.utils.user_modules import NAME_OF_TAKEN

MODULES = {
    "own": "import json, mate\nfrom inner import part\n\ndef build():\n    return mate.VALUE",
    "mate": "VALUE = 7",
    "inner/__init__": "",
    "inner/part": "def build():\n    return 'inner'",
    "json": "raise SystemExit('planted')",
    "missing_elsewhere": "raise SystemExit('planted')",
    "profile": "def build():\n    return 'profile'",
    "not-a-name": "def build():\n    return 'any name'",
    "wants_email": "from email import anything_of_mine\n\ndef build(): ...",
    "email": "anything_of_mine = 1",
    "fails": "raise RuntimeError('broken')",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with modules; what a test imports and changes is undone."""
    for name, source in MODULES.items():
        path = tmp_path / f"{name}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source + "\n")
        if name not in ("json", "profile", "email"):
            monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    sys.path_importer_cache.pop(str(tmp_path), None)


@pytest.mark.parametrize(
    ("spec", "result"),
    [
        ("own:build", 7),
        ("./own.py:build", 7),
        ("inner.part:build", "inner"),
        ("inner/part.py:build", "inner"),
        ("./profile.py:build", "profile"),
        ("not-a-name.py:build", "any name"),
    ],
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_named_function_is_imported(
    spec: str, result: object, elsewhere: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if elsewhere:
        if "/" not in spec and ".py" not in spec:
            pytest.skip("a module is looked for in the current folder only")
        (folder / "elsewhere").mkdir()
        monkeypatch.chdir(folder / "elsewhere")
        spec = os.path.join("..", spec)
    assert import_function(spec)() == result
    assert import_function(spec) is import_function(spec)  # and run only once
    assert sys.path[-1] == str(folder / "inner" if "inner/" in spec else folder)
    import profile

    assert Path(str(profile.__file__)).parent != folder


def test_installed_packages_do_not_see_the_folder(folder: Path) -> None:
    import_function("own:build")
    with pytest.raises(ModuleNotFoundError):
        import missing_elsewhere  # type: ignore[import-not-found] # noqa: F401
    (folder / "asks.py").write_text("def build():\n    import missing_elsewhere\n")
    with pytest.raises(SystemExit, match="planted"):
        import_function("asks:build")()


def test_a_folder_that_is_on_the_path_already_stays_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(folder)
    path_before = list(sys.path)
    import_function("own:build")
    assert sys.path == path_before
    with pytest.raises(SystemExit, match="planted"):
        import missing_elsewhere  # noqa: F401


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("profile:build", r"is .*profile\.py and also .*profile\.py\. For the first, .*\./profile"),
        ("wants_email:build", r"email\.py is not used, because .* has the same name: rename"),
        ("own:biuld", r"Did you mean own:build\?"),
        ("own.py:biuld", r"Did you mean own\.py:build\?"),
        ("nowhere:build", "No module named 'nowhere'"),
        ("nowhere.py:build", "expected a file of Python, .* found none at"),
        ("inner/part:build", "expected a file of Python"),
        ("own", "expected package.module:function or path/to/file.py:function, got 'own'"),
        (":build", "expected package.module:function"),
        ("own:", "expected package.module:function"),
    ],
)
def test_a_mistake_is_explained(spec: str, message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        import_function(spec)


def test_a_module_that_fails_is_not_left_behind(folder: Path) -> None:
    modules_before = set(sys.modules)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="broken"):
            import_function("fails.py:build")
    assert NAME_OF_TAKEN + "fails" not in sys.modules
    assert "fails" not in set(sys.modules) - modules_before
