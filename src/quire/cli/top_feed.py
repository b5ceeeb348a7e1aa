"""A viewer of /engine/events: connects, and again when that was lost, and keeps what was told. Standard library only."""

import http.client
import json
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from quire.types.errors import ConfigError

PATH = "/engine/events"
SILENCE = 30.0  # seconds; a server that lives says so every ten
PAUSES = (0.5, 1.0, 2.0, 5.0)  # seconds before trying again
HOPELESS = {
    401: "a key is needed: --api-key KEY, or QUIRE_API_KEY",
    403: "this key is not let in",
    404: "there is no /engine/events: the server was started with --disable-page, or is not Quire",
}


@dataclass
class Known:
    """What the events have told so far."""

    hello: dict[str, Any] = field(default_factory=dict)
    engines: dict[int, dict[str, Any]] = field(default_factory=dict)  # by number
    stats: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)  # the latest of every engine
    pages: dict[str, Any] = field(default_factory=dict)
    cells: str = ""
    open: dict[str, dict[str, Any]] = field(default_factory=dict)  # requests by key
    finished: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=64))  # the newest last
    lost: int = 0  # events that we were too slow for
    last: float = 0.0  # the server's clock, by the latest event

    def hear(self, kind: str, event: dict[str, Any]) -> None:
        self.last = event.get("t", self.last)
        match kind:
            case "hello":
                self.hello = event
            case "snapshot":
                self.open, self.finished, self.cells = {}, deque(maxlen=64), ""
                self.stats, self.engines, self.steps = event["stats"], {}, {}
                for one in (event, *event.get("others", ())):
                    self.engines[one["engine"]["engine"]] = one["engine"]
                    if one["step"]:
                        self.steps[one["step"].get("engine", 0)] = one["step"]
                self._see_pages(event["pages"])
                self._see_requests(sorted(event["requests"], key=lambda request: request["since"]))
            case "requests":
                self._see_requests(event["requests"])
            case "pages":
                self._see_pages(event)
            case "engine":
                self.engines[event["engine"]] = event
            case "stats":
                self.stats = event
            case "step":
                self.steps[event.get("engine", 0)] = event
            case "gap":
                self.lost += event["lost"]

    def _see_requests(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            self.open.pop(request["key"], None)
            if request["state"] == "finished":
                self.finished.append(request)
            else:
                self.open[request["key"]] = request

    def _see_pages(self, event: dict[str, Any]) -> None:
        first, cells = event["first"], event["cells"]
        self.pages = event
        self.cells = self.cells[:first].ljust(first, ".") + cells + self.cells[first + len(cells) :]


class TopFeed(threading.Thread):
    """Reads until the process ends. `news` are events not taken yet; what is `known` may be read under `lock`."""

    def __init__(self, url: str, key: str | None) -> None:
        super().__init__(name="quire-top", daemon=True)
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"not the address of a server: {url!r}; give one as http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._parts, self._key = parts, key
        self.lock = threading.Lock()
        self.known = Known()
        self.news: deque[tuple[str, dict[str, Any]]] = deque(maxlen=256)
        self.trouble: str | None = "connecting"  # why nothing comes
        self.refused: str | None = None  # why nothing ever will
        self.wake = threading.Event()

    def run(self) -> None:
        failures = 0
        while self.refused is None:
            try:
                if self._read():
                    failures = 0
                    self.trouble = "the server ended the stream; trying again"
            except OSError as error:
                self.trouble = f"no connection: {error.strerror or error or 'it was lost'}; trying again"
            except (http.client.HTTPException, ValueError):
                self.trouble = "the answer cannot be read; trying again"
            self.wake.set()
            time.sleep(PAUSES[min(failures, len(PAUSES) - 1)])
            failures += 1

    def _read(self) -> bool:
        """Until the stream ends. True if there was one."""
        parts, host = self._parts, str(self._parts.hostname)
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, parts.port, timeout=SILENCE, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=SILENCE)
        try:
            headers = {"Accept": "text/event-stream"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
            connection.request("GET", parts.path.rstrip("/") + PATH, headers=headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                self.refused = HOPELESS.get(answer.status)
                self.trouble = f"the server says {answer.status}; trying again"
                return False
            kind = ""
            while line := answer.readline():
                if line.startswith(b"event: "):
                    kind = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    self._hear(kind, json.loads(line[6:]))
            return True
        finally:
            connection.close()

    def _hear(self, kind: str, event: dict[str, Any]) -> None:
        with self.lock:
            self.trouble = None
            self.known.hear(kind, event)
            self.news.append((kind, event))
        self.wake.set()
