"""Tar shards on this machine as a data set with an index: any sample at once, in any order."""

import hashlib
import os
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from torch.utils.data import Dataset

from halfstep.data.download.byte_progress import byte_progress
from halfstep.data.download.find import require_cache
from halfstep.data.download.local_copy import local_path
from halfstep.data.readers.image_folder import MAX_PIXELS, MODES, read_in_threads
from halfstep.data.readers.resize_crop import parse_image_size
from halfstep.data.shards.member_decoding import Decode, SampleDecoder, parse_columns
from halfstep.data.shards.shard_names import list_shards
from halfstep.data.shards.shard_reads import FileReads
from halfstep.data.shards.tar_samples import scan_samples
from halfstep.utils.atomic_files import atomic_file
from halfstep.utils.checks import one_of, whole_number
from halfstep.utils.text import printable

INDEX_FOLDER = "tar-index"
INDEX_VERSION = 1  # a part of the names of index files

# Start and end of each sample, int64 [samples, 2].
Index = npt.NDArray[np.int64]


class TarShards(Dataset[dict[str, Any]]):
    """Sample i is a dict of columns, from tar shards in the manner of WebDataset.

    Consecutive members with one name up to the first dot are a sample: `7.jpg`, `7.cls`. `columns`
    chooses parts, `["jpg", "cls"]`, or names them, `{"image": ("jpg", "png"), "label": "cls"}`;
    `"__key__"` is the name itself. Images become uint8 [H, W, 3] as by ImageFolder (`size`,
    `mode`), `.cls` a number, `.npy` a tensor, `.txt` and `.json` what they hold, anything else
    bytes, or what a function in `decode` makes of these. Nothing is unpickled.

    Shards in a store are copied into the cache first; ShardStream reads them without. Where the
    samples lie is read once per shard and kept in the cache.
    """

    def __init__(
        self,
        shards: str | Path | Sequence[str | Path],
        columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None = None,
        *,
        decode: Mapping[str, Decode] | None = None,
        size: int | tuple[int, int] | None = None,
        mode: Literal["RGB", "L"] = "RGB",
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        self.decoder = make_decoder(columns, decode, size, mode, max_pixels)
        names = list_shards(shards, "TarShards")
        self.shards = [local_path(name, "TarShards", unpack_archives=False) for name in names]
        self.indices: list[Index] = []
        total = sum(os.path.getsize(path) for path in self.shards)
        indexed_bytes = 0
        with byte_progress("indexing the shards", total, None) as show:
            for index in read_in_threads(load_index, self.shards):
                indexed_bytes += os.path.getsize(self.shards[len(self.indices)])
                self.indices.append(index)
                show(indexed_bytes)
        # How many samples there are up to the end of each shard.
        self.ends = list(accumulate(len(index) for index in self.indices))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"expected a sample of {len(self):,}, got {index}")
        index %= len(self)
        shard = bisect_right(self.ends, index)
        start, end = self.indices[shard][index - self.ends[shard]].tolist()
        path = self.shards[shard]
        with open(path, "rb") as file:
            content = FileReads(file).read(start, end - start)
        return self.decoder(content, path)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Several samples, decoded in threads; one by one where functions of the user's do it."""
        if self.decoder.decode:
            return [self[index] for index in indices]
        return list(read_in_threads(self.__getitem__, indices))


def make_decoder(
    columns: Sequence[str] | Mapping[str, str | Sequence[str]] | None,
    decode: Mapping[str, Decode] | None,
    size: int | tuple[int, int] | None,
    mode: str,
    max_pixels: int,
) -> SampleDecoder:
    """The decoder of these arguments, checked."""
    one_of("mode", mode, MODES)
    functions = {}
    for name, function in (decode or {}).items():
        if not callable(function):
            raise TypeError(f"decode: expected a function of bytes for {name!r}, got {function!r}")
        functions[name.lower().removeprefix(".")] = function
    return SampleDecoder(
        parse_columns(columns),
        functions,
        mode,
        None if size is None else parse_image_size("size", size),
        whole_number("max_pixels", max_pixels, minimum=1),
    )


def load_index(path: Path) -> Index:
    """Where the samples of a shard lie, from the cache, or by reading its headers."""
    cached = _cached_index(path)
    if cached is not None:
        with suppress(OSError, ValueError, EOFError):
            index: Index = np.load(cached, allow_pickle=False)
            if index.dtype == np.int64 and index.ndim == 2 and index.shape[1] == 2:
                return index
    with open(path, "rb") as file:
        ranges = list(scan_samples(FileReads(file), path))
    if not ranges:
        raise ValueError(
            f"{printable(path)}: expected samples, members such as 0001.jpg and 0001.cls, "
            "found none"
        )
    index = np.array(ranges, dtype=np.int64)
    if cached is not None:
        with suppress(OSError), atomic_file(cached) as file:  # the next start reads it again
            np.save(file, index)
    return index


def _cached_index(path: Path) -> Path | None:
    """The index of this very state of the file; None for a user without a cache."""
    status = os.stat(path)
    state = (INDEX_VERSION, os.path.realpath(path), status.st_size, status.st_mtime_ns)
    digest = hashlib.sha256(repr(state).encode(errors="surrogateescape")).hexdigest()
    try:
        return require_cache() / INDEX_FOLDER / digest[:2] / f"{digest}.npy"
    except ValueError:
        return None
