"""Lists of shards: files, folders, patterns and URLs, as the paths of single shards in order."""

import glob
import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from halfstep.data.download.store_reads import StoreReads
from halfstep.storage.url import is_store_url, parse_store_url
from halfstep.utils.text import printable

RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
MAX_SHARDS = 1_000_000
SHARD_SUFFIX = ".tar"


def list_shards(shards: str | Path | Sequence[str | Path], what: str) -> list[str]:
    """The shards that the names stand for, each once, in the order of the names.

    A name is a file, a folder (its .tar files), a pattern with `*`, `?` or `{000..146}`, or the URL
    of one of these. Names of a pattern and of a folder are sorted.
    """
    names = [shards] if isinstance(shards, str | Path) else list(shards)
    listed: list[str] = []
    for name in names:
        for expanded in _expand_ranges(str(name), what):
            if is_in_store(expanded):
                listed += _list_store(expanded, what)
            else:
                listed += _list_local(expanded)
    if not listed:
        raise ValueError(f"{what}: expected shards, files of .tar, got none in {names!r}")
    seen: set[str] = set()
    for shard in listed:
        if shard in seen:
            raise ValueError(f"{what}: {printable(shard)} is there twice; name each shard once")
        seen.add(shard)
    return listed


def is_in_store(name: str) -> bool:
    """Whether a shard is read from a store, and not from this machine."""
    return is_store_url(name) and not name.startswith("file://")


def _expand_ranges(name: str, what: str) -> Iterator[str]:
    """The names that `{000..146}` stands for; several of them are combined."""
    pieces: list[list[str]] = []
    position = 0
    count = 1
    for match in RANGE.finditer(name):
        first, last = int(match[1]), int(match[2])
        count *= max(last - first + 1, 0)
        if not 0 < count <= MAX_SHARDS:
            raise ValueError(
                f"{what}: expected a range of 1 to {MAX_SHARDS:,} shards, such as {{000..146}}, "
                f"got {match[0]}"
            )
        pieces.append([name[position : match.start()]])
        pieces.append([f"{number:0{len(match[1])}}" for number in range(first, last + 1)])
        position = match.end()
    pieces.append([name[position:]])
    return ("".join(parts) for parts in itertools.product(*pieces))


def _list_local(name: str) -> list[str]:
    name = name.removeprefix("file://")
    path = Path(name).expanduser()
    if path.is_dir():
        return sorted(str(file) for file in path.iterdir() if file.name.endswith(SHARD_SUFFIX))
    if path.exists() or not glob.has_magic(name):
        if not path.is_file():
            raise FileNotFoundError(
                f"{printable(path)}: expected a tar shard, a folder or a pattern of them, found "
                "nothing there"
            )
        return [str(path)]
    return sorted(glob.glob(str(path)))


def _list_store(url: str, what: str) -> list[str]:
    """The URLs of shards in a store. A plain name is taken as it is: it is looked for when read."""
    if not glob.has_magic(url) and url.endswith(SHARD_SUFFIX):
        return [str(parse_store_url(url, what))]
    place = parse_store_url(url, what)
    if not glob.has_magic(url):
        objects, _ = StoreReads(place, what).list_objects()
        names = [item.name for item in objects if item.name.endswith(SHARD_SUFFIX)]
        return [str(place / name) for name in names]
    reads = StoreReads(place, what)
    paths = reads.retry("list", reads.root, lambda: reads.filesystem.glob(reads.root))
    return sorted(f"{place.scheme}://{path.lstrip('/')}" for path in paths)
