"""A web server of pictures, good and hostile, for those who fetch them."""

import http.server
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        path = self.path.partition("?")[0]
        if path == "/picture":
            self._answer(200, b"picture")
        elif path == "/moved":
            self._answer(302, b"", ("Location", "/picture"))
        elif path == "/loop":
            self._answer(302, b"", ("Location", "/loop"))
        elif path.startswith("/to/"):
            self._answer(302, b"", ("Location", self.path[len("/to/") :]))
        elif path == "/gzip":
            self._answer(200, b"x", ("Content-Encoding", "gzip"))
        elif path == "/slow":
            self._slow(0.1, 50)
        elif path == "/trickle":
            self._slow(0.2, 300, 1000)
        elif path == "/steady":
            self._slow(0.1, 10)
        elif path == "/short":
            self._answer(200, b"picture", ("Content-Length", "9"))
        elif path == "/host":
            self._answer(200, self.headers["Host"].encode())
        elif path == "/endless":
            self._endless()
        elif path in self.server.files:
            self._answer(200, self.server.files[path])
        else:
            self._answer(404, b"no")

    def _answer(self, status, body, *headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            self.send_header(name, value)
        self.close_connection = True
        self.end_headers()
        self.wfile.write(body)

    def _slow(self, pause, count, declared=20):
        """Send two bytes of those declared `count` times."""
        self.send_response(200)
        self.send_header("Content-Length", str(declared))
        self.end_headers()
        for _ in range(count):
            try:
                self.wfile.write(b"xx")
            except OSError:
                return
            time.sleep(pause)

    def _endless(self):
        self.send_response(200)
        self.end_headers()
        try:
            while True:
                self.wfile.write(b"x" * 65536)
        except OSError:
            self.close_connection = True

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    files: Mapping[str, bytes]

    def handle_error(self, *args):
        """A client that is gone."""


@contextmanager
def picture_host(context: Any = None, files: Mapping[str, bytes] | None = None) -> Iterator[int]:
    """Yield the port of a server. context: of TLS. files: what it has besides, by path"""
    server = Server(("127.0.0.1", 0), Handler)
    server.files = dict(files or {})
    server.daemon_threads = True
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()
