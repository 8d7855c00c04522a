"""Data from stores: processes that are killed while they copy, and a real S3 server that fails."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import halfstep

ROOT = Path(halfstep.__file__).parents[1]

# Copies again and again in child processes, each of which is killed after a time; then to the end.
KILLED_COPIES = """
import json, os, random, signal, sys, time
from pathlib import Path
from halfstep.data.download import store_copy
from halfstep.storage.url import parse_store_url
from tests.support.flaky_source import count_log, flaky_source, seeded_bytes

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
store_copy.BLOCK_BYTES = 1 << 12
store_copy.JOURNAL_EVERY_BYTES = 1 << 14
url = parse_store_url("flaky://bucket/data", "data")
objects = {f"bucket/data/{i}/{i}.bin": seeded_bytes(i, 5_000) for i in range(40)}
objects["bucket/data/large"] = seeded_bytes(99, 1_000_000)
expected = {name.removeprefix("bucket/data/"): content for name, content in objects.items()}
draw = random.Random(int(sys.argv[3]))
finished_early = 0
looked_complete = []
with flaky_source(objects) as store:
    store.log = str(folder / "log")
    store.delay_s = 0.004
    for _ in range(kills):
        pid = os.fork()
        if pid == 0:
            store_copy.copy_store(url, folder, progress=False)
            os._exit(0)
        time.sleep(draw.uniform(0.02, 0.2))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        finished_early += status == 0
        # What has the name of a whole copy is one.
        for copy in folder.glob("stores/*/copy-*"):
            looked_complete.append(copy.name)
            assert len(list(copy.rglob("*.bin"))) == 40
    read_by_killed = count_log(folder / "log")
    copy = store_copy.copy_store(url, folder, progress=False)
    read = count_log(folder / "log")
paths = [path for path in copy.path.rglob("*") if path.is_file()]
got = {path.relative_to(copy.path).as_posix(): path.read_bytes() for path in paths}
assert got == expected
assert store_copy.find_damage(copy) == []
total = sum(map(len, objects.values()))
print(json.dumps({"total": total, "killed": read_by_killed, "read": read, "early": finished_early}))
"""


def run_script(script: str, *arguments: str, timeout_s: int = 120) -> dict[str, int]:
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    numbers: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    return numbers


@pytest.mark.parametrize(
    "kills", [6, pytest.param(60, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_a_copy_survives_kills_and_goes_on(kills: int, tmp_path: Path) -> None:
    """Each kill costs at most what was under way: blocks in flight, and an unfinished part."""
    numbers = run_script(KILLED_COPIES, str(tmp_path), str(kills), str(kills), timeout_s=500)
    assert numbers["killed"] > 0
    assert numbers["early"] < kills
    in_flight = 16 * (5_000 + 4 * (1 << 12)) + (1 << 14)
    assert numbers["read"] <= numbers["total"] + kills * in_flight
    assert numbers["read"] - numbers["killed"] < numbers["total"]


# A real S3 server behind a proxy that fails; in a process of its own, as boto3 warns of this and
# that, and starts threads.
S3_COPIES = """
import hashlib, json, logging, os, random, sys
from pathlib import Path
logging.getLogger("werkzeug").setLevel(logging.ERROR)
os.environ["AWS_ACCESS_KEY_ID"] = "AKIATESTTESTTESTTEST"
os.environ["AWS_SECRET_ACCESS_KEY"] = "secret-of-this-test-0123456789"
os.environ["AWS_DEFAULT_REGION"] = "us-east-1"
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
_, port = server.get_host_and_port()
os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
from halfstep.data.download import store_copy, store_reads
from halfstep.data.download.local_copy import local_path
from halfstep.storage.url import open_filesystem, parse_store_url
from halfstep.data.shards import shard_reads
from halfstep.data.shards.shard_stream import ShardStream
from halfstep.utils import rng
from tests.support.flaky_proxy import flaky_proxy
from tests.support.flaky_source import seeded_bytes
from tests.support.tar_files import write_shards

store_copy.BLOCK_BYTES = 1 << 18
store_reads.FIRST_PAUSE_S = 0.01
filesystem = open_filesystem(parse_store_url("s3://bucket/data", "data"), "data")
filesystem.mkdir("bucket")
objects = {f"{i % 7}/{i}.bin": seeded_bytes(i, 3000 + i) for i in range(int(sys.argv[1]))}
objects["large"] = seeded_bytes(99, 30_000_000)
for name, content in objects.items():
    filesystem.pipe(f"bucket/data/{name}", content)
filesystem.pipe("bucket/hostile/../../outside", b"1")

shards = write_shards(Path(os.environ["HALFSTEP_CACHE"], "shards"), [40, 30, 50], parts=2)
for path in shards:
    filesystem.put(str(path), f"bucket/shards/{path.name}")
columns = {"image": "png", "label": "cls"}
local_stream = ShardStream(shards, columns, batch_size=8, buffer_size=20)
local_labels = [labels.tolist() for _, labels in local_stream]
shard_reads.BLOCK_BYTES = 1 << 13

random.seed(5)
states = rng.host_states()
with flaky_proxy(port, every=3) as proxy:
    os.environ["AWS_ENDPOINT_URL"] = proxy.url
    folder = local_path("s3://bucket/data")
    names = "s3://bucket/shards/shard-{000..002}.tar"
    stream = ShardStream(names, columns, batch_size=8, buffer_size=20)
    batches = iter(stream)
    labels = [next(batches)[1].tolist() for _ in range(7)]
    state = stream.state_dict()
    batches.close()
    again = ShardStream("s3://bucket/shards", columns, batch_size=8, buffer_size=20)
    again.load_state_dict(state)
    assert labels + [labels.tolist() for _, labels in again] == local_labels
    faults = dict(proxy.faults)
assert rng.equal_host_states(states, rng.host_states())  # nobody has drawn from those of a run
paths = [path for path in folder.rglob("*") if path.is_file()]
assert {p.relative_to(folder).as_posix(): p.read_bytes() for p in paths} == objects
manifest = json.loads((folder.parent / "manifest.json").read_text())
for entry in manifest["objects"]:
    assert entry["sha256"] == hashlib.sha256(objects[entry["name"]]).hexdigest()
assert "secret-of" not in (folder.parent / "manifest.json").read_text()

os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
for url in ("s3://bucket/hostile", "s3://bucket/none", "s3://nobucket/x"):
    try:
        local_path(url)
    except (ValueError, FileNotFoundError) as error:
        assert "AKIATEST" not in str(error) and "secret-of" not in str(error)
    else:
        raise AssertionError(f"{url} was copied")
server.stop()
print(json.dumps(faults))
"""

HAS_S3 = all(importlib.util.find_spec(name) for name in ("moto", "s3fs", "flask"))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not HAS_S3, reason="needs s3fs and moto[server]")
def test_a_real_s3_server_with_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFSTEP_CACHE", str(tmp_path))
    faults = run_script(S3_COPIES, "500", timeout_s=550)
    assert sum(faults.values()) >= 200
    assert set(faults) == {"500", "reset", "truncated", "slow"}
