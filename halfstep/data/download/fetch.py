"""Fetches one file over http(s).

It is checked while it streams, and gets its final name only when it is complete.
"""

import hashlib
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO, BinaryIO
from urllib.parse import urlsplit

from halfstep.data.download.byte_progress import byte_progress
from halfstep.data.download.catalog import Checksum
from halfstep.utils.atomic_files import atomic_file

CHUNK_BYTES = 1 << 16
PROVING_ALGORITHM = "sha256"  # nobody can make another file of the same sha256
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class FetchedFile:
    """A complete file and where it came from.

    `sha256` can pin an address that has no published checksum.
    """

    path: Path
    url: str
    sha256: str
    size: int


class MirrorError(Exception):
    """What went wrong with one mirror; the next may do better."""


def fetch_file(
    urls: str | Sequence[str],
    target: str | Path,
    *,
    checksum: Checksum | None = None,
    limit_bytes: int = 4 << 30,
    timeout_s: float = 30.0,
    progress: bool | None = None,
) -> FetchedFile:
    """Fetches `target` from the first of `urls` that gives a complete file.

    If none does, an OSError lists the failure of each. A file that is already there is replaced in
    one step, and only by a complete one. `timeout_s` is the longest silence, not the longest
    download. A progress bar is drawn on a terminal unless `progress` is False.

    Over http anybody on the way can change the file, and md5 does not show it: such an address
    needs a sha256. Addresses of this machine need none.
    """
    mirrors = [urls] if isinstance(urls, str) else list(urls)
    _check_urls(mirrors, checksum)
    proves_content = checksum is not None and checksum.algorithm == PROVING_ALGORITHM
    target = Path(target)
    failures = []
    for url in mirrors:
        try:
            with (
                _open_url(url, timeout_s, allow_downgrade=proves_content) as response,
                _write_target(target) as file,
            ):
                size, sha256 = _save_response(
                    response,
                    file,
                    checksum=checksum,
                    limit_bytes=limit_bytes,
                    timeout_s=timeout_s,
                    title=target.name,
                    progress=progress,
                )
            return FetchedFile(target, url, sha256, size)
        except MirrorError as failure:
            failures.append(f"\n  {url}: {failure}")
    raise OSError(
        f"{target.name} could not be fetched:{''.join(failures)}\n"
        "Check the connection and the address, "
        f"or fetch the file by other means and put it at {target}."
    )


def _check_urls(urls: list[str], checksum: Checksum | None) -> None:
    if not urls:
        raise ValueError("expected at least one address to download from, got none")
    for url in urls:
        if not (isinstance(url, str) and _is_web_address(url)):
            raise ValueError(f"expected an address like https://host/file, got {url!r}")
        if checksum is not None and checksum.algorithm != PROVING_ALGORITHM and is_open(url):
            raise ValueError(
                f"expected https, or a sha256, got {url} with an {checksum.algorithm}: over http "
                "anybody on the way can change a file and keep its md5. Write https://, or "
                "#sha256=… after the address."
            )


def is_open(url: str) -> bool:
    """Whether anybody on the way can change what the address delivers: http to other machines."""
    parts = urlsplit(url)
    return parts.scheme == "http" and parts.hostname not in LOCAL_HOSTS


def _is_web_address(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


class _WebRedirects(urllib.request.HTTPRedirectHandler):
    """Redirects stay on http and https: urllib itself would also follow one to ftp.

    From https they stay on https, unless the file has a sha256 (`allow_downgrade`).
    """

    def __init__(self, *, allow_downgrade: bool) -> None:
        self.allow_downgrade = allow_downgrade

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme not in ("http", "https"):
            fp.close()
            raise MirrorError(f"redirected to {newurl}, expected an http or https address")
        was_private = urlsplit(req.full_url).scheme == "https"
        if was_private and is_open(newurl) and not self.allow_downgrade:
            fp.close()
            raise MirrorError(f"redirected from https to {newurl}, expected https or a sha256")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextmanager
def _open_url(url: str, timeout_s: float, *, allow_downgrade: bool) -> Iterator[HTTPResponse]:
    # identity: the bytes as they were published, which checksums and lengths are about.
    headers = {"Accept-Encoding": "identity", "User-Agent": "halfstep"}
    request = urllib.request.Request(url, headers=headers)
    with _as_mirror_errors(timeout_s):
        opener = urllib.request.build_opener(_WebRedirects(allow_downgrade=allow_downgrade))
        response = opener.open(request, timeout=timeout_s)
    with response:
        yield response


@contextmanager
def _as_mirror_errors(timeout_s: float) -> Iterator[None]:
    """Turns every way in which the other side can fail into a MirrorError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        raise MirrorError(f"the server answered {error.code} {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            raise MirrorError(f"no answer for {timeout_s:g} s") from error
        raise MirrorError(f"the connection failed ({reason or type(error).__name__})") from error


def _save_response(
    response: HTTPResponse,
    file: BinaryIO,
    *,
    checksum: Checksum | None,
    limit_bytes: int,
    timeout_s: float,
    title: str,
    progress: bool | None,
) -> tuple[int, str]:
    """Writes the body of a response to a file; returns its size and its sha256.

    A MirrorError if it is too long, shorter than the server said, or has another checksum.
    """
    declared_size = response.length  # None if the server does not say
    if declared_size is not None and declared_size > limit_bytes:
        raise MirrorError(
            f"the file has {declared_size} bytes, more than limit_bytes={limit_bytes}"
        )

    size = 0
    sha256 = hashlib.sha256()
    hasher = None if checksum is None else checksum.hasher()
    with byte_progress(title, declared_size, progress) as show:
        for chunk in _read_chunks(response, timeout_s):
            size += len(chunk)
            if size > limit_bytes:
                raise MirrorError(f"the file is larger than limit_bytes={limit_bytes}")
            file.write(chunk)
            sha256.update(chunk)
            if hasher is not None:
                hasher.update(chunk)
            show(size)

    if declared_size is not None and size != declared_size:
        raise MirrorError(f"expected {declared_size} bytes, the connection ended after {size}")
    if checksum is not None and hasher is not None and hasher.hexdigest() != checksum.hex:
        raise MirrorError(
            f"expected {checksum.algorithm} {checksum.hex}, "
            f"got {hasher.hexdigest()} of {size} bytes"
        )
    return size, sha256.hexdigest()


def _read_chunks(response: HTTPResponse, timeout_s: float) -> Iterator[bytes]:
    """The body piece by piece; the last piece is empty."""
    chunk = b"more"
    while chunk:
        with _as_mirror_errors(timeout_s):
            # read1 returns what is there: the bar moves, and one timeout ends a silence.
            chunk = response.read1(CHUNK_BYTES)
        yield chunk


@contextmanager
def _write_target(target: Path) -> Iterator[BinaryIO]:
    """The file to write. It gets its name at the end of the block.

    An OSError inside is this machine's, not the server's; it is raised with advice.
    """
    try:
        with atomic_file(target) as file:
            yield file
    except OSError as error:
        raise OSError(
            error.errno,
            f"{target} cannot be written: {error.strerror or error}. "
            "Free space there, make the folder writable, "
            "or name another (find() writes to $HALFSTEP_CACHE)",
        ) from error
