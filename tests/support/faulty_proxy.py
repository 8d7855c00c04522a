"""A proxy on loopback in front of a real HTTP server: what goes through it fails now and then.

It answers 500, before or after the server has done the work, resets connections, cuts answers off
in the middle, and lets clients wait. What happens to which request is drawn from a seed.
"""

import http.client
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = ("500", "500 after", "reset", "reset after", "cut", "slow")
SLOW_S = 0.3

# Headers that belong to one connection.
HOP_HEADERS = {"connection", "keep-alive", "transfer-encoding", "expect"}


class FaultyProxy(ThreadingHTTPServer):
    """Forwards to `port` of this machine. `faults` counts what went wrong."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int, rate: float, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target_port = port
        self.rate = rate
        self.faults: Counter[str] = Counter()
        self.request_count = 0
        self._draw = random.Random(seed)
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def next_fault(self) -> str:
        with self._lock:
            self.request_count += 1
            if self._draw.random() >= self.rate:
                return ""
            fault = self._draw.choice(FAULTS)
            self.faults[fault] += 1
            return fault

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is gone is no error here."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FaultyProxy

    def forward(self) -> None:
        body = self._read_body()
        fault = self.server.next_fault()
        if fault == "slow":
            time.sleep(SLOW_S)
        elif fault == "reset":
            self._reset()
            return
        elif fault == "500":
            self._answer(500, b"<Error><Code>InternalError</Code></Error>", {})
            return

        status, headers, content = self._ask_server(body)
        if fault == "reset after":
            self._reset()
        elif fault == "500 after":
            self._answer(500, b"<Error><Code>InternalError</Code></Error>", {})
        else:
            self._answer(status, content, headers, cut=fault == "cut")

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            chunks = []
            while size := int(self.rfile.readline().partition(b";")[0], 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _ask_server(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target_port, timeout=60)
        try:
            headers = {k: v for k, v in self.headers.items() if k.lower() not in HOP_HEADERS}
            headers["Content-Length"] = str(len(body))
            connection.request(self.command, self.path, body, headers)
            response = connection.getresponse()
            content = response.read()
            answered = {k: v for k, v in response.getheaders() if k.lower() not in HOP_HEADERS}
            return response.status, answered, content
        finally:
            connection.close()

    def _answer(
        self, status: int, content: bytes, headers: dict[str, str], *, cut: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() != "content-length":
                self.send_header(name, value)
        length = len(content)
        if self.command == "HEAD":
            named = {name.lower(): value for name, value in headers.items()}
            length = int(named.get("content-length", 0))
            content = b""
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if cut:
            self.wfile.write(content[: len(content) // 2])
            self._reset()
        else:
            self.wfile.write(content)

    def _reset(self) -> None:
        """Closes the connection so that the client's system reports a reset."""
        self.wfile.flush()
        linger = struct.pack("ii", 1, 0)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.connection.close()
        self.close_connection = True


@contextmanager
def running_proxy(port: int, rate: float, seed: int) -> Iterator[FaultyProxy]:
    """A proxy in front of a port of this machine, in a thread of its own."""
    proxy = FaultyProxy(port, rate, seed)
    thread = threading.Thread(target=proxy.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        proxy.shutdown()
        proxy.server_close()
        thread.join()
