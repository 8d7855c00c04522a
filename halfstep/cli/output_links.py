"""Links in a folder that a command writes into.

A file that is replaced may be a link: then the file that it names is replaced. In a folder that
somebody else has filled, that could be any file of the user's.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from halfstep.utils.text import printable


def refuse_links_out_of(folder: Path, names: Iterable[str]) -> None:
    """ValueError if one of the files that will be written is a link to outside of the folder.

    `names` are relative to the folder, which may be a link itself: the user has named it.
    """
    root = Path(os.path.realpath(folder))
    for name in names:
        path = root / name
        target = Path(os.path.realpath(path))
        if not target.is_relative_to(root):
            raise ValueError(
                f"{printable(folder / name)}: expected a file of this folder, got a link to "
                f"{printable(target)}, which would be overwritten. Remove the link, or name "
                "another folder (--out)."
            )
