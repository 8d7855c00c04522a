"""Folders that hold only speed, and may be left out of an installation."""

SPEED_FOLDERS = (
    "halfstep.compiler",
    "halfstep.cuda_graphs",
    "halfstep.engine.captured",
    "halfstep.kernels",
    "halfstep.step.fast",
)


def is_left_out(error: ModuleNotFoundError) -> bool:
    """Whether an import failed because such a folder is not there.

    Any other failed import is a fault, and must not be hidden behind slower steps.
    """
    name = error.name or ""
    return any(name == folder or name.startswith(f"{folder}.") for folder in SPEED_FOLDERS)
