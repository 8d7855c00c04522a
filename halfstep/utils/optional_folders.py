"""Folders that hold only speed, and may be left out of an installation."""

import importlib

SPEED_FOLDERS = (
    "halfstep.compiler",
    "halfstep.cuda_graphs",
    "halfstep.engine.captured",
    "halfstep.kernels",
    "halfstep.step.fast",
)


def is_left_out(error: ModuleNotFoundError) -> bool:
    """Whether an import failed because such a folder, as a whole, is not there.

    Any other failed import, of one file in it too, is a fault: it must not be hidden behind slower
    steps.
    """
    name = error.name or ""
    for folder in SPEED_FOLDERS:
        if name == folder or name.startswith(f"{folder}."):
            return not _is_there(folder)
    return False


def _is_there(folder: str) -> bool:
    try:
        importlib.import_module(folder)
    except ModuleNotFoundError as error:
        return error.name != folder
    return True
