"""File systems that really fail: full ones, and one whose disk takes no more writes."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

CHUNK_BYTES = 1 << 12


@contextmanager
def mounted(folder: Path, *arguments: str) -> Iterator[Path]:
    """A file system mounted at the folder. Skips the test where this user may not mount."""
    folder.mkdir()
    command = ["mount", *arguments, str(folder)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount")
    if result.returncode:
        pytest.skip(f"mount is refused here: {result.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], capture_output=True, check=True)


@contextmanager
def small_tmpfs(folder: Path, size_bytes: int) -> Iterator[Path]:
    """A tmpfs of that size: writes beyond it fail with ENOSPC."""
    with mounted(folder, "-t", "tmpfs", "-o", f"size={size_bytes}", "none") as path:
        yield path


def fill_up(filler: Path) -> None:
    """Writes the file until there is no space left."""
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(CHUNK_BYTES)):
            pass


class FailingDisk:
    """An ext4 file system in a sparse image on a tmpfs: full outside, it has room inside.

    Once `fail` was called, writes go into the page cache and succeed, and fsync fails.
    """

    def __init__(self, outside: Path, inside: Path) -> None:
        self.inside = inside
        self._filler = outside / "filler"

    def fail(self) -> None:
        """Fills the space below the image."""
        os.sync()
        fill_up(self._filler)

    def heal(self) -> None:
        """Frees it again."""
        self._filler.unlink()


@contextmanager
def failing_disk(folder: Path) -> Iterator[FailingDisk]:
    with small_tmpfs(folder / "outside", 4 << 20) as outside:
        image = outside / "image"
        with image.open("wb") as file:
            file.truncate(32 << 20)
        command = ["mkfs.ext4", "-q", "-b", "4096", "-O", "^has_journal", str(image)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (FileNotFoundError, subprocess.CalledProcessError):
            pytest.skip("mkfs.ext4 does not run here")
        with mounted(folder / "inside", "-o", "loop", str(image)) as inside:
            yield FailingDisk(outside, inside)
