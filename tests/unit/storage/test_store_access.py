"""Objects in a store that fails: each call ends with what it promises, or with a clean error."""

from pathlib import Path

import pytest

from halfstep.errors import CheckpointError, StoreError
from halfstep.storage.store_access import (
    PART_BYTES,
    RetryPolicy,
    Store,
    _hash,
    hash_bytes,
    hash_file,
)
from halfstep.storage.url import StoreURL
from tests.support.faulty_store import SCHEDULE, SECRET, use_faulty_store

QUICK = RetryPolicy(tries=30, first_delay_s=0.0001, max_delay_s=0.001)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    use_faulty_store({"folder": str(tmp_path / "store")})
    return Store(StoreURL("faulty", "bucket/run"), "out", QUICK)


def test_what_is_uploaded_is_listed_and_read(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789" * 1000)
    store.upload(path, "a/file", hash_file(path))
    store.upload(b"xyz", "b", hash_bytes(b"xyz"))
    assert {name: found.size for name, found in store.list().items()} == {"a/file": 10_000, "b": 3}
    assert list(store.list("a")) == ["a/file"]
    assert b"".join(store.read_chunks("a/file", 10_000)) == path.read_bytes()
    store.remove(["b", "b"])
    assert list(store.list()) == ["a/file"]
    with pytest.raises(FileNotFoundError, match=r"faulty://bucket/run/b: not there"):
        store.read("b")


@pytest.mark.parametrize("seed", range(5))
def test_half_of_all_calls_fail_and_nothing_is_lost(
    store: Store, tmp_path: Path, seed: int
) -> None:
    use_faulty_store({"folder": str(tmp_path / "store"), "rate": 0.5, "seed": seed})
    contents = {f"object-{i}": bytes([i]) * (i * 100 + 1) for i in range(20)}
    created = {}
    for name, content in contents.items():
        store.upload(content, name, hash_bytes(content))
        # This store keeps half of an object that was cut off, so its name is taken.
        numbers = (number for number in range(20) if store.create(f"{name}-{number}", content))
        created[name] = f"{name}-{next(numbers)}"
    assert {name: store.read(name) for name in contents} == contents
    assert {name: store.read(created[name]) for name in contents} == contents
    assert sum(SCHEDULE.faults.values()) > 50
    assert set(SCHEDULE.faults) == {"before", "after", "part", "silent part", "late"}


def test_only_one_creates_an_object(store: Store) -> None:
    assert store.create("claim", b"first")
    assert store.create("claim", b"first")  # the same once more: an answer may be lost
    assert not store.create("claim", b"other")
    assert store.read("claim") == b"first"


def test_a_memory_and_a_local_store_create_exclusively(tmp_path: Path) -> None:
    for url in (StoreURL("memory", "create-test"), StoreURL("file", f"{tmp_path}/store")):
        store = Store(url, "out", QUICK)
        assert store.create("x/claim", b"first")
        assert not store.create("x/claim", b"other")
        assert store.read("x/claim") == b"first"
        assert list(store.list()) == ["x/claim"]
        store.remove(["x/claim"])
        assert store.list() == {}


def test_an_error_says_what_and_where_and_no_secret(store: Store, tmp_path: Path) -> None:
    use_faulty_store({"folder": str(tmp_path / "store"), "down": 1})
    for call in (
        store.list,
        lambda: store.read("x"),
        lambda: store.upload(b"", "x", hash_bytes(b"")),
    ):
        with pytest.raises(
            StoreError, match=r"^out: cannot \w+ faulty://bucket/run/.*500"
        ) as caught:
            call()
        assert SECRET not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__


def test_a_file_that_is_not_what_it_was_is_not_uploaded(store: Store, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"right")
    entry = hash_file(path)
    path.write_bytes(b"wrong")
    with pytest.raises(CheckpointError, match="expected sha256"):
        store.upload(path, "x", entry)
    assert store.list() == {}


def test_delays_grow_and_end() -> None:
    delays = list(RetryPolicy(tries=8, first_delay_s=1, max_delay_s=10).delays())
    longest = [1, 2, 4, 8, 10, 10, 10]
    assert all(top / 2 <= delay <= top for delay, top in zip(delays, longest, strict=True))


def test_no_call_is_tried_for_ever(store: Store, tmp_path: Path) -> None:
    use_faulty_store({"folder": str(tmp_path / "store"), "down": 1})
    store.retries = RetryPolicy(tries=1_000_000, first_delay_s=0.01, max_total_s=0.1)
    with pytest.raises(StoreError):
        store.list()
    assert 3 < SCHEDULE.call_count < 1000


def test_the_etags_are_those_of_s3(tmp_path: Path) -> None:
    """By Amazon's rule: the MD5 of the content, or of the MD5s of the parts, and their number."""
    import hashlib

    def md5(content: bytes) -> "hashlib._Hash":
        return hashlib.md5(content, usedforsecurity=False)

    small = b"x" * (PART_BYTES + 5)
    assert _hash(small, with_etag=True)[1] == md5(small).hexdigest()
    content = small + small
    path = tmp_path / "large"
    path.write_bytes(content)
    pieces = [content[start : start + PART_BYTES] for start in range(0, len(content), PART_BYTES)]
    expected = f"{md5(b''.join(md5(piece).digest() for piece in pieces)).hexdigest()}-3"
    assert _hash(path, with_etag=True)[1] == expected
    assert _hash(content, with_etag=True)[1] == expected
    assert _hash(b"", with_etag=True)[1] == md5(b"").hexdigest()
