"""Outputs to a real S3 server on loopback, behind a proxy that fails: nothing is lost or torn.

`make test-full` installs moto's server and s3fs in an environment of their own, and runs this file
there.
"""

import importlib.util
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from halfstep import checkpoint
from halfstep.storage.mirror import StoreMirror
from halfstep.storage.store_access import PART_BYTES, RetryPolicy, Store, hash_file
from halfstep.storage.url import StoreURL
from tests.support.faulty_proxy import running_proxy
from tests.support.killed_run import fork_server
from tests.support.run_endings import differences, leaves_by_path, undisturbed_ending

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3000),
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("moto", "s3fs")),
        reason="moto and s3fs are not installed",
    ),
    # of aiohttp and botocore, in threads that end with the process
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

KEY_ID = "AKIAHALFSTEPTEST1234"
SECRET = "sesame/open+of-the-test-0123456789abcdef"
CASE = {"every_steps": 2, "keep": 2}
FAULT_COUNT = 200
START_TIMEOUT_S = 60


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The port of an S3 server in a process of its own, with an empty bucket."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for name, value in environment(f"http://127.0.0.1:{port}").items():
        monkeypatch.setenv(name, value)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        filesystem().mkdir("bucket")
        yield port
    finally:
        process.kill()
        process.wait()


def environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


def filesystem() -> Any:
    import s3fs

    return s3fs.S3FileSystem(skip_instance_cache=True, use_listings_cache=False)


def all_objects(prefix: str) -> dict[str, bytes]:
    store = filesystem()
    return {path: store.cat_file(path) for path in store.find(prefix)}


def store_ending(url: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a fresh machine gets, and the steps that are there; no object is torn or left over."""
    with tempfile.TemporaryDirectory() as machine:
        monkeypatch.setenv("HALFSTEP_OUT", machine)
        mirror = StoreMirror(url, "test")
        mirror.fetch()
        newest = checkpoint.latest(mirror.folder)
        assert newest is not None
        tree = checkpoint.load(newest).tree
        log = (mirror.folder / "log.jsonl").read_text()
        index = mirror._connect().read()
        for stored in index.checkpoints:
            mirror.fetch_step(stored.step)
            checkpoint.verify(mirror.folder / stored.name)
    assert not index.broken
    assert not index.abandoned
    named = {
        name for stored in index.checkpoints for name in (*stored.objects, stored.manifest_name)
    }
    assert named == {name for name in index.objects if name.startswith("step-")}
    names = [stored.name for stored in index.checkpoints]
    return {**leaves_by_path(tree), "kept": names, "log": log}


def test_two_hundred_faults_and_kills(
    server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs, each in a bucket's folder of its own, until the proxy has injected enough faults.

    Every process but the last of a run is killed at a random moment; the next is a fresh machine.
    """
    faults: Counter[str] = Counter()
    request_count = 0
    killed_count = 0
    draw = random.Random(0)
    run_count = 0
    undisturbed = undisturbed_ending(CASE)
    while sum(faults.values()) < FAULT_COUNT:
        url = f"s3://bucket/run-{run_count}"
        with running_proxy(server, rate=0.2, seed=run_count) as proxy:
            store = {"url": url, "environment": environment(proxy.url)}
            kill_times = [draw.uniform(0.5, 6.0) for _ in range(draw.randint(1, 3))]
            for number, kill_after_s in enumerate([*kill_times, None]):
                machine = tmp_path / f"machine-{run_count}-{number}"
                signals = {} if kill_after_s is None else {"delay": kill_after_s, "send": [9]}
                code = fork_server()(machine, store=store, pause=0.1, **signals, **CASE)
                text = (machine / "stderr").read_text()
                assert SECRET not in text
                assert KEY_ID not in text
                assert code in (0, -signal.SIGKILL), text
                killed_count += code != 0
                if code == 0:
                    break
            assert code == 0
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server}")
        assert differences(store_ending(url, monkeypatch), undisturbed) == []
        faults += proxy.faults
        request_count += proxy.request_count
        run_count += 1

    assert set(faults) == {"500", "500 after", "reset", "reset after", "cut", "slow"}
    assert killed_count >= 3
    secrets = (SECRET.encode(), KEY_ID.encode())
    contents = list(all_objects("bucket").values())
    contents += [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(secret in content for content in contents for secret in secrets)
    shutil.rmtree(tmp_path)


def test_a_manifest_is_created_by_one_only(server: int) -> None:
    """By the request of S3 itself: If-None-Match."""
    store = Store(StoreURL("s3", "bucket/claims"), "out")
    assert store.create("claim", b"first")
    assert not store.create("claim", b"other")
    assert store.create("claim", b"first")
    assert store.read("claim") == b"first"


def test_a_large_file_is_verified_by_the_checksum_of_its_parts(server: int, tmp_path: Path) -> None:
    """It goes in parts, and is not read back."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        for number in range(2 * PART_BYTES // (1 << 20) + 3):
            file.write(random.Random(number).randbytes(1 << 20))
    store = Store(StoreURL("s3", "bucket/large"), "out")
    reads: list[str] = []
    read_range = store._read_range
    store._read_range = lambda *args: reads.append(args[0]) or read_range(*args)  # type: ignore[method-assign,func-returns-value]
    store.upload(path, "file", hash_file(path))
    assert reads == []
    assert store.filesystem.info("bucket/large/file")["ETag"].endswith('-3"')


def test_obs_is_a_store_of_the_protocol_of_s3(server: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address comes from fsspec's configuration, by its own scheme."""
    import fsspec

    monkeypatch.delenv("AWS_ENDPOINT_URL")
    settings = {"endpoint_url": f"http://127.0.0.1:{server}"}
    monkeypatch.setitem(fsspec.config.conf, "obs", settings)
    store = Store(StoreURL("obs", "bucket/run"), "out", RetryPolicy(tries=2))
    assert store.create("a/b", b"content")
    assert list(store.list()) == ["a/b"]
    store.remove(["a/b"])
    assert store.list() == {}


def test_missing_credentials_are_an_error_at_once(
    server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    start = time.monotonic()
    with pytest.raises(OSError, match=r"out: cannot list s3://bucket/run/.: NoCredentialsError"):
        Store(StoreURL("s3", "bucket/run"), "out").list()
    assert time.monotonic() - start < 10
