"""Tar shards for tests, written by Python's own tarfile."""

import io
import json
import tarfile
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor


def add_member(archive: tarfile.TarFile, name: str, content: bytes, **fields: object) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for field, value in fields.items():
        setattr(member, field, value)
    archive.addfile(member, io.BytesIO(content))


def write_tar(path: Path, members: Iterable[tuple[str, bytes]], tar_format: int = 1) -> Path:
    with tarfile.open(path, "w", format=tar_format) as archive:
        for name, content in members:
            add_member(archive, name, content)
    return path


def png(number: int, side: int = 6) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels(number, side).numpy()).save(file, "PNG")
    return file.getvalue()


def pixels(number: int, side: int = 6) -> Tensor:
    draw = torch.Generator().manual_seed(number)
    return torch.randint(0, 256, (side, side, 3), dtype=torch.uint8, generator=draw)


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def sample_members(number: int) -> list[tuple[str, bytes]]:
    """An image, its number as a class, a text, an array and some JSON."""
    key = f"part/{number:05}"
    return [
        (f"{key}.png", png(number)),
        (f"{key}.cls", str(number).encode()),
        (f"{key}.txt", f"sample {number} ünï".encode()),
        (f"{key}.x.npy", npy(np.arange(number, number + 3, dtype=np.float32))),
        (f"{key}.json", json.dumps({"number": number}).encode()),
    ]


def write_shards(folder: Path, sizes: Iterable[int], parts: int = 5) -> list[Path]:
    """Shards of so many samples, numbered through all of them; the first `parts` of each."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    number = 0
    for shard, size in enumerate(sizes):
        members = []
        for _ in range(size):
            members += sample_members(number)[:parts]
            number += 1
        paths.append(write_tar(folder / f"shard-{shard:03}.tar", members))
    return paths
