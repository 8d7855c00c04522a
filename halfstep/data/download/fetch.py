"""Fetch one file over http(s): checked while it streams, and under its final name only when it is whole."""

import glob
import hashlib
import os
import secrets
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from halfstep.data.download.catalog import Checksum

_CHUNK = 1 << 16
_ABANDONED_S = (
    24 * 3600
)  # no work in progress is this old; a killed process cannot clean up after itself


@dataclass(frozen=True)
class Fetched:
    """A whole file and where it came from; pin an address without a known checksum by this `sha256`."""

    path: Path
    url: str
    sha256: str
    size: int


class _Failure(Exception):
    """What went wrong with one mirror; the next may do better."""


def download(
    urls: str | Sequence[str],
    target: str | Path,
    *,
    checksum: Checksum | None = None,
    limit_bytes: int = 4 << 30,
    timeout_s: float = 30.0,
    progress: bool | None = None,
) -> Fetched:
    """The first of `urls` that gives a whole file, at `target`; OSError with every mirror's failure when none does.

    A file already there is replaced, at once and only by a whole one. `timeout_s` is the longest silence, not the
    longest download. A progress bar is drawn on a terminal unless `progress` is False.
    """
    mirrors, target = _checked([urls] if isinstance(urls, str) else list(urls)), Path(target)
    failures = []
    for url in mirrors:
        try:
            with _opened(url, timeout_s) as response, _part(target) as part:
                total, body = _declared(response, limit_bytes), _chunks(response, timeout_s)
                with _bar(target.name, total, progress) as show:
                    size, sha256, digest = _write(body, part, checksum, limit_bytes, show)
                _check(size, total, digest, checksum)
                os.replace(part, target)
                return Fetched(target, url, sha256, size)
        except _Failure as failure:
            failures.append(f"\n  {url}: {failure}")
    raise OSError(
        f"{target.name} could not be fetched:{''.join(failures)}\n"
        f"Check the connection and the address, or fetch the file by other means and put it at {target}."
    )


def unfinished(target: Path) -> Path:
    """A new hidden name beside `target` for work in progress; what killed processes left there a day ago is removed."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.*.part"):
        try:
            if time.time() - path.lstat().st_mtime > _ABANDONED_S:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError:
            continue  # another process was quicker, or it is not ours to remove
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.part")


def _checked(urls: list[str]) -> list[str]:
    if not urls:
        raise ValueError("expected at least one address to download from, got none")
    for url in urls:
        if (
            not isinstance(url, str)
            or urlsplit(url).scheme not in ("http", "https")
            or not urlsplit(url).hostname
        ):
            raise ValueError(f"expected an address like https://host/file, got {url!r}")
    return urls


class _WebOnly(urllib.request.HTTPRedirectHandler):
    """Redirects stay on http and https: urllib itself would also follow one to ftp."""

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
            raise _Failure(f"redirected to {newurl}, expected an http or https address")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextmanager
def _opened(url: str, timeout_s: float) -> Iterator[HTTPResponse]:
    # identity: the bytes as published, which is what checksums and lengths are about
    request = urllib.request.Request(
        url, headers={"Accept-Encoding": "identity", "User-Agent": "halfstep"}
    )
    with _named(timeout_s):
        response = urllib.request.build_opener(_WebOnly).open(request, timeout=timeout_s)
    with response:
        yield response


@contextmanager
def _named(timeout_s: float) -> Iterator[None]:
    """Every way in which the other side can fail, as a _Failure in words."""
    try:
        yield
    except urllib.error.HTTPError as error:
        error.close()
        raise _Failure(f"the server answered {error.code} {error.reason}") from error
    except (OSError, HTTPException, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            raise _Failure(f"no answer for {timeout_s:g} s") from error
        raise _Failure(f"the connection failed ({reason or type(error).__name__})") from error


def _declared(response: HTTPResponse, limit_bytes: int) -> int | None:
    """The length that the server promises, None when it does not."""
    if response.length is not None and response.length > limit_bytes:
        raise _Failure(f"the file has {response.length} bytes, more than limit_bytes={limit_bytes}")
    return response.length


def _chunks(response: HTTPResponse, timeout_s: float) -> Iterator[bytes]:
    chunk = b"more"
    while chunk:
        with _named(timeout_s):
            chunk = response.read1(
                _CHUNK
            )  # read1: a trickle shows, and a silence is heard after one timeout
        yield chunk


def _write(
    body: Iterable[bytes],
    part: Path,
    checksum: Checksum | None,
    limit_bytes: int,
    show: Callable[[int], None],
) -> tuple[int, str, str | None]:
    """The body on disk in `part`: its size, its sha256, and its digest by the checksum's algorithm."""
    size, sha256, asked = 0, hashlib.sha256(), checksum.hasher() if checksum else None
    with open(part, "xb") as file:
        for chunk in body:
            size += len(chunk)
            if size > limit_bytes:
                raise _Failure(f"the file is larger than limit_bytes={limit_bytes}")
            file.write(chunk)
            sha256.update(chunk)
            if asked:
                asked.update(chunk)
            show(size)
        file.flush()
        os.fsync(file.fileno())  # or a power cut could leave the name without the bytes
    return size, sha256.hexdigest(), asked.hexdigest() if asked else None


def _check(size: int, declared: int | None, digest: str | None, checksum: Checksum | None) -> None:
    if declared is not None and size != declared:
        raise _Failure(f"expected {declared} bytes, the connection ended after {size}")
    if checksum and digest != checksum.hex:
        raise _Failure(
            f"expected {checksum.algorithm} {checksum.hex}, got {digest} of {size} bytes"
        )


@contextmanager
def _bar(title: str, total: int | None, progress: bool | None) -> Iterator[Callable[[int], None]]:
    """Shows the bytes so far, on a terminal only."""
    if progress is False or not sys.stderr.isatty():
        yield lambda size: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(escape(title), total=total)
        yield lambda size: bar.update(task, completed=size)


@contextmanager
def _part(target: Path) -> Iterator[Path]:
    """A name for work in progress, gone afterwards; an OSError in here is this machine's, and says what to do."""
    part = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = unfinished(target)
        yield part
    except OSError as error:
        problem = f"{target} cannot be written: {error.strerror or error}"
        advice = "Free space there, make the folder writable, or name another (find() writes to $HALFSTEP_CACHE)"
        raise OSError(error.errno, f"{problem}. {advice}") from error
    finally:
        if part is not None:
            part.unlink(missing_ok=True)
