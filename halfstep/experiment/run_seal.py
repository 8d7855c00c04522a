"""Which values of a run.json may be used: its code, its folders and its addresses.

A run folder may come from anywhere. Commands import, open or fetch what its run.json names only if
this user has written these settings in this folder, which a seal proves, or is asked to trust it.
The seal is a keyed hash; the key is a file that only this user can read.

torch is imported inside functions only: the command line imports this module for its help.
"""

import hashlib
import hmac
import json
import os
import secrets
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from halfstep.utils.files import strict_json_value

KEY_FILE = "run-key"
KEY_BYTES = 32

Settings = Mapping[str, Any]


def make_seal(settings: Settings) -> str | None:
    """The seal of settings that are used in the current folder; None where no key can be kept.

    The folder belongs to it: modules and relative paths are looked up there.
    """
    key = _read_key() or _create_key()
    return None if key is None else _keyed_hash(key, settings)


def is_sealed(settings: Settings, seal: object) -> bool:
    """Whether this user has sealed these settings, and in the current folder."""
    key = _read_key()
    if key is None or not isinstance(seal, str):
        return False
    expected = _keyed_hash(key, settings)
    return hmac.compare_digest(expected.encode(), seal.encode(errors="replace"))


def reasons_to_distrust(settings: Settings, replaced: Collection[str] = ()) -> dict[str, str]:
    """For each setting that names code, a file or an address: what halfstep would do with it.

    Networks and data sets that halfstep knows by name, and numbers, are not among them, nor are
    settings that the command line has `replaced`.
    """
    from halfstep import nets
    from halfstep.data.download.catalog import CATALOG

    # A builder makes its own network and data: the other settings have no effect.
    if settings["build"] is not None:
        return {"build": f"import and call {settings['build']!r}"}

    reasons = {}
    net = settings["net"]
    data = settings["data"]
    path = settings["path"]
    if net not in nets.names():
        reasons["net"] = f"import and call {net!r}"
    if data != "sample" and data not in CATALOG:
        reasons["data"] = f"{_verb_for_data(data)} {data!r}"
    if path is not None:
        verb = "fetch" if "://" in path else "open"
        reasons["path"] = f"{verb} {path!r}"
    return {name: reason for name, reason in reasons.items() if name not in replaced}


def _verb_for_data(data: str) -> str:
    if data.startswith("csv:"):
        return "fetch the table" if "://" in data else "open the table"
    if "://" in data:
        return "fetch"
    return "import and call" if ":" in data else "open the folder"


def untrusted_error(command: str, path: Path, reasons: Mapping[str, str]) -> ValueError:
    """The error for settings that are not used, with the way to use them."""
    by_hand = "".join(
        f", or name it yourself: --{name}" for name in ("build", "net") if name in reasons
    )
    return ValueError(
        f"{command}: expected a run that you trained in this folder. {path} is not known to be "
        f"one, and by it halfstep would {'; '.join(reasons.values())}. "
        f"If you trust it: --trust{by_hand}"
    )


def _keyed_hash(key: bytes, settings: Settings) -> str:
    content = {"folder": os.getcwd(), "settings": strict_json_value(settings)}
    text = json.dumps(content, sort_keys=True)
    return hmac.new(key, text.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()


def _key_path() -> Path | None:
    """$XDG_STATE_HOME/halfstep/run-key, else in ~/.local/state; None for a user without a home."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(state):  # by the XDG standard, a relative one counts as unset
        state = os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(state) / "halfstep" / KEY_FILE if os.path.isabs(state) else None


def _read_key() -> bytes | None:
    """The key of this user; None where there is none that only this user can read."""
    path = _key_path()
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            key = file.read(KEY_BYTES + 1)
    except OSError:
        return None
    is_own = status.st_uid == os.geteuid()
    is_private = not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return key if is_own and is_private and len(key) == KEY_BYTES else None


def _create_key() -> bytes | None:
    """A new key; the key of another process if that was quicker; None where it cannot be kept."""
    path = _key_path()
    if path is None:
        return None
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(KEY_BYTES))
            file.flush()
            os.fsync(file.fileno())
        # The name appears with the complete file, and never replaces a key.
        with suppress(FileExistsError):
            os.link(temporary, path)
    except OSError:
        return None
    finally:
        with suppress(OSError):
            temporary.unlink()
    return _read_key()
