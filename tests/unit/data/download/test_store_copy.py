"""Folders and objects of a store, copied into the cache."""

import errno
import hashlib
import io
import json
import os
import random
import sys
import tarfile
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image

import halfstep as hs
from halfstep.data.download import local_copy, store_copy, store_reads
from halfstep.data.download.local_copy import local_path
from halfstep.data.download.store_copy import copy_store, find_damage
from halfstep.errors import Notice
from halfstep.storage.url import parse_store_url
from tests.support.failing_disk import small_tmpfs
from tests.support.flaky_source import FaultEvery, FlakySource, flaky_source, seeded_bytes

URL = "flaky://bucket/photos"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and no pauses between attempts."""
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store_reads, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(local_copy, "ASK_AGAIN_AFTER_S", 0.0)
    return tmp_path / "cache"


@pytest.fixture
def store() -> Iterator[type[FlakySource]]:
    objects = {
        f"bucket/photos/{kind}/{i}.bin": seeded_bytes(i, 50 + i) for kind in "ab" for i in range(9)
    }
    with flaky_source(
        {**objects, "bucket/photos/empty": b"", "bucket/other": b"not this"}
    ) as store:
        yield store


def copy(url: str = URL, **options: Any) -> store_copy.StoreCopy:
    cache = Path(os.environ["HALFSTEP_CACHE"])
    return copy_store(parse_store_url(url, "data"), cache, progress=False, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def expected(store: type[FlakySource], prefix: str = "bucket/photos/") -> dict[str, bytes]:
    return {
        name.removeprefix(prefix): content
        for name, content in store.objects.items()
        if name.startswith(prefix)
    }


def test_a_folder_is_copied_once(store: type[FlakySource]) -> None:
    first = copy()
    assert contents(first.path) == expected(store)
    assert len(store.requests) == 18  # the empty object needs none
    again = copy()
    assert again == first
    assert len(store.requests) == 18


def test_the_manifest_has_sizes_versions_and_sha256(store: type[FlakySource]) -> None:
    manifest = json.loads((copy().folder / "manifest.json").read_text())
    assert manifest["url"] == URL
    for entry in manifest["objects"]:
        content = store.objects[f"bucket/photos/{entry['name']}"]
        assert entry["size"] == len(content)
        assert entry["sha256"] == hashlib.sha256(content).hexdigest()
        assert entry["version"] == f"ETag:{hashlib.md5(content).hexdigest()}"


def test_an_object_is_a_file(store: type[FlakySource]) -> None:
    path = local_path("flaky://bucket/photos/a/3.bin", progress=False)
    assert path.name == "3.bin"
    assert path.read_bytes() == store.objects["bucket/photos/a/3.bin"]


def test_faults_of_the_store_are_tried_again(
    store: type[FlakySource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of all requests fail: server errors, resets, silence, answers cut in half."""
    monkeypatch.setattr(store_copy, "BLOCK_BYTES", 16)
    fault = FaultEvery(3)
    store.fault = fault
    assert contents(copy().path) == expected(store)
    assert fault.faults >= 30


def test_a_store_that_stays_away_is_an_error_and_leaves_no_copy(
    store: type[FlakySource], cache: Path
) -> None:
    store.fault = FaultEvery(1)
    with pytest.raises(OSError, match=r"data: could not read flaky://bucket/photos/.* in 8 attemp"):
        copy()
    assert list(cache.glob("stores/*/copy-*")) == []


def test_a_killed_copy_reads_only_what_is_missing(
    store: type[FlakySource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails late in a large object: its first part is not read again."""
    monkeypatch.setattr(store_copy, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(store_copy, "JOURNAL_EVERY_BYTES", 1 << 12)
    store.objects["bucket/photos/large"] = seeded_bytes(7, 100_000)

    def fail_late(path: str, start: int, end: int, answer: bytes) -> bytes:
        if path.endswith("large") and start >= 60_000:
            raise PermissionError("no more")
        return answer

    store.fault = fail_late
    with pytest.raises(PermissionError):
        copy()
    store.fault = None
    store.requests.clear()
    assert contents(copy().path) == expected(store)
    read = sum(end - start for path, start, end in store.requests if path.endswith("large"))
    assert 40_000 <= read <= 40_000 + 2 * (1 << 12)


def test_a_damaged_first_part_is_read_again(
    store: type[FlakySource], monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    monkeypatch.setattr(store_copy, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(store_copy, "JOURNAL_EVERY_BYTES", 1 << 12)
    store.objects["bucket/photos/large"] = seeded_bytes(7, 50_000)

    def fail_late(path: str, start: int, end: int, answer: bytes) -> bytes:
        if path.endswith("large") and start >= 30_000:
            raise PermissionError("no more")
        return answer

    store.fault = fail_late
    with pytest.raises(PermissionError):
        copy()
    (partial,) = cache.glob("stores/*/partial/files/large")
    with partial.open("r+b") as file:
        file.seek(100)
        file.write(b"torn")
    store.fault = None
    assert contents(copy().path) == expected(store)


def test_a_change_between_listing_and_reading_is_noticed(store: type[FlakySource]) -> None:
    """The ETag is no MD5 here, so that the content alone does not show it."""
    name = "bucket/photos/a/1.bin"
    store.etags[name] = "first-2"

    def change(path: str, start: int, end: int, answer: bytes) -> bytes:
        store.etags[name] = f"{store.etags[name]}+"
        return answer

    store.fault = change
    with pytest.raises(OSError, match="changes while it is copied"):
        copy()


def test_an_etag_that_is_no_md5_is_accepted(store: type[FlakySource]) -> None:
    """As that of an encrypted object: two copies of the same bytes say so, for all objects."""
    for number, name in enumerate(store.objects):
        store.etags[name] = hashlib.md5(str(number).encode()).hexdigest()
    assert contents(copy().path) == expected(store)


def test_a_flipped_bit_is_read_again(store: type[FlakySource]) -> None:
    flipped = []

    def flip_once(path: str, start: int, end: int, answer: bytes) -> bytes:
        if path.endswith("a/2.bin") and not flipped:
            flipped.append(path)
            return bytes([answer[0] ^ 1]) + answer[1:]
        return answer

    store.fault = flip_once
    assert contents(copy().path) == expected(store)
    assert flipped


@pytest.mark.parametrize(
    "name",
    [
        "../outside",
        "a/../../outside",
        "/etc/passwd",
        "a/\x1b[2Jb",
        "a\\b",
        "C:evil",
        "A/0.BIN",
        "a/0.bin/inside",
        "a//0.bin",
        "x" * 300,
    ],
)
def test_hostile_names_are_refused(name: str, store: type[FlakySource], cache: Path) -> None:
    store.objects[f"bucket/photos/{name}"] = b"hostile"
    with pytest.raises(ValueError, match="is refused") as caught:
        copy()
    assert caught.value.args[0].isprintable()
    assert store.requests == []
    assert not cache.exists() or not any(path.is_file() for path in cache.rglob("*"))


def test_what_lies_outside_of_the_folder_is_refused(
    store: type[FlakySource], monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = {"bucket/photosX/1": {"name": "bucket/photosX/1", "size": 1, "type": "file"}}
    monkeypatch.setattr(FlakySource, "find", lambda self, path, **kwargs: listing)
    with pytest.raises(ValueError, match="the store lists flaky://bucket/photosX/1"):
        copy()


def test_nothing_there(store: type[FlakySource]) -> None:
    with pytest.raises(FileNotFoundError, match="found nothing there"):
        copy("flaky://bucket/nothing")


def test_an_object_that_vanishes_is_an_error_with_its_name(
    store: type[FlakySource], cache: Path
) -> None:
    def vanish(path: str, start: int, end: int, answer: bytes) -> bytes:
        if path.endswith("b/5.bin"):
            raise FileNotFoundError(path)
        return answer

    store.fault = vanish
    with pytest.raises(FileNotFoundError, match=r"flaky://bucket/photos/b/5\.bin"):
        copy()
    assert list(cache.glob("stores/*/copy-*")) == []


def test_a_changed_store_is_copied_anew_and_unchanged_objects_are_not_read(
    store: type[FlakySource],
) -> None:
    first = copy()
    before = contents(first.path)
    store.objects["bucket/photos/a/1.bin"] = b"changed"
    del store.objects["bucket/photos/a/2.bin"]
    store.objects["bucket/photos/c"] = b"new"
    store.requests.clear()
    with pytest.warns(Notice, match="1 new, 1 changed, 1 gone"):
        second = copy()
    assert contents(second.path) == expected(store)
    assert sorted(path for path, _, _ in store.requests) == [
        "bucket/photos/a/1.bin",
        "bucket/photos/c",
    ]
    assert contents(first.path) == before


def test_a_file_becomes_a_folder(store: type[FlakySource]) -> None:
    """And half a copy of the state before is in the way."""
    store.fault = FaultEvery(1)
    store.objects["bucket/photos/empty2"] = b""
    with pytest.raises(OSError, match="attempts"):
        copy()
    store.fault = None
    del store.objects["bucket/photos/empty"]
    store.objects["bucket/photos/empty/inside"] = b"1"
    assert contents(copy().path) == expected(store)


def test_a_damaged_cache_is_copied_again(store: type[FlakySource]) -> None:
    first = copy()
    (first.path / "a" / "4.bin").write_bytes(b"short")
    with pytest.warns(Notice, match="copied again"):
        second = copy()
    assert contents(second.path) == expected(store)


def test_find_damage_reads_every_file(store: type[FlakySource]) -> None:
    first = copy()
    assert find_damage(first) == []
    path = first.path / "a" / "4.bin"
    path.write_bytes(bytes(path.stat().st_size))
    assert find_damage(first) == ["a/4.bin"]


def test_without_the_store_the_copy_is_used(store: type[FlakySource]) -> None:
    first = copy()

    def fail() -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    FlakySource.list_fault = fail
    with pytest.warns(Notice, match="could not look for .* The copy of 20.* is used"):
        assert copy() == first


def test_without_the_store_and_a_copy_it_is_an_error(store: type[FlakySource]) -> None:
    def fail() -> None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    FlakySource.list_fault = fail
    with pytest.raises(OSError, match="could not look for"):
        copy()


def test_too_little_space_is_an_error_before_anything_is_read(
    store: type[FlakySource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.objects["bucket/photos/large"] = bytes(1 << 20)
    with small_tmpfs(tmp_path / "disk", 1 << 19) as disk:
        monkeypatch.setenv("HALFSTEP_CACHE", str(disk))
        with pytest.raises(
            OSError, match=r"needs 1\.001 MiB more, and .* free. Free some space"
        ) as caught:
            copy()
        assert caught.value.errno == errno.ENOSPC
        assert store.requests == []


def test_a_disk_that_fills_up_meanwhile(
    store: type[FlakySource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program takes the space; when it is free again, the copy goes on."""
    monkeypatch.setattr(store_copy, "BLOCK_BYTES", 1 << 14)
    store.objects["bucket/photos/large"] = seeded_bytes(1, 600_000)
    with small_tmpfs(tmp_path / "disk", 1 << 20) as disk:
        monkeypatch.setenv("HALFSTEP_CACHE", str(disk))
        filler = disk / "filler"

        def fill(path: str, start: int, end: int, answer: bytes) -> bytes:
            if start > 100_000 and not filler.exists():
                filler.write_bytes(bytes(500_000))
            return answer

        store.fault = fill
        with pytest.raises(OSError, match=r"cannot be copied to .*Free some space") as caught:
            copy()
        assert caught.value.errno == errno.ENOSPC
        assert list(disk.glob("stores/*/copy-*")) == []
        store.fault = None
        filler.unlink()
        assert contents(copy().path) == expected(store)


def test_secrets_are_not_in_errors(
    store: type[FlakySource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI-K7MDENG")

    def leak(path: str, start: int, end: int, answer: bytes) -> bytes:
        raise PermissionError("denied for wJalrXUtnFEMI-K7MDENG")

    store.fault = leak
    with pytest.raises(PermissionError) as caught:
        copy()
    chain: BaseException | None = caught.value
    assert "wJalr" not in str(chain)
    assert chain.__suppress_context__


# What the readers make of it


def make_photos(folder: Path) -> None:
    for label, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (8, 8), (40 * i, 90 * label, 7)).save(folder / name / f"{i}.png")


def upload(folder: Path, prefix: str) -> dict[str, bytes]:
    return {f"{prefix}/{name}": content for name, content in contents(folder).items()}


def test_an_image_folder_of_a_store_equals_the_local_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_photos(tmp_path / "photos")
    with flaky_source(upload(tmp_path / "photos", "bucket/animals")):
        remote = hs.data.ImageFolder("flaky://bucket/animals")
    assert "data: " not in capsys.readouterr().out
    local = hs.data.ImageFolder(tmp_path / "photos")
    assert remote.classes == local.classes
    for (a, x), (b, y) in zip(remote, local, strict=True):  # type: ignore[call-overload]
        assert torch.equal(a, b)
        assert x == y


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_an_archive_is_unpacked(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_photos(tmp_path / "photos")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz" if suffix.endswith("gz") else "w") as archive:
        archive.add(tmp_path / "photos", "photos")
    with flaky_source({f"bucket/photos.{suffix}": packed.getvalue()}):
        folder = hs.data.ImageFolder(f"flaky://bucket/photos.{suffix}")
    assert folder.classes == ["cat", "dog"]
    assert len(folder) == 6
    assert "1 object: copying of" in capsys.readouterr().err


def test_a_hostile_archive_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("../evil"), io.BytesIO())
    with (
        flaky_source({"bucket/photos.tar": packed.getvalue()}),
        pytest.raises(ValueError, match="leads out of the folder"),
    ):
        hs.data.ImageFolder("flaky://bucket/photos.tar")
    capsys.readouterr()


def test_a_table_and_arrays_in_memory_of_fsspec(capsys: pytest.CaptureFixture[str]) -> None:
    """By fsspec's own memory://, as any other file system of it."""
    memory = fsspec.filesystem("memory")
    memory.pipe(
        "/tables/houses.csv", b"area,price\n" + b"".join(b"%d,%d\n" % (i, 2 * i) for i in range(30))
    )
    images, labels = hs.data.sample(False)
    header = bytes([0, 0, 8, 3]) + np.array([5, 28, 28], ">i4").tobytes()
    memory.pipe("/idx/t10k-images-idx3-ubyte", header + images[:5].numpy().tobytes())
    header = bytes([0, 0, 8, 1]) + np.array([5], ">i4").tobytes()
    memory.pipe("/idx/t10k-labels-idx1-ubyte", header + labels[:5].byte().numpy().tobytes())
    try:
        assert hs.data.read_csv("memory://tables/houses.csv", "price").size == 30
        x, y = hs.data.read_split("memory://idx", train=False)
    finally:
        memory.store.clear()
        memory.pseudo_dirs[:] = [""]
    assert torch.equal(x, images[:5])
    assert torch.equal(y, labels[:5])
    capsys.readouterr()


def test_a_file_url_is_the_file_itself(tmp_path: Path, cache: Path) -> None:
    make_photos(tmp_path / "photos")
    folder = hs.data.ImageFolder(f"file://{tmp_path}/photos")
    assert folder.root == tmp_path / "photos"
    assert not cache.exists()


def test_a_known_data_set_lies_in_a_store(capsys: pytest.CaptureFixture[str]) -> None:
    sample = Path(hs.data.__file__).parent / "sample"
    objects = {f"bucket/fashion/{path.name}": path.read_bytes() for path in sample.glob("*.gz")}
    with flaky_source(objects):
        data = hs.data.load("fashion-mnist", "test", path="flaky://bucket/fashion")
    assert data.size == 2000
    capsys.readouterr()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nosuch://bucket/x", "scheme that fsspec knows"),
        ("s3://user:password@bucket/x", "without a user or a password"),
        ("simplecache::flaky://bucket/x", "(chain|no folder)"),
        ("https://host/folder", "does not say what is in a folder"),
    ],
)
def test_urls_that_are_refused(url: str, message: str) -> None:
    with pytest.raises(
        (ValueError, FileNotFoundError, NotADirectoryError), match=message
    ) as caught:
        hs.data.ImageFolder(url)
    assert "password@" not in str(caught.value)


def test_copies_at_once_read_each_object_once(store: type[FlakySource]) -> None:
    """Both are whole; the second one waits for the first, whichever that is."""
    store.delay_s = 0.01
    with ThreadPoolExecutor(4) as pool:
        copies = list(pool.map(lambda _: copy(), range(4)))
    assert all(each == copies[0] for each in copies)
    assert contents(copies[0].path) == expected(store)
    assert len(store.requests) == 18


def test_a_file_system_of_the_users_keeps_its_random_module(store: type[FlakySource]) -> None:
    """It stands in a package of theirs, whose other modules draw the numbers of a run."""
    copy()
    assert random is sys.modules["random"]  # `random` of this module, which is in its package


def test_a_kill_before_the_last_rename_costs_no_reading(
    store: type[FlakySource], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*paths: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store_copy.os, "rename", fail)
        with pytest.raises(KeyboardInterrupt):
            copy()
    store.requests.clear()
    assert contents(copy().path) == expected(store)
    assert store.requests == []


def test_no_warning_of_a_plain_copy(store: type[FlakySource]) -> None:
    with warnings.catch_warnings(action="error"):
        copy()
