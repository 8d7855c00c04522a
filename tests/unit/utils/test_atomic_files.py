"""Files that appear whole or not at all are otherwise as a plain `open` would make them."""

import os
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from halfstep.utils.atomic_files import sync_tree, write_chunks


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0])
def test_a_new_file_has_the_mode_that_open_gives(mask: int, tmp_path: Path) -> None:
    with umask(mask):
        write_chunks(tmp_path / "ours", [b"x"])
        (tmp_path / "plain").write_bytes(b"x")
    assert mode_of(tmp_path / "ours") == mode_of(tmp_path / "plain") == 0o666 & ~mask


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
def test_an_old_file_keeps_its_mode(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    path.chmod(mode)
    write_chunks(path, [b"new"])
    assert (path.read_bytes(), mode_of(path)) == (b"new", mode)


def test_a_link_stays_and_its_file_is_replaced(tmp_path: Path) -> None:
    """Also a link in another folder, a relative one, one to a link, and one to nothing yet."""
    (tmp_path / "real").mkdir()
    (tmp_path / "links").mkdir()
    target = tmp_path / "real" / "file"
    first = tmp_path / "links" / "first"
    second = tmp_path / "links" / "second"
    first.symlink_to("../real/file")
    second.symlink_to(first)
    for content in (b"one", b"two"):
        write_chunks(second, [content])
        assert first.is_symlink()
        assert second.is_symlink()
        assert target.read_bytes() == content
    assert os.listdir(tmp_path / "real") == ["file"]
    assert sorted(os.listdir(tmp_path / "links")) == ["first", "second"]


def test_what_open_refuses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    for path, error in (
        (tmp_path, IsADirectoryError),
        (tmp_path / "loop", OSError),
        (tmp_path / "file" / "below", OSError),
        (tmp_path / ("x" * 300), OSError),
    ):
        with pytest.raises(error):
            write_chunks(path, [b"x"])
    assert sorted(os.listdir(tmp_path)) == ["file", "loop"]


def test_a_file_that_may_not_be_written_is_not_replaced() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        path = Path(folder) / "file"
        path.write_bytes(b"old")
        path.chmod(0o444)
        user = os.geteuid()
        os.chmod(folder, 0o777)
        if user == 0:
            os.setresuid(65534, 65534, 0)  # access() asks about the real user
        try:
            with pytest.raises(PermissionError, match="file"):
                write_chunks(path, [b"new"])
        finally:
            if user == 0:
                os.setresuid(0, 0, 0)
        assert path.read_bytes() == b"old"
        assert os.listdir(folder) == ["file"]


def test_devices_and_pipes_are_written_as_they_are(tmp_path: Path) -> None:
    write_chunks("/dev/null", [b"x"])
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    contents = []
    reader = threading.Thread(target=lambda: contents.append(pipe.read_bytes()))
    reader.start()
    write_chunks(pipe, [b"one ", b"two"])
    reader.join()
    assert contents == [b"one two"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_the_standard_output_of_a_program(tmp_path: Path) -> None:
    program = (
        "from halfstep.utils.atomic_files import write_chunks; write_chunks('/dev/stdout', [b'x'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"x"


def fail_half_way(error: type[BaseException]) -> Iterator[bytes]:
    yield bytes(100_000)
    raise error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_in_the_block_changes_nothing(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content in (None, b"old"):
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(error):
            write_chunks(path, fail_half_way(error))
        assert os.listdir(tmp_path) == ([] if content is None else ["file"])
    assert path.read_bytes() == b"old"


def test_writers_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    contents = [bytes([i]) * 100_000 for i in range(8)]
    threads = [
        threading.Thread(target=lambda c=content: [write_chunks(path, [c]) for _ in range(5)])
        for content in contents
    ]
    for thread in threads:
        thread.start()
    seen = set()
    while any(thread.is_alive() for thread in threads):
        if path.exists():
            seen.add(path.read_bytes())
    assert seen | {path.read_bytes()} <= set(contents)
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("count", [3, 200])
def test_a_tree_is_flushed_one_by_one_or_at_once(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(count):
        (tmp_path / f"{i}").touch()
    calls = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: calls.append("fsync"))
    monkeypatch.setattr(os, "sync", lambda: calls.append("sync"))
    sync_tree(tmp_path)
    assert calls == (["fsync"] * 4 if count == 3 else ["sync"])
