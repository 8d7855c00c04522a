"""Finds a data set on this machine.

The network is used only on request: a URL as `path`, or download=True.
"""

import gzip
import hashlib
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from halfstep.data.download.archive import unpack
from halfstep.data.download.catalog import CATALOG, CatalogEntry, Checksum, catalog_entry
from halfstep.data.download.fetch import fetch_file, is_open
from halfstep.data.download.store_copy import copy_store
from halfstep.errors import Notice
from halfstep.storage.url import parse_store_url

DEBIAN = Path("/usr/share/datasets")  # where Debian's packages put data sets
SAMPLE = Path(__file__).parents[1] / "sample"  # the part of Fashion-MNIST in this package
ARCHIVE_SUFFIX = re.compile(r"\.(tar|tgz|tbz2?|txz|zip|tar\.(gz|bz2|xz))$", re.IGNORECASE)
LABELS_BYTES = 1 << 16  # enough for the test labels: 10,008 bytes in MNIST and Fashion-MNIST


@dataclass(frozen=True)
class DatasetLocation:
    """A folder that holds every file of a data set.

    `origin` says how it was found: path, HALFSTEP_DATA, cache, debian, sample, or the URL.
    """

    folder: Path
    origin: str
    sample: bool = False


def find(
    name: str,
    path: str | Path | None = None,
    *,
    download: bool = False,
    progress: bool | None = None,
) -> DatasetLocation:
    """The folder of a data set.

    Looked for in `path`, else in $HALFSTEP_DATA, the cache, and Debian's packages; then downloaded
    if requested. Fashion-MNIST falls back to the sample. `path` is a folder, an archive or a URL of
    either, and is final: without the files in it, it is an error. A URL may pin its archive:
    https://host/set.zip#sha256=<64 hex digits>.
    """
    entry = catalog_entry(name)
    if path is not None:
        return _find_in_path(entry, path, progress)

    misses = ""
    for origin, root in _usual_folders():
        folder, reason = search_folder(entry, root)
        if folder is not None:
            return DatasetLocation(folder, origin, sample=is_sample(folder))
        misses += f"\n  {origin}: {reason}"
    if download:
        return _download(entry, progress)

    if entry.name == "fashion-mnist":
        warnings.warn(
            "fashion-mnist is a sample of it: 11,000 + 2,000 of its 70,000 images, whose "
            "accuracies compare with no published ones. "
            f"Looked in:{misses}\n{_advice(entry)}",
            Notice,
            stacklevel=2,
        )
        return DatasetLocation(SAMPLE, "sample", sample=True)
    raise FileNotFoundError(f"{entry.name} was not found:{misses}\n{_advice(entry)}")


def forget_download(location: DatasetLocation) -> None:
    """Removes what the URL of a folder delivered, so that the next call fetches it again.

    Files from elsewhere are left alone.
    """
    cache = _cache_folder()
    if cache is not None and location.folder.parent == cache / "urls":
        shutil.rmtree(location.folder, ignore_errors=True)


def _advice(entry: CatalogEntry) -> str:
    advice = (
        f"Set HALFSTEP_DATA to a folder that holds {entry.name}, "
        "pass path= (a folder, an archive or a URL), or allow download=True."
    )
    if entry.package:
        advice += f" On Debian and Ubuntu: apt-get install {entry.package}."
    return advice


# The usual folders


def _usual_folders() -> Iterator[tuple[str, Path]]:
    """The folders to look in, in order, with the name of each."""
    data_folder = os.environ.get("HALFSTEP_DATA")
    if data_folder:
        root = Path(data_folder).expanduser()
        if not os.path.isdir(root):
            raise NotADirectoryError(
                f"expected a folder in HALFSTEP_DATA, got {data_folder!r}. Correct it or unset it."
            )
        yield "HALFSTEP_DATA", root
    cache = _cache_folder()
    if cache is not None:
        yield "cache", cache
    yield "debian", DEBIAN


def require_cache() -> Path:
    """The cache folder; a ValueError if this user has none."""
    cache = _cache_folder()
    if cache is None:
        raise ValueError(
            "expected a home folder for the cache, this user has none. "
            "Set HALFSTEP_CACHE to a folder."
        )
    return cache


def _cache_folder() -> Path | None:
    """$HALFSTEP_CACHE, else $XDG_CACHE_HOME/halfstep, else ~/.cache/halfstep."""
    own_cache = os.environ.get("HALFSTEP_CACHE")
    if own_cache:
        return Path(own_cache).expanduser().absolute()
    user_cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(user_cache):  # by the XDG standard, a relative one counts as unset
        user_cache = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(user_cache):
        return None
    return Path(user_cache) / "halfstep"


# What the user passes as `path`: a folder, an archive, or a URL of one


def _find_in_path(entry: CatalogEntry, path: str | Path, progress: bool | None) -> DatasetLocation:
    if not str(path):
        raise ValueError(
            "path: expected a folder, an archive or a URL, got ''. None looks in the usual places."
        )
    if not isinstance(path, str) or "://" not in path:
        return _find_local(entry, Path(path).expanduser(), str(path), pin=None)
    url = urlsplit(path)
    if url.scheme in ("http", "https"):
        return _find_remote(entry, path, progress)
    if url.scheme != "file":
        copy = copy_store(
            parse_store_url(path, "path"), require_cache(), what="path", progress=progress
        )
        return _find_local(entry, copy.path, path, pin=None)
    if url.netloc not in ("", "localhost"):
        raise ValueError(f"path: expected a file:// URL on this machine, got {path!r}")
    local_path = Path(url2pathname(url.path))
    pin = parse_pin(path, is_archive=not os.path.isdir(local_path))
    return _find_local(entry, local_path, path, pin)


def _find_local(
    entry: CatalogEntry, path: Path, user_path: str, pin: Checksum | None
) -> DatasetLocation:
    """In a folder or an archive on this machine; errors quote `user_path`."""
    if os.path.isfile(path):
        return _find_in_archive(entry, path, "path", user_path, pin)
    if not os.path.isdir(path):
        raise FileNotFoundError(
            f"path={user_path!r}: expected a folder, an archive or a URL, found nothing there."
        )
    return _require_files(entry, path, "path", user_path)


def _require_files(
    entry: CatalogEntry, root: Path, origin: str, user_path: str, *, deep: bool = False
) -> DatasetLocation:
    """The data set in or under `root`; a FileNotFoundError if it is not there."""
    folder, reason = search_folder(entry, root, deep=deep)
    if folder is None:
        files = ", ".join(entry.files)
        if entry.kind == "idx":
            files += " (each plain or .gz)"
        raise FileNotFoundError(
            f"path={user_path!r}: expected the files of {entry.name}, {reason}. They are: {files}."
        )
    return DatasetLocation(folder, origin, sample=is_sample(folder))


def _find_in_archive(
    entry: CatalogEntry, archive: Path, origin: str, user_path: str, pin: Checksum | None
) -> DatasetLocation:
    """Unpacks an archive into the cache, under its sha256: a changed archive is unpacked again."""
    digest = Checksum.of(archive).hex
    if pin is not None:
        checksum = Checksum.of(archive, pin.algorithm)
        if checksum != pin:
            raise ValueError(
                f"path={user_path!r}: expected that {pin.algorithm}, "
                f"{archive} has {checksum.hex}. Correct one of them."
            )
    root = require_cache() / "unpacked" / digest
    if not root.is_dir():
        with suppress(FileExistsError):  # another process was quicker, with the same bytes
            unpack(archive, root)
    if origin != "path":
        origin = f"{origin}#sha256={digest}"
    return _require_files(entry, root, origin, user_path, deep=True)


def _find_remote(entry: CatalogEntry, url: str, progress: bool | None) -> DatasetLocation:
    parts = urlsplit(url)
    is_archive = bool(parts.query or ARCHIVE_SUFFIX.search(parts.path))
    pin = parse_pin(url, is_archive=is_archive)
    address = parts._replace(fragment="").geturl()
    warn_if_open(address, pin)
    folder = require_cache() / "urls" / hashlib.sha256(url.encode()).hexdigest()
    if not is_archive:
        return _fetch_folder(entry, address, folder, progress)

    file_name = unquote(parts.path).rsplit("/", 1)[-1]
    file_name = re.sub(r"[^\w.-]", "_", file_name)[-100:].lstrip(".")
    archive = folder / (file_name or "archive")
    if not archive.is_file():
        fetch_file(address, archive, checksum=pin, progress=progress)
    try:
        return _find_in_archive(entry, archive, address, url, pin)
    except (ValueError, FileNotFoundError):
        # The next call fetches it again: the publisher may have repaired it.
        archive.unlink(missing_ok=True)
        raise


def warn_if_open(address: str, pin: Checksum | None) -> None:
    """Says that a file comes over http without a checksum."""
    if pin is None and is_open(address):
        message = (
            f"{address} is fetched over http, where anybody on the way can change it. "
            "Write https://, or pin an archive: #sha256=… after its address"
        )
        warnings.warn(message, Notice, stacklevel=3)


def _fetch_folder(
    entry: CatalogEntry, address: str, folder: Path, progress: bool | None
) -> DatasetLocation:
    """Fetches the files of a data set from below an address; idx files as .gz if there are such."""
    for name in entry.files:
        if find_file(entry, folder, name) is not None:
            continue
        url = f"{address.rstrip('/')}/{name}"
        if entry.kind != "idx":
            fetch_file(url, folder / name, progress=progress)
            continue
        try:
            fetch_file(f"{url}.gz", folder / f"{name}.gz", progress=progress)
        except OSError as error:
            if error.errno is not None:  # an error with a number is this machine's
                raise
            fetch_file(url, folder / name, progress=progress)
    return _require_files(entry, folder, address, address)


def parse_pin(url: str, *, is_archive: bool) -> Checksum | None:
    """The checksum in the fragment of a URL, written as pip writes it."""
    fragment = urlsplit(url).fragment
    if not fragment:
        return None
    algorithm, _, digits = fragment.partition("=")
    if algorithm not in ("md5", "sha256"):
        raise ValueError(
            f"path={url!r}: expected #sha256=... or #md5=... after the address, got #{fragment}"
        )
    if not is_archive:
        raise ValueError(
            f"path={url!r}: a checksum pins an archive, this is a folder. Leave out #{fragment}"
        )
    return Checksum("md5" if algorithm == "md5" else "sha256", digits.lower())


# From the publisher


def _download(entry: CatalogEntry, progress: bool | None) -> DatasetLocation:
    """From the publisher into the cache; a file that is there already, undamaged, is kept."""
    cache = require_cache()
    root = cache / entry.name
    origin = "cache"
    for source in entry.sources:
        target = (root if entry.kind == "idx" else cache / "downloads") / source.file
        if not _has_checksum(target, source.checksum):
            fetched = fetch_file(source.urls, target, checksum=source.checksum, progress=progress)
            origin = fetched.url.removesuffix(source.file)
        if entry.kind == "cifar":
            # Another process may be quicker, and may have removed the archive already.
            with suppress(FileExistsError, FileNotFoundError):
                unpack(target, root)
            target.unlink(missing_ok=True)
    folder, reason = search_folder(entry, root, deep=True)
    if folder is None:
        raise FileNotFoundError(
            f"{entry.name} was fetched, but {reason}. Remove {root} and try again."
        )
    return DatasetLocation(folder, origin)


def _has_checksum(path: Path, checksum: Checksum) -> bool:
    return path.is_file() and Checksum.of(path, checksum.algorithm) == checksum


# Whether a folder holds a data set, and really that one


def search_folder(
    entry: CatalogEntry, root: Path, *, deep: bool = False
) -> tuple[Path | None, str]:
    """The folder with the files, in or under `root`; or None and why, from the nearest miss.

    `deep` looks in every folder below `root`.
    """
    reason = f"there is no folder {root}"
    if os.path.isdir(root):
        reason = f"{root} has neither the files nor a folder called {entry.name}"
    most_files = 0
    for folder in _candidate_folders(entry, root, deep):
        missing = [name for name in entry.files if find_file(entry, folder, name) is None]
        mix_up = None if missing else _mix_up(entry, folder)
        if not missing and mix_up is None:
            return folder, ""
        file_count = len(entry.files) - len(missing)
        if file_count > most_files:
            most_files = file_count
            if missing:
                reason = f"{folder} lacks {', '.join(missing)}"
            else:
                reason = f"{folder} {mix_up}"
    return None, reason


def _candidate_folders(entry: CatalogEntry, root: Path, deep: bool) -> Iterator[Path]:
    """Where to look. Folders of the set's name come first: MNIST and Fashion-MNIST share files."""
    for child in _subfolders(root):
        if entry.is_called(child.name):
            yield child
            for inner in _subfolders(child):
                if inner.name == "raw" or entry.is_called(inner.name):
                    yield inner
    yield root
    yield root / "raw"  # torchvision's layout is MNIST/raw
    if deep:
        yield from sorted(Path(folder) for folder, _, _ in os.walk(root))


def _subfolders(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir())
    except OSError:
        return []  # not there, or not readable


def find_file(entry: CatalogEntry, folder: Path, name: str) -> Path | None:
    """The data set's file of that name in `folder`; idx files may also be .gz."""
    candidates = [folder / name]
    if entry.kind == "idx":
        candidates.append(folder / f"{name}.gz")
    for path in candidates:
        if os.path.isfile(path):
            return path
    return None


def _mix_up(entry: CatalogEntry, folder: Path) -> str | None:
    """Which other data set these files are, by their test labels or the folder's name.

    None if they are those of the entry, as far as one can tell.
    """
    if entry.name != "fashion-mnist" and is_sample(folder):
        return "holds a sample of fashion-mnist"
    twins = [
        other for other in CATALOG.values() if other is not entry and other.files == entry.files
    ]
    labels = find_file(entry, folder, entry.files[-1])
    digest = ""
    if twins and labels is not None:
        digest = _labels_digest(labels)
    folder_name = folder.parent.name if folder.name == "raw" else folder.name
    for twin in twins:
        if twin.contents[-1].hex == digest:
            return f"holds {twin.name}"
        if twin.is_called(folder_name) and digest != entry.contents[-1].hex:
            return f"is called like {twin.name}"
    return None


def is_sample(folder: Path) -> bool:
    """Whether it is the part of Fashion-MNIST that ships with the package."""
    return folder.resolve() == SAMPLE.resolve()


def _labels_digest(path: Path) -> str:
    """The sha256 of the unpacked labels; empty if they are damaged, which the reader reports."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            return hashlib.sha256(file.read(LABELS_BYTES)).hexdigest()
    except (OSError, EOFError, zlib.error):
        return ""
