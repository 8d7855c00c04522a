"""Every file that halfstep writes: killed in the middle of its write, or on a full disk.

Then the old file is there whole, or the new one. tests/rules/test_writers.py searches the source
for files that are written otherwise.
"""

import io
import json
import os
import resource
import subprocess
import sys
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import halfstep as hs
from halfstep import checkpoint
from halfstep.callbacks.logs import LogFile
from halfstep.checkpoint.runs import finish_replacements, replace
from halfstep.cli.predict import _write_array
from halfstep.cli.runs import _save_tensors
from halfstep.data.download.archive import unpack
from halfstep.data.download.fetch import fetch_file
from halfstep.engine import Row
from halfstep.experiment.training_run import TrainSettings, write_run_file
from halfstep.report.write_report import write
from halfstep.reproduce import Replayed
from halfstep.utils.files import write_json, write_text
from tests.support.kill_points import run_killed
from tests.support.report_fixtures import comparison

CALLS_AND_RETURNS = ("c_call", "c_return")
OLD, NEW = 1, 2  # which content a writer writes
BIG = 3 << 20  # bytes of a file that is written in several pieces


# Writers: each writes its content number `which` at the path.


def make_net(which: int) -> nn.Module:
    net = nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 512))
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(which)
    return net


def save_model(path: Path, which: int) -> None:
    hs.Model(make_net(which), loss=None).save(path)


def save_replayed(path: Path, which: int) -> None:
    row = Row(*[0] * len(fields(Row)))
    gradients = {"weight": torch.full((BIG // 4,), float(which))}
    _save_tensors(Replayed(step=1, origin="the beginning", row=row, gradients=gradients), path)


def save_array(path: Path, which: int) -> None:
    _write_array(torch.full((BIG // 16, 4), float(which)), path)


def save_table(path: Path, which: int) -> None:
    write_text(path, f"input,label,class,{which}\n" * 100_000)


def save_json(path: Path, which: int) -> None:
    write_json(path, {"values": [which] * 200_000})


def save_run_file(path: Path, which: int) -> None:
    settings = TrainSettings(epochs=which)
    write_run_file(path.parent, settings, "halfstep train")


def save_summary(path: Path, which: int) -> None:
    write_json(path, comparison(("fp32", "O2"), which, steps=200))


def save_report(path: Path, which: int) -> None:
    source = path.parent.parent / f"source{which}"
    if not source.exists():
        write_json(source / "compare.json", comparison(("fp32", "O2"), which, steps=200))
    write(source, out=path.parent, formats=[path.suffix[1:]])


def save_sheet(path: Path, which: int) -> None:
    generator = torch.Generator().manual_seed(which)
    images = torch.randint(0, 256, (16, 64, 64, 3), dtype=torch.uint8, generator=generator)
    data = hs.data.Dataset({"image": images, "label": torch.arange(16)}).batch(4)
    hs.data.sheet(data, path)


def start_log(path: Path, which: int) -> None:
    """As CSVLog begins a file; the lines that come later are appended."""
    log = LogFile("CSVLog", path, overwrite=True)
    log.open("kind,epoch\n" * which)
    log.close()


def save_checkpoint(path: Path, which: int) -> None:
    tree = {"which": which, "w": torch.full((BIG // 4,), float(which))}
    finish_replacements(path.parent)  # as fit does first
    if path.exists():
        replace(path, tree)
    else:
        checkpoint.save(path, tree)


def download(path: Path, which: int) -> None:
    fetch_file(f"{web_server()}/{which}", path, progress=False)


def unpack_archive(path: Path, which: int) -> None:
    archive = path.parent.parent / f"archive{which}.tar"
    if not archive.exists():
        with tarfile.open(archive, "w") as tar:
            for name in ("a", "b", "c"):
                member = tarfile.TarInfo(f"{name}/{which}.bin")
                member.size = BIG // 4
                tar.addfile(member, io.BytesIO(bytes([which]) * member.size))
    unpack(archive, path)


_servers: list[str] = []


def web_server() -> str:
    """A server of this process with the files 1 and 2; forked children only connect to it."""

    class Pages(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            body = bytes([int(self.path[1:])]) * BIG
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    if not _servers:
        server = ThreadingHTTPServer(("127.0.0.1", 0), Pages)
        server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a killed client
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _servers.append(f"http://127.0.0.1:{server.server_port}")
    return _servers[0]


class Writer(NamedTuple):
    """How something is written, under which name, and whether it may replace an old one."""

    write: Callable[[Path, int], None]
    name: str
    replaces: bool = True


WRITERS = {
    "Model.save": Writer(save_model, "weights.safetensors"),
    "Model.save x.pt": Writer(save_model, "weights.pt"),
    "replay --save": Writer(save_replayed, "step.safetensors"),
    "predict --out x.npy": Writer(save_array, "x.npy"),
    "predict --out x.csv": Writer(save_table, "x.csv"),
    "result.json of a run": Writer(save_json, "result.json"),
    "run.json": Writer(save_run_file, "run.json"),
    "compare.json": Writer(save_summary, "compare.json"),
    "report.html": Writer(save_report, "report.html"),
    "report.md": Writer(save_report, "report.md"),
    "report.json": Writer(save_report, "report.json"),
    "contact sheet": Writer(save_sheet, "sheet.png"),
    "the beginning of a log": Writer(start_log, "log.csv"),
    "checkpoint": Writer(save_checkpoint, "step-000000001"),
    "download": Writer(download, "data.gz"),
    "unpacked archive": Writer(unpack_archive, "data", replaces=False),
}


def content_of(path: Path) -> dict[str, bytes] | None:
    """The bytes of the file, or of each file below the folder; None if there is nothing."""
    if path.parent.exists() and path.name.startswith("step-"):
        newest = checkpoint.latest(path.parent)  # a replacement has a name of its own for a moment
        if newest is not None:
            path = newest
    if not path.exists():
        return None
    if path.is_file():
        return {"": path.read_bytes()}
    files = [file for file in path.rglob("*") if file.is_file()]
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


def written_contents(writer: Writer, folder: Path) -> list[dict[str, bytes] | None]:
    """What the writer writes as OLD (None where it replaces nothing), and as NEW."""
    contents = []
    for which in (OLD, NEW):
        path = folder / f"content{which}" / "out" / writer.name
        path.parent.mkdir(parents=True)
        writer.write(path, which)
        contents.append(content_of(path))
    if not writer.replaces:
        contents[0] = None
    return contents


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow, id="slow-20")])
@pytest.mark.parametrize("name", WRITERS)
def test_killed_in_the_middle_the_old_or_the_new_is_whole(
    name: str, kills: int, tmp_path: Path
) -> None:
    """Killed before and after calls of the disk, from the first to the last in equal distances."""
    writer = WRITERS[name]
    old, new = written_contents(writer, tmp_path)
    assert new is not None
    assert new != old

    def fresh_path(number: int) -> Path:
        path = tmp_path / str(number) / "out" / writer.name
        path.parent.mkdir(parents=True)
        writer.write(path.parent.parent / "prepared" / writer.name, NEW)  # archives and sources
        if writer.replaces:
            writer.write(path, OLD)
        return path

    never = 1 << 30
    path = fresh_path(0)
    events = run_killed(partial(writer.write, path, NEW), never, CALLS_AND_RETURNS)
    assert events is not None
    assert content_of(path) == new

    moments = [1 + round(i * (events - 1) / (kills - 1)) for i in range(kills)]
    seen = []
    for number, moment in enumerate(moments, 1):
        path = fresh_path(number)
        outcome = run_killed(partial(writer.write, path, NEW), moment, CALLS_AND_RETURNS)
        content = content_of(path)
        if outcome is not None:  # a network gives its pieces in other numbers each time
            assert name == "download"
            assert content == new
        assert content in (old, new), f"killed at event {moment} of {events}"
        seen.append("new" if content == new else "old")

        # The next write succeeds, and takes away what the killed one left.
        if content != new or writer.replaces:
            writer.write(path, NEW)
        assert content_of(path) == new
        assert os.listdir(path.parent) == [writer.name]
    assert seen == sorted(seen, reverse=True)  # old, …, old, new, …
    assert seen[0] == "old"


# Full disks.

LIMITED = [name for name in WRITERS if name != "the beginning of a log"]  # its lines wait


@contextmanager
def limit_file_size(count: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", LIMITED)
def test_a_write_that_fails_half_way_leaves_the_old_whole(name: str, tmp_path: Path) -> None:
    """The system refuses to let files grow on: an OSError that names the file."""
    writer = WRITERS[name]
    old, new = written_contents(writer, tmp_path)
    path = tmp_path / "here" / "out" / writer.name
    path.parent.mkdir(parents=True)
    writer.write(path.parent.parent / "prepared" / writer.name, NEW)
    if writer.replaces:
        writer.write(path, OLD)
    assert new is not None
    largest = max(len(content) for content in new.values())
    with (
        limit_file_size(largest // 2),
        pytest.raises((OSError, checkpoint.CheckpointError), match="File too large") as caught,
    ):
        writer.write(path, NEW)
    assert writer.name in str(caught.value) or not writer.replaces
    assert content_of(path) == old
    assert os.listdir(path.parent) == ([writer.name] if writer.replaces else [])
    writer.write(path, NEW)
    assert content_of(path) == new


# In a mount namespace of its own, so that nothing stays mounted.
SMALL_DISK = """
import json, os, subprocess, sys
from pathlib import Path
import torch
root = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "none", root], check=True)
from tests.faults.test_killed_writes import NEW, OLD, LIMITED, WRITERS, content_of
outcomes = {}
for name in LIMITED:
    writer = WRITERS[name]
    path = root / name.replace("/", "") / "out" / writer.name
    path.parent.mkdir(parents=True)
    if writer.replaces:
        writer.write(path, OLD)
    writer.write(path.parent.parent / "prepared" / writer.name, NEW)
    old = content_of(path)
    free = os.statvfs(root).f_bavail * os.statvfs(root).f_frsize
    (root / "filler").write_bytes(bytes(free))
    try:
        writer.write(path, NEW)
        outcomes[name] = "no error"
    except Exception as error:
        same = content_of(path) == old
        left = [n for n in os.listdir(path.parent) if n != writer.name]
        outcomes[name] = [str(error), same, left]
    (root / "filler").unlink()
    writer.write(path, NEW)
    subprocess.run(["rm", "-r", path.parent.parent], check=True)
print(json.dumps(outcomes))
"""


def test_a_full_disk_leaves_every_old_file_whole(tmp_path: Path) -> None:
    if subprocess.run(
        ["unshare", "-rm", "mount", "-t", "tmpfs", "none", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("this system lets no test mount a disk of its own")
    command = ["unshare", "-rm", sys.executable, "-c", SMALL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    for name in LIMITED:
        assert outcomes[name] != "no error", name
        message, same, left = outcomes[name]
        assert "No space left" in message, name
        assert (same, left) == (True, []), name


def test_the_list_has_a_file_of_every_kind(tmp_path: Path) -> None:
    """The contents are what the programs that read them expect."""
    path = tmp_path / "weights.safetensors"
    save_model(path, NEW)
    other = make_net(OLD)
    hs.Model(other, loss=None).load(path)
    assert all((p == NEW).all() for p in other.parameters())
    save_array(tmp_path / "x.npy", NEW)
    assert (np.load(tmp_path / "x.npy") == NEW).all()
