"""Downloads from a real server on this machine, and every way in which one can go wrong."""

import errno
import hashlib
import io
import os
import pty
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.client import HTTPMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from halfstep.data.download.catalog import Checksum
from halfstep.data.download.fetch import FetchedFile, MirrorError, _WebRedirects, fetch_file

BODY = bytes(range(256)) * 1000
SHA256 = Checksum("sha256", hashlib.sha256(BODY).hexdigest())
MD5 = Checksum("md5", hashlib.md5(BODY).hexdigest())


class Pages(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.close_connection = True
        with suppress(BrokenPipeError, ConnectionResetError):  # the client had enough
            getattr(self, self.path.strip("/").replace("-", "_"), self.missing)()

    def log_message(self, *args) -> None:
        pass

    def head(self, code: int = 200, **headers) -> None:
        self.send_response(code)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), str(value))
        self.end_headers()

    def good(self) -> None:
        self.head(Content_Length=len(BODY))
        self.wfile.write(BODY)

    def missing(self) -> None:
        self.send_error(404)

    def broken(self) -> None:
        self.send_error(500)

    def short(self) -> None:
        self.head(Content_Length=len(BODY))
        self.wfile.write(BODY[:1000])

    def short_chunk(self) -> None:
        self.head(Transfer_Encoding="chunked")
        self.wfile.write(b"fff\r\n" + BODY[:1000])

    def no_length(self) -> None:
        self.head()
        self.wfile.write(BODY)

    def chunked(self) -> None:
        self.head(Transfer_Encoding="chunked")
        self.wfile.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))

    def silent(self) -> None:
        self.server.stop.wait(10)

    def stalled(self) -> None:
        self.head(Content_Length=len(BODY))
        self.wfile.write(BODY[:100_000])
        self.server.stop.wait(10)

    def endless(self) -> None:
        self.head()
        while True:
            self.wfile.write(BODY)

    def too_long(self) -> None:
        self.head(Content_Length=1 << 50)

    def to_file(self) -> None:
        self.head(302, Location="file:///etc/passwd", Content_Length=0)

    def to_ftp(self) -> None:
        self.head(302, Location="ftp://127.0.0.1/x", Content_Length=0)

    def to_itself(self) -> None:
        self.head(302, Location="/to-itself", Content_Length=0)

    def to_good(self) -> None:
        self.head(302, Location="/good", Content_Length=0)

    def noise(self) -> None:
        self.wfile.write(b"no HTTP at all\r\n\r\n")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as pages:
        pages.stop = threading.Event()
        thread = threading.Thread(target=pages.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{pages.server_port}"
        pages.stop.set()
        pages.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.mark.parametrize("page", ["good", "no-length", "chunked", "to-good"])
@pytest.mark.parametrize("checksum", [SHA256, MD5, None], ids=["sha256", "md5", "unknown"])
def test_a_whole_file_arrives(
    server: str, tmp_path: Path, page: str, checksum: Checksum | None
) -> None:
    target = tmp_path / "new" / "folder" / "file"
    fetched = fetch_file(f"{server}/{page}", target, checksum=checksum)
    assert fetched == FetchedFile(target, f"{server}/{page}", SHA256.hex, len(BODY))
    assert target.read_bytes() == BODY
    assert os.listdir(target.parent) == ["file"]


@pytest.mark.parametrize(
    ("page", "match"),
    [
        ("missing", "the server answered 404 Not Found"),
        ("broken", "the server answered 500 Internal Server Error"),
        ("short", "expected 256000 bytes, the connection ended after 1000"),
        ("short-chunk", "the connection failed .*IncompleteRead"),
        ("silent", r"no answer for 0\.2 s"),
        ("stalled", r"no answer for 0\.2 s"),
        ("endless", "larger than limit_bytes=1000000"),
        ("too-long", "the file has 1125899906842624 bytes, more than limit_bytes=1000000"),
        ("to-file", "302 .*file:///etc/passwd' is not allowed"),
        ("to-ftp", "redirected to ftp://127.0.0.1/x, expected an http or https address"),
        ("to-itself", "infinite loop"),
        ("noise", "the connection failed"),
    ],
)
@pytest.mark.parametrize("before", [None, b"an older file"])
def test_a_failure_is_named_and_leaves_no_trace(
    server: str, target: Path, page: str, match: str, before: bytes | None
) -> None:
    if before is not None:
        target.write_bytes(before)
    with pytest.raises(OSError, match=match) as caught:
        fetch_file(f"{server}/{page}", target, timeout_s=0.2, limit_bytes=1_000_000)
    message = str(caught.value)
    assert message.startswith(f"file could not be fetched:\n  {server}/{page}: ")
    assert message.endswith(f"or fetch the file by other means and put it at {target}.")
    assert os.listdir(target.parent) == ([] if before is None else ["file"])
    assert before is None or target.read_bytes() == before


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_a_wrong_checksum_is_refused(server: str, target: Path, algorithm) -> None:
    wrong = Checksum(algorithm, "0" * (32 if algorithm == "md5" else 64))
    right = hashlib.new(algorithm, BODY).hexdigest()
    with pytest.raises(
        OSError, match=f"expected {algorithm} {wrong.hex}, got {right} of 256000 bytes"
    ):
        fetch_file(f"{server}/good", target, checksum=wrong)
    assert os.listdir(target.parent) == []


def test_a_length_without_promise_is_checked_by_the_checksum(server: str, target: Path) -> None:
    with pytest.raises(OSError, match="expected sha256"):
        fetch_file(f"{server}/no-length", target, checksum=Checksum("sha256", "1" * 64))


def test_the_next_mirror_is_tried(server: str, target: Path) -> None:
    mirrors = [f"{server}/{page}" for page in ("missing", "short", "good", "broken")]
    assert fetch_file(mirrors, target, checksum=MD5).url == mirrors[2]
    assert target.read_bytes() == BODY


def test_every_mirrors_failure_is_listed(server: str, target: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: refused
        refused = f"http://127.0.0.1:{closed.getsockname()[1]}/x"
        with pytest.raises(OSError, match="could not be fetched") as caught:
            fetch_file([f"{server}/missing", refused, "http://no.such.host.invalid/x"], target)
    lines = str(caught.value).splitlines()
    assert len(lines) == 5
    assert "Connection refused" in lines[2]
    assert lines[3].startswith("  http://no.such.host.invalid/x: the connection failed (")


@pytest.mark.parametrize(
    "urls", ["ftp://host/x", "file:///etc/passwd", "/etc/passwd", "http://", ["http://a/x", "x"]]
)
def test_only_web_addresses_are_taken(target: Path, urls) -> None:
    with pytest.raises(ValueError, match="expected an address like https://host/file, got"):
        fetch_file(urls, target)


def test_no_address_is_an_error(target: Path) -> None:
    with pytest.raises(ValueError, match="at least one address"):
        fetch_file([], target)


def test_a_folder_that_cannot_be_made_is_named(server: str, tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    with pytest.raises(
        OSError, match=r"plain/file cannot be written: .* make the folder writable"
    ) as caught:
        fetch_file([f"{server}/good", f"{server}/good"], tmp_path / "plain" / "file")
    assert caught.value.errno in (errno.ENOTDIR, errno.EEXIST)


def test_a_folder_under_the_final_name_is_an_error(server: str, target: Path) -> None:
    target.mkdir()
    with pytest.raises(IsADirectoryError, match="cannot be written"):
        fetch_file(f"{server}/good", target)
    assert os.listdir(target.parent) == ["file"]


# The modules alone, without the package around them, which would load torch for seconds.
FETCH_ALONE = """
import sys, types
for name in ("halfstep", "halfstep.data"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [name.replace(".", "/")]
from halfstep.data.download.fetch import fetch_file
assert "rich" not in sys.modules and "torch" not in sys.modules
"""


def start_python(
    code: str, *args: object, before: Callable[[], object] | None = None, **pipes
) -> subprocess.Popen:
    command = [sys.executable, "-c", FETCH_ALONE + code, *map(str, args)]
    root = Path(__file__).parents[4]
    return subprocess.Popen(
        command, cwd=root, preexec_fn=before, text=True, **{"stderr": subprocess.PIPE} | pipes
    )


FETCH_ONE = "fetch_file(sys.argv[1], sys.argv[2])"


def test_a_read_only_folder_is_named(server: str, target: Path) -> None:
    """By a process that is not root, whom permissions would not stop."""
    target.parent.chmod(0o500)
    drop = "import os, encodings.idna; os.getuid() or os.setuid(65534); "
    error = start_python(drop + FETCH_ONE, f"{server}/good", target).communicate()[1]
    assert (
        f"PermissionError: [Errno 13] {target} cannot be written: Permission denied. "
        "Free space there, make"
    ) in error
    assert os.listdir(target.parent) == []


def test_a_full_disk_is_named_and_leaves_nothing(server: str, target: Path) -> None:
    """The kernel's own refusal to write on: a limit on the file size stands in for a full disk."""
    limit = (100_000, 100_000)
    process = start_python(
        FETCH_ONE,
        f"{server}/good",
        target,
        before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    error = process.communicate()[1]
    assert (
        f"OSError: [Errno 27] {target} cannot be written: File too large. Free space there" in error
    )
    assert os.listdir(target.parent) == []


def test_a_killed_download_leaves_nothing_under_the_name(server: str, target: Path) -> None:
    process = start_python(FETCH_ONE, f"{server}/stalled", target)
    while not (
        parts := [part for part in target.parent.glob(".halfstep-tmp-*") if part.stat().st_size]
    ):
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert os.listdir(target.parent) == [parts[0].name]
    fetch_file(f"{server}/good", target)
    assert target.read_bytes() == BODY
    assert os.listdir(target.parent) == ["file"]  # its process is gone


def test_processes_at_once_end_with_one_good_file(server: str, target: Path) -> None:
    many = "for _ in range(20): fetch_file(*sys.argv[1:])"
    processes = [start_python(many, f"{server}/{page}", target) for page in ("good", "chunked")]
    seen = set()
    while any(process.poll() is None for process in processes):
        if target.exists():
            seen.add(target.read_bytes())
    assert [process.communicate()[1] for process in processes] == ["", ""]
    assert seen <= {BODY}
    assert target.read_bytes() == BODY
    assert os.listdir(target.parent) == ["file"]


def draw_on_terminal(server: str, target: Path, progress: str) -> str:
    """What a terminal would show."""
    ours, theirs = pty.openpty()
    process = start_python(
        f"fetch_file(*sys.argv[1:], progress={progress})", f"{server}/good", target, stderr=theirs
    )
    process.wait()
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # Linux's end of a terminal
        while part := os.read(ours, 1 << 16):
            shown += part
    os.close(ours)
    return shown.decode()


def test_progress_is_drawn_on_a_terminal_only(server: str, tmp_path: Path) -> None:
    shown = draw_on_terminal(server, tmp_path / "[red]file", "None")
    assert "[red]file" in shown
    assert "256.0/256.0 kB" in shown
    assert draw_on_terminal(server, tmp_path / "file", "False") == ""
    silent = "fetch_file(*sys.argv[1:], progress=True); assert 'rich' not in sys.modules"
    assert start_python(silent, f"{server}/good", tmp_path / "file").communicate()[1] == ""


# Addresses where anybody on the way can change the file.

OPEN_ADDRESS = "http://no.such.host.invalid/x"


def test_md5_alone_over_http_is_refused_before_any_connection(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("a connection")

    with monkeypatch.context() as patch:
        patch.setattr(socket, "create_connection", refuse)
        patch.setattr(socket, "getaddrinfo", refuse)
        for urls in (OPEN_ADDRESS, ["https://no.such.host.invalid/x", OPEN_ADDRESS]):
            with pytest.raises(ValueError, match=r"expected https, or a sha256, got http://no\."):
                fetch_file(urls, target, checksum=MD5)

    # With a sha256 or over https it is tried.
    for url, checksum in ((OPEN_ADDRESS, SHA256), ("https://no.such.host.invalid/x", MD5)):
        with pytest.raises(OSError, match="could not be fetched"):
            fetch_file(url, target, checksum=checksum)


@pytest.mark.parametrize("allow_downgrade", [False, True])
def test_a_redirect_does_not_leave_https_without_a_sha256(allow_downgrade: bool) -> None:
    handler = _WebRedirects(allow_downgrade=allow_downgrade)
    request = urllib.request.Request("https://host/x")
    arguments = (request, io.BytesIO(), 302, "Found", HTTPMessage())
    for url in ("https://other/x", "http://127.0.0.1:1/x"):
        assert handler.redirect_request(*arguments, url) is not None
    if allow_downgrade:
        assert handler.redirect_request(*arguments, "http://other/x") is not None
        return
    with pytest.raises(MirrorError, match="redirected from https to http://other/x"):
        handler.redirect_request(*arguments, "http://other/x")
