"""A proxy before a web server that injects faults: 500s, resets, slow and truncated answers."""

import http.client
import http.server
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

KINDS = ("500", "reset", "truncated", "slow")
SLOW_S = 0.5


class FlakyProxy:
    """Forwards to a server on this machine; every n-th GET fails, in each way in turn."""

    def __init__(self, port: int, every: int) -> None:
        self.target_port = port
        self.every = every
        self.gets = 0
        self.faults: Counter[str] = Counter()
        self.lock = threading.Lock()
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                proxy.forward(self)

            do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward

            def log_message(self, *args: Any) -> None: ...

        class Server(http.server.ThreadingHTTPServer):
            def handle_error(self, *args: Any) -> None: ...  # a client that went away

        self.http = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def next_fault(self, method: str) -> str | None:
        if method != "GET" or not self.every:
            return None
        with self.lock:
            self.gets += 1
            if self.gets % self.every:
                return None
            kind = KINDS[self.faults.total() % len(KINDS)]
            self.faults[kind] += 1
            return kind

    def forward(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        length = int(handler.headers.get("Content-Length") or 0)
        sent = handler.rfile.read(length)
        fault = self.next_fault(handler.command)
        if fault == "500":
            handler.send_response(500)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        connection = http.client.HTTPConnection("127.0.0.1", self.target_port, timeout=60)
        headers = {name: value for name, value in handler.headers.items() if name != "Connection"}
        connection.request(handler.command, handler.path, sent, headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        if fault == "slow":
            time.sleep(SLOW_S)
        handler.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                handler.send_header(name, value)
        declared = answer.getheader("Content-Length") if handler.command == "HEAD" else None
        handler.send_header("Content-Length", declared or str(len(body)))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        if fault in ("reset", "truncated") and len(body) > 1:
            handler.wfile.write(body[: len(body) // 2])
            handler.wfile.flush()
            if fault == "reset":
                linger = struct.pack("ii", 1, 0)
                handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            handler.close_connection = True
            handler.connection.close()
            return
        handler.wfile.write(body)


@contextmanager
def flaky_proxy(port: int, every: int) -> Iterator[FlakyProxy]:
    """A proxy before the server at that port, as long as the block lasts."""
    proxy = FlakyProxy(port, every)
    try:
        yield proxy
    finally:
        proxy.http.shutdown()
        proxy.http.server_close()
