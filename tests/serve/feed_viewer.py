"""Somebody who watches a server's engine: every event of /engine/events, collected by a thread."""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from server_process import wait_for

from patience import PATIENCE


class FeedViewer:
    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=PATIENCE)
        self._connection.request("GET", "/engine/events", headers=headers)
        self._socket = self._connection.sock
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.numbers: list[int] = []
        self.raw = b""
        self.ended = False  # by the server, in an orderly way
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        wait_for(lambda: self.of("snapshot"))

    def _read(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException), self._connection.getresponse() as answer:
            assert answer.status == 200 and answer.headers["content-type"].startswith("text/event-stream")
            rest = b""
            while piece := answer.read1(1 << 16):
                self.raw += piece
                *whole, rest = (rest + piece).split(b"\n\n")
                for block in whole:
                    if not block.startswith(b":"):
                        number, kind, data = block.split(b"\n")
                        self.numbers.append(int(number.removeprefix(b"id: ")))
                        self.events.append((kind.removeprefix(b"event: ").decode(), json.loads(data.removeprefix(b"data: "))))
            self.ended = True

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for name, event in list(self.events) if name == kind]

    def requests(self, state: str) -> list[dict[str, Any]]:
        return [request for event in self.of("requests") for request in event["requests"] if request["state"] == state]

    def finished(self, count: int) -> list[dict[str, Any]]:
        wait_for(lambda: len(self.requests("finished")) >= count)
        return self.requests("finished")

    def settled(self) -> dict[str, Any]:
        """The numbers behind the end of all that has finished."""
        end = max(request["since"] for request in self.requests("finished"))
        wait_for(lambda: (stats := self.of("stats")) and stats[-1]["t"] > end)
        return self.of("stats")[-1]

    def close(self) -> None:
        """As a browser's tab does: the server hears of it at once."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()


@contextlib.contextmanager
def watching(url: str, key: str | None = None) -> Iterator[FeedViewer]:
    viewer = FeedViewer(url, key)
    try:
        yield viewer
    finally:
        viewer.close()
