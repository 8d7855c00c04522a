"""Imports the module that a user names, from the folder or file where it is looked for.

No other file of that folder may take the place of an installed package or of the standard library:
a folder of downloaded data may hold a torch.py.
"""

import importlib
import importlib.util
import os
import sys
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import ModuleType
from typing import Any, cast

FILE_SUFFIX = ".py"
# The first part of a module's name where its own is taken by an installed module.
NAME_OF_TAKEN = "halfstep_user_"


def is_file_spec(module: str) -> bool:
    """Whether a module is named by its file: "path/to/train.py"."""
    return module.endswith(FILE_SUFFIX) or "/" in module


def import_user_module(name: str, folder: Path) -> ModuleType:
    """The module "package.module": the one in `folder`, or one that is installed.

    A ValueError if both exist. Modules beside it can be imported by it, but come last: installed
    ones and those of the standard library win.
    """
    top_name = name.partition(".")[0]
    here = PathFinder.find_spec(top_name, [str(folder)])
    installed = _find_installed(top_name)
    if here is None or (here.origin is None and installed is not None):
        # A folder without __init__.py never wins over a module.
        return importlib.import_module(name)
    if installed is not None and not _are_same(here, installed):
        raise ValueError(
            f"{name!r} is {here.origin} and also {_place(installed)}. "
            f"For the first, name its file: ./{_as_file(name, folder)}. "
            "For the other, start the command in another folder"
        )
    _add_last(folder)
    return importlib.import_module(name)


def import_user_file(path: Path) -> ModuleType:
    """The module in a file; modules beside it can be imported by it, as by import_user_module.

    It is called like its file, unless an installed module is called so.
    """
    path = path.expanduser().resolve()
    if path.suffix != FILE_SUFFIX or not path.is_file():
        raise ValueError(f"expected a file of Python, *{FILE_SUFFIX}, found none at {path}")
    _add_last(path.parent)
    name = path.stem
    installed = _find_installed(name)
    is_taken = installed is not None and _origin(installed) != path
    if is_taken or not name.isidentifier():
        name = f"{NAME_OF_TAKEN}{name}"

    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as by any import: dataclasses look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def shadowed_sibling(error: ImportError, folder: Path) -> str:
    """A sentence about a file of the user's that is not imported because of its name, or nothing.

    A user's datasets.py is not seen where a package called datasets is installed.
    """
    if not error.name:
        return ""
    top_name = error.name.partition(".")[0]
    sibling = PathFinder.find_spec(top_name, [str(folder)])
    loaded = sys.modules.get(top_name)
    spec = None if loaded is None else loaded.__spec__
    if sibling is None or sibling.origin is None or spec is None or _are_same(sibling, spec):
        return ""
    return (
        f" {sibling.origin} is not used, because {_place(spec)} has the same name: rename the file."
    )


def _find_installed(top_name: str) -> ModuleSpec | None:
    """Where Python finds a module by itself, or found it when it was imported."""
    if top_name not in sys.modules:
        try:
            return importlib.util.find_spec(top_name)
        except ValueError:  # not a name
            return None
    spec = sys.modules[top_name].__spec__
    # Of __main__ and of modules that are made by hand nothing is known but the name.
    return spec or ModuleSpec(top_name, None, origin="a module that is loaded already")


def _are_same(a: ModuleSpec, b: ModuleSpec) -> bool:
    if a.origin is None or b.origin is None:
        locations = [spec.submodule_search_locations or [] for spec in (a, b)]
        return list(map(str, locations[0])) == list(map(str, locations[1]))
    return _origin(a) == _origin(b)


def _origin(spec: ModuleSpec) -> Path | None:
    return None if spec.origin is None else Path(spec.origin).resolve()


def _place(spec: ModuleSpec) -> str:
    if spec.origin is None:
        return f"the folder {next(iter(spec.submodule_search_locations or ['?']))}"
    return f"{spec.origin}"


def _as_file(name: str, folder: Path) -> str:
    """The file of a module in the folder, relative to it."""
    path = Path(*name.split("."))
    if (folder / path / "__init__.py").is_file():
        return str(path / "__init__.py")
    return f"{path}{FILE_SUFFIX}"


class SiblingFinder:
    """Finds the modules of a folder for code that lies in this folder, and for nobody else.

    Installed packages look for others that may be missing (torch for triton): those must not come
    from a folder in which the user only named one module.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = f"{folder}{os.sep}"
        self._files = FileFinder(
            str(folder),
            (ExtensionFileLoader, EXTENSION_SUFFIXES),
            (SourceFileLoader, SOURCE_SUFFIXES),
        )

    def find_spec(self, name: str, target: ModuleType | None = None) -> ModuleSpec | None:
        """Where the module is, or None if other code asks."""
        importer = _importing_file()
        if importer == __file__ or importer.startswith(self.folder):
            return self._files.find_spec(name, target)
        return None

    def invalidate_caches(self) -> None:
        self._files.invalidate_caches()


def _importing_file() -> str:
    """The file of the code that imports something right now."""
    frame = sys._getframe(2)
    while frame.f_back is not None:
        file_name = frame.f_code.co_filename
        if not file_name.startswith("<frozen importlib") and file_name != importlib.__file__:
            return file_name
        frame = frame.f_back
    return ""


def _add_last(folder: Path) -> None:
    """Lets modules in the folder import each other: it becomes the last place to look in.

    Where the folder is on the path already, the user has put it there for everyone.
    """
    is_current = folder == Path.cwd() and "" in sys.path
    if is_current or str(folder) in sys.path:
        return
    sys.path.append(str(folder))  # which worker processes get too
    sys.path_importer_cache[str(folder)] = cast("Any", SiblingFinder(folder))
