"""Reads from a store: what is there, and the bytes of an object, again and again until they come.

A store that is busy, a connection that breaks and an answer that is too short are tried again, each
time after a longer pause. What will not change by waiting is an error at once.
"""

import base64
import binascii
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from halfstep.storage.private_random import STORE_PACKAGES, PrivateRandom
from halfstep.storage.url import StoreURL, hide_credentials, open_filesystem
from halfstep.utils.text import printable

MAX_ATTEMPTS = 8
FIRST_ATTEMPTS = 4  # to reach the store at all; its own client tries each several times
FIRST_PAUSE_S = 0.25  # doubled with each attempt: half a minute in all
MAX_PAUSE_S = 16.0

# What an error says about the request, and not about the network or the store's mood.
PERMANENT_ERRORS = (
    FileNotFoundError,
    PermissionError,
    NotADirectoryError,
    IsADirectoryError,
    NotImplementedError,
    ImportError,
    TypeError,
    AttributeError,
    ValueError,
)
# Of botocore, whose classes share no base with these; by name, as it may not be installed.
PERMANENT_NAMES = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "CredentialRetrievalError",
    "ProfileNotFound",
    "ConfigParseError",
    "NoRegionError",
    "UnauthorizedSSOTokenError",
}

# Entries of fsspec's description of a file that change with its content, the best first.
VERSION_KEYS = (
    *("ETag", "etag", "e_tag", "md5Hash", "content_hash", "checksum", "generation"),
    *("mtime", "LastModified", "last_modified", "modified", "updated", "created"),
)
MD5_HEX = re.compile(r"[0-9a-f]{32}")

T = TypeVar("T")


class StoreUnreachable(OSError):
    """A store that did not answer, or not whole, however often it was asked."""


class StoppedReading(Exception):
    """Another thread has failed, so that this one need not go on."""


@dataclass(frozen=True)
class StoreObject:
    """One object of a listing.

    `version` changes with the content: the store's ETag, else a time. It is empty where the store
    says neither.
    """

    name: str
    """Below the listed folder, with "/" between the parts."""
    path: str
    """As the file system names it."""
    size: int
    version: str
    md5: str | None = None
    """Of the content, where the store seems to say so: the ETag of encrypted objects is none."""


class StoreReads:
    """The file system of one URL, for reading. Threads may share it, processes may not."""

    def __init__(self, url: StoreURL, what: str = "data") -> None:
        self.url = url
        self.what = what
        self.filesystem = open_filesystem(url, what)
        self.root = str(self.filesystem._strip_protocol(str(url))).rstrip("/")
        self.stop = threading.Event()
        # What the store's libraries draw must not move the generators of the run.
        self._private_random = PrivateRandom(STORE_PACKAGES)

    def list_objects(self) -> tuple[list[StoreObject], bool]:
        """Every object at the URL, by name, and whether it names a folder and not one object.

        FileNotFoundError where there is none. The names are the store's: nobody has checked them.
        """
        try:
            info = self.retry(
                "look for",
                self.root,
                lambda: self.filesystem.info(self.root),
                max_attempts=FIRST_ATTEMPTS,
            )
        except FileNotFoundError:
            raise self._nothing_there() from None
        if info["type"] == "file":
            return [self._object(self.url.name, self.root, info)], False

        entries = self.retry(
            "list", self.root, lambda: self.filesystem.find(self.root, detail=True)
        )
        objects = []
        for path, entry in entries.items():
            name = self._name_below_root(path)
            # A store without folders may mark one by an empty object.
            is_marker = entry.get("type") == "directory" or name.endswith("/") or not name
            if not is_marker:
                objects.append(self._object(name, path, entry))
        if not objects:
            raise self._nothing_there()
        return sorted(objects, key=lambda item: item.name), True

    def look_again(self, item: StoreObject) -> StoreObject:
        """The object as it is now."""
        self.filesystem.invalidate_cache()
        info = self.retry("look for", item.path, lambda: self.filesystem.info(item.path))
        return self._object(item.name, item.path, info)

    def read(self, item: StoreObject, start: int, end: int) -> bytes:
        """The bytes from `start` to `end`, exactly so many."""

        def read_range() -> bytes:
            content: bytes = self.filesystem.cat_file(item.path, start=start, end=end)
            if len(content) != end - start:
                raise OSError(f"the answer has {len(content):,} bytes of {end - start:,}")
            return content

        return self.retry("read", item.path, read_range)

    def retry(
        self, verb: str, path: str, action: Callable[[], T], *, max_attempts: int = MAX_ATTEMPTS
    ) -> T:
        """What the action returns, called until it succeeds or waiting does not help."""
        pause_s = FIRST_PAUSE_S
        for attempt in range(1, max_attempts + 1):
            if self.stop.is_set():
                raise StoppedReading
            self._private_random.apply()
            try:
                return action()
            except Exception as error:
                if is_permanent(error):
                    raise self._permanent_error(verb, path, error) from None
                if attempt == max_attempts:
                    raise StoreUnreachable(
                        f"{self.what}: could not {verb} {self._shown_path(path)} in {max_attempts} "
                        f"attempts: {describe_error(error)}. Check the connection and the store, "
                        "and start again: what is copied already stays"
                    ) from None
            # Not all clients at the same moment.
            jitter = 0.5 + secrets.randbelow(1000) / 1000
            self.stop.wait(min(pause_s, MAX_PAUSE_S) * jitter)
            pause_s *= 2
        raise AssertionError("the last attempt returns or raises")

    def _name_below_root(self, path: str) -> str:
        prefix = f"{self.root}/"
        if not path.startswith(prefix):
            raise ValueError(
                f"{self.what}: expected objects below {self.url}, and the store lists "
                f"{self._shown_path(path)}. Nothing was copied"
            )
        return path[len(prefix) :]

    def _object(self, name: str, path: str, info: Mapping[str, Any]) -> StoreObject:
        size = info.get("size")
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(
                f"{self.what}: expected the size of {self._shown_path(path)} from the store, "
                f"got {size!r}. Copy the data by its own tools, and name the folder"
            )
        return StoreObject(name, path, size, version_of(info), md5_of(info))

    def _permanent_error(self, verb: str, path: str, error: Exception) -> Exception:
        """The error in our words; a missing object stays a FileNotFoundError."""
        message = f"{self.what}: could not {verb} {self._shown_path(path)}: {describe_error(error)}"
        for kind in (FileNotFoundError, PermissionError, ImportError, ValueError):
            if isinstance(error, kind):
                return kind(message)
        if type(error).__name__ in PERMANENT_NAMES:
            return PermissionError(
                f"{message}. Where credentials belong: docs/reference/storage.md"
            )
        return OSError(message)

    def _nothing_there(self) -> FileNotFoundError:
        return FileNotFoundError(
            f"{self.what}: expected an object or a folder at {self.url}, found nothing there. "
            "Check the name of the bucket and of the folder"
        )

    def _shown_path(self, path: str) -> str:
        return printable(hide_credentials(f"{self.url.scheme}://{path.lstrip('/')}"))


def is_permanent(error: Exception) -> bool:
    """Whether the same request would fail again, however long one waits."""
    if isinstance(error, json.JSONDecodeError):  # an answer that was cut off
        return False
    return isinstance(error, PERMANENT_ERRORS) or type(error).__name__ in PERMANENT_NAMES


def describe_error(error: BaseException) -> str:
    """The error of a file system in one line, without secrets."""
    text = " ".join(str(error).split()) or type(error).__name__
    return printable(hide_credentials(text)).rstrip(".")


def version_of(info: Mapping[str, Any]) -> str:
    """What changes with the content of an object; empty where the store says nothing."""
    for key in VERSION_KEYS:
        value = info.get(key)
        if isinstance(value, datetime):  # a listing may have the same time as a number
            value = value.timestamp()
        if value not in (None, ""):
            text = str(value).strip('"')
            return f"{key}:{text}"
    return ""


def md5_of(info: Mapping[str, Any]) -> str | None:
    """The MD5 of an object, in hex, where the store gives what looks like one."""
    etag = str(info.get("ETag") or info.get("etag") or "").strip('"').lower()
    if MD5_HEX.fullmatch(etag):
        return etag
    packed = info.get("md5Hash")
    if isinstance(packed, str):
        try:
            digest = base64.b64decode(packed, validate=True)
        except binascii.Error:
            return None
        return digest.hex() if len(digest) == 16 else None
    return None


def now() -> str:
    """The time for a manifest."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
