"""Where a data set lies on this machine; the network is touched only when asked: a URL as path, or download=True."""

import hashlib
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from halfstep.data.download.archive__unpack import unpack
from halfstep.data.download.catalog import Checksum, Entry, known
from halfstep.data.download.fetch import download as fetch
from halfstep.data.download.find__look import SAMPLE, file_of, is_sample, search
from halfstep.errors import Notice

DEBIAN = Path("/usr/share/datasets")
_ARCHIVE = re.compile(r"\.(tar|tgz|tbz2?|txz|zip|tar\.(gz|bz2|xz))$", re.IGNORECASE)


@dataclass(frozen=True)
class Found:
    """A folder that holds every file of the set. `origin`: path, HALFSTEP_DATA, cache, debian, sample, or the URL."""

    folder: Path
    origin: str
    sample: bool = False


def find(
    name: str,
    path: str | Path | None = None,
    *,
    download: bool = False,
    progress: bool | None = None,
) -> Found:
    """The set's folder: `path`, else $HALFSTEP_DATA, the cache, Debian's packages, a download if asked, the sample.

    `path` is a folder, an archive or a URL of either, and is final: without the files in it, it is an error. A URL may
    pin its archive: https://host/set.zip#sha256=<64 hex digits>.
    """
    entry = known(name)
    if path is not None:
        return _given(entry, path, progress)
    looked = ""
    for origin, root in _places():
        folder, reason = search(entry, root)
        if folder is not None:
            return Found(folder, origin, sample=is_sample(folder))
        looked += f"\n  {origin}: {reason}"
    if download:
        return _published(entry, progress)
    if entry.name == "fashion-mnist":
        part = "a sample of it: 11,000 + 2,000 of its 70,000 images, whose accuracies compare with no published ones"
        warnings.warn(
            f"fashion-mnist is {part}. Looked in:{looked}\n{_ways_out(entry)}", Notice, stacklevel=2
        )
        return Found(SAMPLE, "sample", sample=True)
    raise FileNotFoundError(f"{entry.name} was not found:{looked}\n{_ways_out(entry)}")


def forget(found: Found) -> None:
    """Remove what a folder's URL delivered, so that the next call fetches it again; other places are left alone."""
    home = _cache()
    if home is not None and found.folder.parent == home / "urls":
        shutil.rmtree(found.folder, ignore_errors=True)


def cache() -> Path:
    """$HALFSTEP_CACHE, else $XDG_CACHE_HOME/halfstep, else ~/.cache/halfstep."""
    if (home := _cache()) is None:
        raise ValueError(
            "expected a home folder for the cache, this user has none. Set HALFSTEP_CACHE to a folder."
        )
    return home


def _cache() -> Path | None:
    if given := os.environ.get("HALFSTEP_CACHE"):
        return Path(given).expanduser().absolute()
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # the XDG standard: a relative one counts as unset
        home = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "halfstep" if os.path.isabs(home) else None


def _places() -> Iterator[tuple[str, Path]]:
    if given := os.environ.get("HALFSTEP_DATA"):
        root = Path(given).expanduser()
        if not os.path.isdir(root):
            raise NotADirectoryError(
                f"expected a folder in HALFSTEP_DATA, got {given!r}. Correct it or unset it."
            )
        yield "HALFSTEP_DATA", root
    if (home := _cache()) is not None:
        yield "cache", home
    yield "debian", DEBIAN


def _given(entry: Entry, path: str | Path, progress: bool | None) -> Found:
    if not str(path):
        raise ValueError(
            "path: expected a folder, an archive or a URL, got ''. None looks in the usual places."
        )
    if not isinstance(path, str) or "://" not in path:
        return _local(entry, Path(path).expanduser(), str(path), None)
    parts = urlsplit(path)
    if parts.scheme in ("http", "https"):
        return _remote(entry, path, progress)
    if parts.scheme != "file" or parts.netloc not in ("", "localhost"):
        raise ValueError(
            f"expected a path or a URL of http, https or file on this machine, got {path!r}"
        )
    local = Path(url2pathname(parts.path))
    return _local(entry, local, path, _pin(path, archive=not os.path.isdir(local)))


def _local(entry: Entry, path: Path, given: str, pin: Checksum | None) -> Found:
    if os.path.isfile(path):
        return _unpacked(entry, path, "path", given, pin)
    if not os.path.isdir(path):
        raise FileNotFoundError(
            f"path={given!r}: expected a folder, an archive or a URL, found nothing there."
        )
    return _sure(entry, path, "path", given)


def _sure(entry: Entry, root: Path, origin: str, given: str, *, deep: bool = False) -> Found:
    folder, reason = search(entry, root, deep=deep)
    if folder is None:
        files = f"{', '.join(entry.files)}{' (each plain or .gz)' if entry.kind == 'idx' else ''}"
        raise FileNotFoundError(
            f"path={given!r}: expected the files of {entry.name}, {reason}. They are: {files}."
        )
    return Found(folder, origin, sample=is_sample(folder))


def _unpacked(entry: Entry, archive: Path, origin: str, given: str, pin: Checksum | None) -> Found:
    """Kept in the cache by the archive's sha256, so that a changed archive is unpacked anew."""
    digest = Checksum.of(archive).hex
    if pin and (came := Checksum.of(archive, pin.algorithm)) != pin:
        raise ValueError(
            f"path={given!r}: expected that {pin.algorithm}, {archive} has {came.hex}. Correct one of them."
        )
    root = cache() / "unpacked" / digest
    if not root.is_dir():
        with suppress(FileExistsError):  # another process was quicker, with the same bytes
            unpack(archive, root)
    return _sure(
        entry, root, f"{origin}#sha256={digest}" if origin != "path" else origin, given, deep=True
    )


def _remote(entry: Entry, url: str, progress: bool | None) -> Found:
    parts = urlsplit(url)
    is_archive = bool(parts.query or _ARCHIVE.search(parts.path))
    pin = _pin(url, archive=is_archive)
    address, home = (
        parts._replace(fragment="").geturl(),
        cache() / "urls" / hashlib.sha256(url.encode()).hexdigest(),
    )
    if not is_archive:
        return _remote_folder(entry, address, home, progress)
    archive = home / (
        re.sub(r"[^\w.-]", "_", unquote(parts.path).rsplit("/", 1)[-1])[-100:].lstrip(".")
        or "archive"
    )
    if not archive.is_file():
        fetch(address, archive, checksum=pin, progress=progress)
    try:
        return _unpacked(entry, archive, address, url, pin)
    except (ValueError, FileNotFoundError):
        archive.unlink(
            missing_ok=True
        )  # the next call fetches it again: the publisher may have mended it
        raise


def _remote_folder(entry: Entry, address: str, home: Path, progress: bool | None) -> Found:
    for name in entry.files:
        if file_of(entry, home, name) is not None:
            continue
        each = f"{address.rstrip('/')}/{name}"
        try:
            suffix = ".gz" if entry.kind == "idx" else ""
            fetch(each + suffix, home / (name + suffix), progress=progress)
        except OSError as error:
            if entry.kind != "idx" or error.errno is not None:  # a numbered one is this machine's
                raise
            fetch(each, home / name, progress=progress)
    return _sure(entry, home, address, address)


def _published(entry: Entry, progress: bool | None) -> Found:
    """From the publisher into the cache; a file that lies there whole is not fetched again."""
    home, origin = cache() / entry.name, "cache"
    for source in entry.sources:
        target = (home if entry.kind == "idx" else cache() / "downloads") / source.file
        if (
            not target.is_file()
            or Checksum.of(target, source.checksum.algorithm) != source.checksum
        ):
            got = fetch(source.urls, target, checksum=source.checksum, progress=progress)
            origin = got.url.removesuffix(source.file)
        if entry.kind == "cifar":
            with suppress(
                FileExistsError, FileNotFoundError
            ):  # another process was quicker, and has cleared up
                unpack(target, home)
            target.unlink(missing_ok=True)
    folder, reason = search(entry, home, deep=True)
    if folder is None:
        raise FileNotFoundError(
            f"{entry.name} was fetched, but {reason}. Remove {home} and try again."
        )
    return Found(folder, origin)


def _pin(url: str, *, archive: bool) -> Checksum | None:
    """The checksum in a URL's fragment, as pip writes it."""
    fragment = urlsplit(url).fragment
    algorithm, _, digits = fragment.partition("=")
    if fragment and algorithm not in ("md5", "sha256"):
        raise ValueError(
            f"path={url!r}: expected #sha256=... or #md5=... after the address, got #{fragment}"
        )
    if fragment and not archive:
        raise ValueError(
            f"path={url!r}: a checksum pins an archive, this is a folder. Leave out #{fragment}"
        )
    return Checksum("md5" if algorithm == "md5" else "sha256", digits.lower()) if fragment else None


def _ways_out(entry: Entry) -> str:
    ways = f"Set HALFSTEP_DATA to a folder that holds {entry.name}, pass path= (a folder, an archive or a URL), "
    debian = f" On Debian and Ubuntu: apt-get install {entry.package}." if entry.package else ""
    return f"{ways}or allow download=True.{debian}"
