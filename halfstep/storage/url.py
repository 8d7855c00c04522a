"""Names of places in a store, such as s3://bucket/run, and the file system that reaches them.

Credentials come from the places where the store's own tools look for them: environment variables
and configuration files. A URL holds none, so it can be printed and written down.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

URL_START = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
COLLAPSED_URL = re.compile(r"(s3|s3a|obs|gs|gcs|az|abfs|memory|oci|oss|r2):/[^/]")

# Schemes of file systems without buckets or hosts: the path may begin with a slash.
PLAIN_SCHEMES = {"file", "local", "memory"}

# Schemes that fsspec does not know, of stores that speak the protocol of S3.
S3_COMPATIBLE_SCHEMES = {"obs"}

# What to install for a scheme whose file system is not there.
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "obs": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
}

MASK = "…"
CREDENTIALS_ADVICE = (
    "Settings and credentials belong in the environment or in a file that only you can read: "
    "docs/reference/storage.md"
)

# Names of settings, variables and parameters of a query whose values are secret.
SECRET_NAME = re.compile(
    r"secret|passw|token|signature|credential(?!s_file)|authorization|connection_string"
    r"|access_?key|(^|[_-])(key|sig|sas)$",
    re.IGNORECASE,
)
# "user:password@" and "token@". A password may have a slash in it.
PASSWORD_IN_URL = re.compile(r"(:/{1,3})([^/\s:@'\"]*:[^\s@'\"]+|[^/\s@'\"]+)@")
# Parameters of a query, and those of the header that signs a request.
PARAMETER = re.compile(r"(?<=[?&,\s])([A-Za-z0-9_.-]+)=([^&,\s'\"<>]+)")
ACCESS_KEY_ID = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b")

MAX_READABLE_CHARS = 60
MIN_SECRET_CHARS = 6  # shorter values would hide ordinary words


@dataclass(frozen=True)
class StoreURL:
    """A place in a store, without credentials: `str()` of it may be shown and written down."""

    scheme: str
    path: str
    """Behind the "://", without a slash at the end."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.path}"

    def __truediv__(self, name: str) -> "StoreURL":
        return StoreURL(self.scheme, f"{self.path}/{name}")

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition("/")[2]


def is_store_url(text: str | Path) -> bool:
    """Whether the text names a place in a store, and not a file: it begins with "scheme://".

    A web address does too; it can be read from, and not written to. True also for a Path that was
    made of a URL, which parse_store_url refuses.
    """
    if isinstance(text, Path):
        return COLLAPSED_URL.match(str(text)) is not None
    return URL_START.match(text) is not None


def parse_store_url(text: str | Path, what: str) -> StoreURL:
    """The place that a URL names. `what` is the option or argument, for the error.

    ValueError for a URL with credentials in it, and for one that names no place; the message shows
    no secret.
    """
    if isinstance(text, Path) and COLLAPSED_URL.match(str(text)):
        raise ValueError(
            f"{what}: expected the URL of a store as text, got a Path, which has lost a slash: "
            f"{hide_credentials(str(text))}. Give the text itself."
        )
    text = str(text)
    match = URL_START.match(text)
    shown = hide_credentials(text)
    if match is None:
        raise ValueError(f"{what}: expected a URL such as s3://bucket/run, got {shown}")
    scheme = match[0].removesuffix("://").lower()
    path = text[match.end() :]
    host, colon, after_colon = path.partition("/")[0].partition(":")
    if "@" in host + after_colon or (colon and not after_colon.isdecimal()):
        raise ValueError(
            f"{what}: expected a URL without a user or a password, got one with them, of "
            f"{scheme}://. {CREDENTIALS_ADVICE}"
        )
    if "?" in path or "#" in path:
        shown = re.split("[?#]", shown, maxsplit=1)[0] + f"?{MASK}"
        raise ValueError(
            f"{what}: expected a URL without a query, got {shown}. {CREDENTIALS_ADVICE}"
        )
    if "::" in text:
        raise ValueError(f"{what}: expected one URL, got a chain of them: {shown}")
    path = path.rstrip("/")
    parts = path.split("/")
    if scheme in PLAIN_SCHEMES:
        parts = path.lstrip("/").split("/")
    if {"", ".", ".."} & set(parts):
        raise ValueError(
            f"{what}: expected a place in a store, such as {scheme}://bucket/run, got {shown}"
        )
    return StoreURL(scheme, path)


def open_filesystem(url: StoreURL, what: str) -> "AbstractFileSystem":
    """The file system of a URL, configured by the environment and by fsspec's configuration files.

    It remembers no listings: others write to the store too. Nothing is connected yet.
    """
    import fsspec

    scheme = url.scheme
    settings: Mapping[str, Any] = {}
    if scheme in S3_COMPATIBLE_SCHEMES and scheme not in fsspec.available_protocols():
        settings = fsspec.config.conf.get(scheme, {})
        scheme = "s3"
    try:
        return fsspec.filesystem(
            scheme, **{**settings, "use_listings_cache": False, "skip_instance_cache": True}
        )
    except ImportError as error:
        package = PACKAGES.get(scheme)
        how = f"pip install {package}" if package else f"Install what it needs: {error}"
        raise ImportError(
            f"{what}: expected the package for {url.scheme}:// to be installed. {how}"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"{what}: expected a scheme that fsspec knows, got {url.scheme}:// in {url}. "
            "With s3:// any store that speaks S3 can be named; its address is configured: "
            "docs/reference/storage.md"
        ) from error


def local_name(url: StoreURL) -> str:
    """A name for what belongs to a URL on this machine: readable, and no two URLs have the same."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{url.scheme}-{url.path}")[-MAX_READABLE_CHARS:]
    return f"{readable.strip('-.')}-{hashlib.sha256(str(url).encode()).hexdigest()[:12]}"


def hide_credentials(text: str) -> str:
    """The text of an error or a URL, without passwords, keys, signatures and tokens."""
    text = PASSWORD_IN_URL.sub(rf"\1{MASK}@", text)
    text = PARAMETER.sub(_mask_parameter, text)
    text = ACCESS_KEY_ID.sub(MASK, text)
    for secret in _configured_secrets():
        text = text.replace(secret, MASK)
        text = text.replace(quote(secret, safe=""), MASK)
    return text


def _mask_parameter(match: re.Match[str]) -> str:
    name, value = match.groups()
    return f"{name}={MASK if SECRET_NAME.search(name) else value}"


def _configured_secrets() -> list[str]:
    """The secrets that this process knows of, the longest first, as one may hold another."""
    import fsspec

    secrets: set[str] = set()
    for name, value in os.environ.items():
        if name.startswith(("AWS_", "FSSPEC_")):
            # A variable may hold a whole configuration, as JSON.
            secrets.update(_secrets_in({name.partition("_")[2].lower(): value}))
    for settings in fsspec.config.conf.values():
        secrets.update(_secrets_in(settings))
    return sorted(secrets, key=len, reverse=True)


def _secrets_in(settings: Mapping[str, Any]) -> Iterator[str]:
    """The values of a configuration whose names say that they are secret, at any depth."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _secrets_in(value)
            continue
        is_secret = isinstance(value, str) and SECRET_NAME.search(name) is not None
        if is_secret and len(value) >= MIN_SECRET_CHARS:
            yield value
