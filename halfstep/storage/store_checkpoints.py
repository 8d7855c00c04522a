"""The checkpoints of a run in a store, and which of them count.

    attempts/0000002.json                       one per fit, created exclusively: who writes now
    step-000000120/5c0f…-tensors.safetensors    named by content: never overwritten by other bytes
    step-000000120/manifest-0001.json           created exclusively, last: the checkpoint is there
    log.jsonl, weights.safetensors, …           the other files of the run, for people

A manifest names every file of its checkpoint, and the logs up to it, with size and SHA-256. Without
it, what was uploaded is invisible.

Several attempts may be alive: a machine that nobody hears of may still train. The record of an
attempt says from which step it went on. So checkpoints that an older attempt writes beyond that
step do not count, whenever they arrive.
"""

import hashlib
import json
import os
import re
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from halfstep.checkpoint.disk import write_file
from halfstep.checkpoint.health import Health, decode_health, read_health
from halfstep.checkpoint.manifest import (
    MANIFEST_FILE,
    MAX_FILE_BYTES,
    MAX_MANIFEST_BYTES,
    SHA256_HEX,
    FileEntry,
    is_file_name,
)
from halfstep.checkpoint.runs import (
    REPLACEMENT_SUFFIX,
    choose_superfluous,
    finish_replacements,
    name_of,
    step_of,
)
from halfstep.checkpoint.store import read_manifest, verify
from halfstep.errors import DAMAGED_ADVICE, CheckpointError, checkpoint_error
from halfstep.storage.store_access import Store, StoredObject, hash_bytes, hash_file
from halfstep.utils.atomic_files import atomic_file, atomic_folder

FORMAT = "halfstep checkpoint in a store"
ATTEMPT_FORMAT = "halfstep attempt"
VERSION = 1

ATTEMPTS_FOLDER = "attempts"
ATTEMPT_NAME = re.compile(rf"{ATTEMPTS_FOLDER}/([0-9]{{7,}})\.json")
MANIFEST_NAME = re.compile(r"(step-[0-9]{9,})/manifest-([0-9]{4,})\.json")
STEP_FOLDER = re.compile(r"(step-[0-9]{9,})/.*")

FROM_THE_BEGINNING = -1  # the step that a run goes on from which goes on from none

SHA256_CHARS_IN_NAMES = 16


class CutOffManifestError(CheckpointError):
    """A manifest whose writer was killed, in a store that shows what was written in part."""


class OlderAttemptError(RuntimeError):
    """A newer attempt of the run writes to the store, so this one may not."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint by its manifest in the store."""

    step: int
    number: int
    """Of the manifests of one step, from 1. A checkpoint that replaces another has the next."""
    attempt: int
    files: dict[str, FileEntry]
    logs: dict[str, FileEntry]
    """The logs of the run as long as they were, by their paths in the folder of the run."""
    health: Health

    @property
    def name(self) -> str:
        return name_of(self.step)

    @property
    def manifest_name(self) -> str:
        return f"{self.name}/manifest-{self.number:04d}.json"

    def object_name(self, file: str) -> str:
        """The object that holds a file or a log."""
        entry = self.files[file] if file in self.files else self.logs[file]
        return object_name(self.name, file, entry)

    @property
    def objects(self) -> dict[str, FileEntry]:
        """Every object that the checkpoint needs."""
        entries = {**self.logs, **self.files}
        return {self.object_name(file): entry for file, entry in entries.items()}

    @property
    def content(self) -> str:
        """The checksum of the local manifest: equal for equal checkpoints."""
        return self.files[MANIFEST_FILE].sha256


def object_name(folder: str, file: str, entry: FileEntry) -> str:
    """The name of an object: by its content, so that equal names have equal bytes."""
    base_name = file.rpartition("/")[2]
    return f"{folder}/{entry.sha256[:SHA256_CHARS_IN_NAMES]}-{base_name}"


@dataclass
class StoreIndex:
    """What one look at a store has shown."""

    objects: dict[str, StoredObject] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    """By the number of each attempt, the step that it went on from."""
    checkpoints: list[StoredCheckpoint] = field(default_factory=list)
    """Those that count, the oldest first."""
    abandoned: list[StoredCheckpoint] = field(default_factory=list)
    """Those of older attempts, beyond the step that a newer one went on from."""
    broken: dict[str, str] = field(default_factory=dict)
    """Manifests that cannot be read, and why."""
    cut_off: set[str] = field(default_factory=set)
    """Those of them that were never written to the end, as far as one can see."""

    @property
    def newest_attempt(self) -> int:
        return max(self.attempts, default=0)

    def counts(self, step: int, attempt: int) -> bool:
        """Whether a checkpoint of this step and attempt belongs to what the newest goes on from."""
        return all(step <= start for number, start in self.attempts.items() if number > attempt)


class IndexReader:
    """Looks at a store again and again, and reads only what is new to it."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._known: dict[tuple[str, StoredObject], Any] = {}

    def read(self) -> StoreIndex:
        """The store as it is now."""
        index = StoreIndex(objects=self.store.list())
        index.attempts = self.read_attempts(index.objects)
        for name, listed in index.objects.items():
            match = MANIFEST_NAME.fullmatch(name)
            if match is None:
                continue
            try:
                stored = self._parse(name, listed)
            except CheckpointError as error:
                index.broken[name] = str(error)
                if isinstance(error, CutOffManifestError):
                    index.cut_off.add(name)
                continue
            except FileNotFoundError:  # another attempt removed it meanwhile
                continue
            counts = index.counts(stored.step, stored.attempt)
            (index.checkpoints if counts else index.abandoned).append(stored)
        index.checkpoints.sort(key=lambda stored: (stored.step, stored.number))
        return index

    def read_attempts(self, objects: Mapping[str, StoredObject] | None = None) -> dict[int, int]:
        """By the number of each attempt, the step that it went on from."""
        if objects is None:
            objects = self.store.list(ATTEMPTS_FOLDER)
        attempts = {}
        for name, listed in objects.items():
            match = ATTEMPT_NAME.fullmatch(name)
            if match is None:
                continue
            key = (name, listed)
            if key not in self._known:
                self._known[key] = _parse_attempt(self.store.read(name))
            if self._known[key] is not None:
                attempts[int(match[1])] = self._known[key]
        return attempts

    def _parse(self, name: str, listed: StoredObject) -> StoredCheckpoint:
        key = (name, listed)
        if key not in self._known:
            path = f"{self.store.url}/{name}"
            if listed.size > MAX_MANIFEST_BYTES:
                raise checkpoint_error(
                    path, f"at most {MAX_MANIFEST_BYTES} bytes", str(listed.size), DAMAGED_ADVICE
                )
            self._known[key] = parse_stored_manifest(path, name, self.store.read(name))
        stored: StoredCheckpoint = self._known[key]
        return stored


# Writing.


def claim_attempt(reader: IndexReader, resumed_step: int) -> int:
    """Makes this process the newest attempt of the run, and returns its number."""
    number = max(reader.read_attempts(), default=0) + 1
    while True:
        content = {
            "format": ATTEMPT_FORMAT,
            "version": VERSION,
            "attempt": number,
            "resumed_step": resumed_step,
            "began": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "process": f"{os.getpid()} on {os.uname().nodename}",
            "token": os.urandom(8).hex(),
        }
        if reader.store.create(f"{ATTEMPTS_FOLDER}/{number:07d}.json", _seal(content)):
            return number
        number += 1


def commit_checkpoint(
    reader: IndexReader, attempt: int, path: Path, logs: Mapping[str, bytes]
) -> StoredCheckpoint:
    """Uploads a checkpoint and the logs up to it, and creates its manifest when all is verified.

    OlderAttemptError if a newer attempt has begun.
    """
    store = reader.store
    name = path.name
    files = dict(read_manifest(path).files)
    files[MANIFEST_FILE] = hash_file(path / MANIFEST_FILE)
    health = read_health(path)
    for file, entry in files.items():
        store.upload(path / file, object_name(name, file, entry), entry)

    log_entries = {log: hash_bytes(content) for log, content in logs.items()}
    for log, entry in log_entries.items():
        store.upload(logs[log], object_name(name, log, entry), entry)

    number = 1 + _highest_number(store, name)
    while True:
        check_newest_attempt(reader, attempt)
        stored = StoredCheckpoint(step_of(path), number, attempt, files, log_entries, health)
        if store.create(stored.manifest_name, encode_stored_manifest(stored)):
            return stored
        number += 1  # another attempt was faster, or a process was killed while it wrote


def check_newest_attempt(reader: IndexReader, attempt: int) -> None:
    """OlderAttemptError if another process has begun to go on with the run."""
    newest = max(reader.read_attempts(), default=0)
    if newest > attempt:
        raise OlderAttemptError(
            f"attempt {newest} of this run writes to {reader.store.url}, this one is attempt "
            f"{attempt}: it uploads nothing more"
        )


def _highest_number(store: Store, folder: str) -> int:
    matches = [MANIFEST_NAME.fullmatch(name) for name in store.list(folder)]
    return max((int(match[2]) for match in matches if match is not None), default=0)


# Reading.


def fetch_checkpoint(store: Store, stored: StoredCheckpoint, root: Path) -> Path:
    """Downloads a checkpoint into a folder of checkpoints. CheckpointError if it is not whole.

    It appears whole or not at all, and replaces one of the same step when it was verified.
    """
    path = root / stored.name
    target = path
    finish_replacements(root)
    if path.exists():
        target = path.with_name(f"{path.name}{REPLACEMENT_SUFFIX}")
    with atomic_folder(target) as temporary:
        for file, entry in stored.files.items():
            _download(store, stored.object_name(file), entry, temporary / file)
        verify(temporary)
    finish_replacements(root)
    return path


def fetch_logs(store: Store, stored: StoredCheckpoint, root: Path) -> None:
    """Downloads the logs up to a checkpoint, in place of those that are there."""
    for log, entry in stored.logs.items():
        with atomic_file(root / log) as file:
            digest = hashlib.sha256()
            for chunk in _read_object(store, stored.object_name(log), entry):
                digest.update(chunk)
                file.write(chunk)
            _check_hash(store, stored.object_name(log), entry, digest.hexdigest())


def _download(store: Store, name: str, entry: FileEntry, path: Path) -> None:
    written = write_file(path, _read_object(store, name, entry))
    _check_hash(store, name, entry, written.sha256)


def _read_object(store: Store, name: str, entry: FileEntry) -> Iterable[bytes]:
    try:
        yield from store.read_chunks(name, entry.size)
    except FileNotFoundError as error:
        raise CheckpointError(f"{error}. {DAMAGED_ADVICE}") from None


def _check_hash(store: Store, name: str, entry: FileEntry, sha256: str) -> None:
    if sha256 != entry.sha256:
        raise checkpoint_error(
            f"{store.url}/{name}",
            f"sha256 {entry.sha256[:16]}…",
            f"{sha256[:16]}…",
            DAMAGED_ADVICE,
        )


# Removing.


def prune_store(
    reader: IndexReader, attempt: int, keep: int, protect_steps: Collection[int]
) -> list[str]:
    """Removes all checkpoints but the newest `keep` good ones, as `checkpoint.prune` does.

    Each of those that stay was verified before its manifest was created; that their objects are
    there still is looked up. What no manifest names goes too, and what no longer counts.
    """
    index = reader.read()
    newest = newest_of_each_step(index.checkpoints)
    superfluous = choose_superfluous(
        newest, keep, lambda stored, _: stored.health if is_whole(index, stored) else None
    )
    going = {stored.step for stored in superfluous if stored.step not in protect_steps}
    staying = [stored for stored in newest if stored.step not in going]
    if not any(is_whole(index, stored) for stored in staying):
        return []

    # What a manifest that cannot be read belongs to may be whole: it goes when it is the oldest.
    needed = {name for stored in staying for name in (stored.manifest_name, *stored.objects)}
    spared = {name.partition("/")[0] for name in index.broken}
    spared = {folder for folder in spared if step_of(folder) >= staying[0].step}
    unneeded = []
    for name in index.objects:
        match = STEP_FOLDER.match(name)
        if match is not None and match[1] not in spared and name not in needed:
            unneeded.append(name)

    # Manifests first: from then on the checkpoint is invisible.
    unneeded.sort(key=lambda name: MANIFEST_NAME.fullmatch(name) is None)
    check_newest_attempt(reader, attempt)
    reader.store.remove(unneeded)
    return unneeded


def newest_of_each_step(checkpoints: Iterable[StoredCheckpoint]) -> list[StoredCheckpoint]:
    """Of several manifests of a step the last one, in the order of the steps."""
    return list({stored.step: stored for stored in checkpoints}.values())


def is_whole(index: StoreIndex, stored: StoredCheckpoint) -> bool:
    """Whether every object of a checkpoint is there, of its size."""
    return find_missing_object(index, stored) is None


def find_missing_object(index: StoreIndex, stored: StoredCheckpoint) -> str | None:
    """The first object of a checkpoint that is not there, or has another size, in words."""
    for name, entry in stored.objects.items():
        listed = index.objects.get(name)
        if listed is None:
            return f"{name}: expected {entry.size} bytes, found no such object"
        if listed.size != entry.size:
            return f"{name}: expected {entry.size} bytes, found {listed.size}"
    return None


# The format of manifests and attempts.


def encode_stored_manifest(stored: StoredCheckpoint) -> bytes:
    """The bytes of a manifest."""
    return _seal(
        {
            "format": FORMAT,
            "version": VERSION,
            "attempt": stored.attempt,
            "step": stored.step,
            "files": {name: asdict(entry) for name, entry in stored.files.items()},
            "logs": {name: asdict(entry) for name, entry in stored.logs.items()},
            "health": asdict(stored.health),
        }
    )


def parse_stored_manifest(path: str, name: str, data: bytes) -> StoredCheckpoint:
    """The checkpoint that a manifest describes. CheckpointError unless it is as its seal says."""
    match = MANIFEST_NAME.fullmatch(name)
    assert match is not None
    if not data.endswith(b"}\n"):
        raise CutOffManifestError(
            f"{path}: expected a manifest, found the beginning of one. Its checkpoint was never "
            "there as a whole, or is damaged: use another one."
        )
    content = _unseal(data)
    if content is None or content.get("format") != FORMAT:
        raise checkpoint_error(path, f'"format": "{FORMAT}"', "something else", DAMAGED_ADVICE)
    if content.get("version") != VERSION:
        raise checkpoint_error(
            path,
            f"format version {VERSION}",
            f"version {content.get('version')!r}",
            "Upgrade halfstep: pip install -U halfstep.",
        )
    try:
        files = _parse_entries(content["files"])
        logs = _parse_entries(content["logs"])
        health = decode_health(json.dumps(content["health"]).encode())
        step = step_of(match[1])
        attempt = content["attempt"]
        is_right = content["step"] == step and type(attempt) is int and attempt > 0
        if not is_right or MANIFEST_FILE not in files or any("/" in file for file in files):
            raise ValueError("other entries")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise checkpoint_error(
            path, "a step, an attempt, files and logs", f"{error}", DAMAGED_ADVICE
        ) from error
    return StoredCheckpoint(step, int(match[2]), attempt, files, logs, health)


def _parse_entries(entries: Mapping[str, Any]) -> dict[str, FileEntry]:
    """Files with size and checksum. ValueError for a name that leads out of the run's folder."""
    parsed = {}
    for name, entry in entries.items():
        if not all(is_file_name(part) for part in name.split("/")):
            raise ValueError(f"the file name {name!r}")
        size = entry["size"]
        sha256 = entry["sha256"]
        if type(size) is not int or not 0 <= size < MAX_FILE_BYTES:
            raise ValueError(f"the size {size!r}")
        if not isinstance(sha256, str) or SHA256_HEX.fullmatch(sha256) is None:
            raise ValueError(f"the checksum {sha256!r}")
        parsed[name] = FileEntry(size, sha256)
    return parsed


def _parse_attempt(data: bytes) -> int | None:
    """The step that an attempt went on from; None for what a killed process wrote in part."""
    content = _unseal(data)
    if content is None or content.get("format") != ATTEMPT_FORMAT:
        return None
    step = content.get("resumed_step")
    return step if isinstance(step, int) else None


def _seal(content: Mapping[str, Any]) -> bytes:
    """JSON with its own checksum at the end."""
    seal = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    return json.dumps({**content, "seal": seal}, indent=1).encode() + b"\n"


def _unseal(data: bytes) -> dict[str, Any] | None:
    """The content that was sealed; None if it is cut or altered."""
    try:
        content = json.loads(data)
        seal = content.pop("seal")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
    is_same = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest() == seal
    return content if is_same else None
