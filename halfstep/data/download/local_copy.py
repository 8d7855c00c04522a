"""A path on this machine for whatever a user names as data: a path, or a URL that is copied first.

The copy is in the user's cache, and is used again while the store's listing stays the same.
"""

import hashlib
import os
import re
import shutil
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import url2pathname

from halfstep.data.download.archive import unpack
from halfstep.data.download.catalog import Checksum
from halfstep.data.download.fetch import fetch_file
from halfstep.data.download.find import ARCHIVE_SUFFIX, parse_pin, require_cache, warn_if_open
from halfstep.data.download.store_copy import copy_store
from halfstep.storage.url import is_store_url, parse_store_url
from halfstep.utils.atomic_files import make_folder

WEB_SCHEMES = ("http", "https")
MAX_ARCHIVE_FILES = 20_000_000
# One command asks for the same data at several places; the store is listed once for all of them.
ASK_AGAIN_AFTER_S = 60.0

_lock = threading.Lock()
_recent: dict[tuple[str, str, bool], tuple[float, Path]] = {}


def local_path(
    path: str | Path,
    what: str = "data",
    *,
    unpack_archives: bool = True,
    progress: bool | None = None,
) -> Path:
    """The path itself, or that of a copy of what the URL names: a file, or a folder.

    A folder or a file of a store is copied into the cache; an archive (tar, zip) is unpacked there,
    unless `unpack_archives` is False. A web address must be that of a file. `what` is the argument,
    for messages.
    """
    if not is_store_url(path):
        return Path(path)
    # A Path that was made of a URL has lost a slash, and is refused.
    url = path if isinstance(path, str) else str(parse_store_url(path, what))
    key = (url, str(require_cache()), unpack_archives)
    with _lock:
        checked_time, local = _recent.get(key, (0.0, Path()))
        if checked_time and time.monotonic() - checked_time < ASK_AGAIN_AFTER_S and local.exists():
            return local
        local = _fetch(url, what, progress)
        if unpack_archives and local.is_file() and ARCHIVE_SUFFIX.search(local.name):
            local = _unpacked(local)
        _recent[key] = (time.monotonic(), local)
    return local


def _fetch(url: str, what: str, progress: bool | None) -> Path:
    """The local file or folder of a URL."""
    parts = urlsplit(url)
    scheme = parts.scheme.lower()
    if scheme in WEB_SCHEMES:
        return _fetch_from_web(url, what, progress)
    if scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise ValueError(f"{what}: expected a file:// URL on this machine, got {url!r}")
        local = Path(url2pathname(parts.path))
        if not os.path.lexists(local):
            raise FileNotFoundError(
                f"{what}: expected a file or a folder, found nothing at {local}"
            )
    else:
        place = parse_store_url(url, what)
        local = copy_store(place, require_cache(), what=what, progress=progress).path
    return local


def _fetch_from_web(url: str, what: str, progress: bool | None) -> Path:
    """A file from a web server, which has no list of what is in a folder."""
    parts = urlsplit(url)
    name = re.sub(r"[^\w.-]", "_", unquote(parts.path).rsplit("/", 1)[-1])[-100:].lstrip(".")
    is_archive = bool(ARCHIVE_SUFFIX.search(name))
    if not is_archive and not Path(name).suffix:
        raise ValueError(
            f"{what}: expected the address of a file, such as {parts.scheme}://host/photos.zip, "
            f"got {url!r}: a web server does not say what is in a folder. Pack it, or use a store"
        )
    pin = parse_pin(url, is_archive=True)
    target = require_cache() / "urls" / hashlib.sha256(url.encode()).hexdigest() / name
    if not target.is_file():
        address = parts._replace(fragment="").geturl()
        warn_if_open(address, pin)
        make_folder(target.parent)
        free = shutil.disk_usage(target.parent).free
        fetch_file(address, target, checksum=pin, limit_bytes=free, progress=progress)
    return target


def _unpacked(archive: Path) -> Path:
    """The folder of an unpacked archive, named by its sha256; its only folder, if it holds one."""
    cache = require_cache()
    root = cache / "unpacked" / Checksum.of(archive).hex
    if not root.is_dir():
        make_folder(root.parent)
        free = shutil.disk_usage(root.parent).free
        with suppress(FileExistsError):  # another process was quicker, with the same bytes
            unpack(archive, root, limit_bytes=free, limit_files=MAX_ARCHIVE_FILES)
    inside = [entry for entry in root.iterdir() if not entry.name.startswith(".")]
    if len(inside) == 1 and inside[0].is_dir():
        return inside[0]
    return root
