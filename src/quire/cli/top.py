"""`quire top [URL]`: show what a server's engine is doing, live in the terminal; without a terminal, a line per event."""

import argparse
import http.client
import json
import os
import shutil
import ssl
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from select import select
from typing import Any
from urllib.parse import urlsplit

from quire.types.errors import ConfigError

PATH = "/engine/events"
READ_TIMEOUT_S = 30.0  # a live server sends a comment every 10 s
RETRY_DELAYS_S = (0.5, 1.0, 2.0, 5.0)
FINAL_STATUSES = {  # a retry does not help
    401: "a key is needed: --api-key KEY, or QUIRE_API_KEY",
    403: "this key is not allowed",
    404: "there is no /engine/events: the server was started with --disable-page, or is not Quire",
}


@dataclass
class EngineRow:
    """The state of the engine, from all events so far."""

    hello: dict[str, Any] = field(default_factory=dict)
    engines: dict[int, dict[str, Any]] = field(default_factory=dict)  # by number
    stats: dict[str, Any] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)  # the latest of every engine
    pages: dict[str, Any] = field(default_factory=dict)
    cells: str = ""
    open: dict[str, dict[str, Any]] = field(default_factory=dict)  # requests by key
    finished: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=64))  # the newest last
    lost: int = 0  # events that this client was too slow for
    last: float = 0.0  # the server's clock, by the latest event

    def apply(self, kind: str, event: dict[str, Any]) -> None:
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
                self._update_pages(event["pages"])
                self._update_requests(sorted(event["requests"], key=lambda request: request["since"]))
            case "requests":
                self._update_requests(event["requests"])
            case "pages":
                self._update_pages(event)
            case "engine":
                self.engines[event["engine"]] = event
            case "stats":
                self.stats = event
            case "step":
                self.steps[event.get("engine", 0)] = event
            case "gap":
                self.lost += event["lost"]

    def _update_requests(self, requests: list[dict[str, Any]]) -> None:
        for request in requests:
            self.open.pop(request["key"], None)
            if request["state"] == "finished":
                self.finished.append(request)
            else:
                self.open[request["key"]] = request

    def _update_pages(self, event: dict[str, Any]) -> None:
        first, cells = event["first"], event["cells"]
        self.pages = event
        self.cells = self.cells[:first].ljust(first, ".") + cells + self.cells[first + len(cells) :]


class TopFeed(threading.Thread):
    """Reads events until the process ends. `news` are unread events; `known` may be read under `lock`."""

    def __init__(self, url: str, key: str | None) -> None:
        super().__init__(name="quire-top", daemon=True)
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"not the address of a server: {url!r}; give one as http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}"
        self._parts, self._key = parts, key
        self.lock = threading.Lock()
        self.known = EngineRow()
        self.news: deque[tuple[str, dict[str, Any]]] = deque(maxlen=256)
        self.problem: str | None = "connecting"  # why no event comes
        self.refused: str | None = None  # why the server will never send events
        self.wake = threading.Event()

    def run(self) -> None:
        failures = 0
        while self.refused is None:
            try:
                if self._read():
                    failures = 0
                    self.problem = "the server ended the stream; trying again"
            except OSError as error:
                self.problem = f"no connection: {error.strerror or error or 'it was lost'}; trying again"
            except (http.client.HTTPException, ValueError):
                self.problem = "the answer cannot be read; trying again"
            self.wake.set()
            time.sleep(RETRY_DELAYS_S[min(failures, len(RETRY_DELAYS_S) - 1)])
            failures += 1

    def _read(self) -> bool:
        """Read until the stream ends. Return whether there was a stream."""
        parts, host = self._parts, str(self._parts.hostname)
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, parts.port, timeout=READ_TIMEOUT_S, context=context
            )
        else:
            connection = http.client.HTTPConnection(host, parts.port, timeout=READ_TIMEOUT_S)
        try:
            headers = {"Accept": "text/event-stream"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
            connection.request("GET", parts.path.rstrip("/") + PATH, headers=headers)
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                self.refused = FINAL_STATUSES.get(answer.status)
                self.problem = f"the server answers {answer.status}; trying again"
                return False
            kind = ""
            while line := answer.readline():
                if line.startswith(b"event: "):
                    kind = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    self._take(kind, json.loads(line[6:]))
            return True
        finally:
            connection.close()

    def _take(self, kind: str, event: dict[str, Any]) -> None:
        with self.lock:
            self.problem = None
            self.known.apply(kind, event)
            self.news.append((kind, event))
        self.wake.set()


BARS = " ▁▂▃▄▅▆▇█"
MAP_ROWS = 6
LEGEND = ". blank  - cached  o yours  O shared  x others'"


def screen(known: EngineRow, problem: str | None, url: str, width: int, height: int) -> list[str]:
    hello, stats = known.hello, known.stats
    if not hello:
        return [_cut(f"quire top  {url}  {problem or 'connecting'}", width)]
    state = problem if problem is not None else "; ".join(_engine(known, engine) for _, engine in sorted(known.engines.items()))
    does = "" if _generates(known) else f", {', '.join(hello['tasks'])}"
    lines = [f"{hello['model']} on {hello['device']} ({hello['dtype']}{does}), Quire {hello['server']} at {url}: {state}"]
    lines += [numbers(known), *tiers(known), *_steps(known)]
    if stats and not _generates(known):
        lines.append(f"result      {_histogram(stats['ttft'], hello['ttft_bounds'])}")
    elif stats:
        lines.append(f"first token {_histogram(stats['ttft'], hello['ttft_bounds'])}")
        lines.append(f"next token  {_histogram(stats['itl'], hello['itl_bounds'])}")
    lines += ["", *_map(known, width)]
    room = max(0, height - len(lines) - 2)
    lines += ["", *_requests(known, room)]
    return [_cut(line, width) for line in lines[: height - 1]] + [_cut("q quits", width)]


def numbers(known: EngineRow) -> str:
    """Return one line about the whole server."""
    stats, pages = known.stats, known.pages
    step = next(iter(known.steps.values()), None)
    restarts = sum(engine["restarts"] for engine in known.engines.values())
    used = f"pages {pages['used']}/{pages['used'] + pages['cached'] + pages['blank']}" if pages else "pages ?"
    if known.hello and known.hello["pages"] <= known.hello["engines"]:
        used = "no KV cache"
    rates = stats.get("rates", {})
    own = f" ({step['own_running']} yours)" if step and known.hello.get("keys") else ""
    speed = f"prompt {rates.get('prompt', 0):.0f}/s  generated {rates.get('generated', 0):.0f}/s"
    if not _generates(known):
        speed = f"prompts {rates.get('finished', 0):.1f}/s  tokens {rates.get('prompt', 0):.0f}/s"
    return (
        f"running {stats.get('running', 0)}{own}  waiting {stats.get('waiting', 0)}  {used}  {speed}  "
        f"preemptions {stats.get('preemptions', 0)}  compiling {stats.get('compiling', 0)}  "
        f"restarts {restarts}"
    )


def tiers(known: EngineRow) -> list[str]:
    """Return a line about pages in host memory and on disk, if there are any."""
    found = known.stats.get("tiers")
    if found is None:
        return []
    rates, share = found["rates"], found["hits"] / found["queries"] if found["queries"] else 0.0
    line = f"host memory {found['used']}/{found['pages']}  hits {share:.0%}  stored {_bytes(rates['stored'])}/s  "
    line += f"fetched {_bytes(rates['fetched'])}/s"
    if found["on_disk"] or found["bytes"]["written"]:
        line += f"  disk {found['on_disk']}  written {_bytes(rates['written'])}/s  read {_bytes(rates['read'])}/s"
    return [f"{line}  failures {found['failures']}"]


def _bytes(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def finished(request: dict[str, Any], generates: bool = True) -> str:
    """Return a line about a finished request and the parts of its time."""
    parts = " + ".join(f"{name} {seconds:.3f}" for name, seconds in request["parts"].items())
    drawn = f"drawn {request['drawn']} " if generates else ""
    return (
        f"finished {_plain(request['id'])} {request['reason']} prompt {request['prompt']} ({request['cached']} cached) "
        f"{drawn}in {request['wall']:.3f} s = {parts}"
    )


def _generates(known: EngineRow) -> bool:
    return "generate" in known.hello.get("tasks", ("generate",))


def name(known: EngineRow, event: dict[str, Any]) -> str:
    """Return the name of the engine of an event; with several engines it has a number."""
    return f"engine {event['engine']}" if known.hello.get("engines", 1) > 1 else "engine"


def _engine(known: EngineRow, engine: dict[str, Any]) -> str:
    text, restarts = str(engine["state"]), engine["restarts"]
    if len(known.engines) > 1:
        text = f"{name(known, engine)} {text}"
    if restarts:
        text += f", {restarts} restarts, the latest: {engine['reason']}"
    return text


def _steps(known: EngineRow) -> list[str]:
    """Return a line for every engine."""
    if len(known.engines) < 2:
        return [_step(known, known.steps.get(0))]
    engines = sorted(known.engines.items())
    return [f"{name(known, engine)}: {_step(known, known.steps.get(number))}" for number, engine in engines]


def _step(known: EngineRow, event: dict[str, Any] | None) -> str:
    steps = event["steps"] if event else []
    if not steps:
        return "no step yet" if event is None else "idle"
    columns = known.hello["step_columns"]
    rows = [dict(zip(columns, step, strict=False)) for step in steps]
    last, mean = rows[-1], sum(row["ms"] for row in rows) / len(rows)
    parts = [f"step {last['step']}", f"{mean:.1f} ms", f"{last['rows']} rows", f"{last['tokens']} tokens"]
    parts += [f"{last[name]} {name}" for name in ("prompt", "drafted", "accepted", "masked", "given") if last[name]]
    return "  ".join(parts)


def _histogram(counts: Sequence[int], bounds: Sequence[float]) -> str:
    total, most = sum(counts), max(counts)
    if not total:
        return "none yet"
    bars = "".join(BARS[-(-count * (len(BARS) - 1) // most)] for count in counts)
    return f"|{bars}| half within {_within(counts, bounds, 0.5)}, 99% within {_within(counts, bounds, 0.99)}, of {total}"


def _within(counts: Sequence[int], bounds: Sequence[float], share: float) -> str:
    left = share * sum(counts)
    for count, bound in zip(counts, bounds, strict=False):
        left -= count
        if left <= 0:
            return f"{bound * 1000:.0f} ms" if bound < 1 else f"{bound:g} s"
    return f"more than {bounds[-1]:g} s"


def _map(known: EngineRow, width: int) -> list[str]:
    """Return the cells that fit; of more, evenly spaced ones."""
    cells, room = known.cells, width * MAP_ROWS
    if not cells:
        return []
    each = -(-len(cells) // room)
    shown = cells[::each]
    pages = known.hello["pages_per_cell"] * each
    scale = "" if pages == 1 else f"  (one page of {pages} is shown)"
    return [f"pages: {LEGEND}{scale}", *(shown[i : i + width] for i in range(0, len(shown), width))]


def _requests(known: EngineRow, room: int) -> list[str]:
    rows = dict[str, tuple[int, int, int]]()
    for step in known.steps.values():
        rows |= zip(step["keys"], zip(step["row"], step["computed"], step["drawn"], strict=False), strict=False)
    lines = [f"{'request':<34}{'state':<10}{'prompt':>8}{'cached':>8}{'computed':>9}{'drawn':>7}{'row':>5}{'seconds':>9}"]
    for key, request in list(known.open.items())[-room:]:
        row, computed, drawn = rows.get(key, (0, 0, request["drawn"]))
        lines.append(
            f"{_plain(request['id'])[:33]:<34}{request['state']:<10}{request['prompt']:>8}{request['cached']:>8}{computed:>9}"
            f"{drawn:>7}{row:>5}{max(0.0, known.last - request['arrived']):>9.1f}"
        )
    left = room - len(lines)
    lines += [finished(request, _generates(known)) for request in list(reversed(known.finished))[: max(0, left)]]
    return lines[:room]


def _plain(text: str) -> str:
    """Return the text without control characters, which a terminal would execute."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _cut(line: str, width: int) -> str:
    return _plain(line)[:width]


REDRAW_S = 0.2
LINE_INTERVAL_S = 1.0  # without a terminal
KEYS = ("QUIRE_API_KEY", "VLLM_API_KEY")
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # the alternate screen without a cursor, and back
HOME, CLEAR_LINE, CLEAR_REST = "\x1b[H", "\x1b[K", "\x1b[J"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "top",
        usage="%(prog)s [URL] [options]",
        help="watch a server's engine in the terminal",
        description="Shows what the engine of a running server is doing: its batch, queue, pages, times and restarts. q quits. "
        "Without a terminal it prints lines.",
    )
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="the server's address")
    parser.add_argument("--api-key", default=None, help="the server's key; default: QUIRE_API_KEY or VLLM_API_KEY")
    parser.set_defaults(run=run)


def run(namespace: argparse.Namespace) -> int:
    key = namespace.api_key or next((os.environ[name] for name in KEYS if os.environ.get(name)), None)
    feed = TopFeed(namespace.url, key)
    feed.start()
    try:
        if sys.stdout.isatty():
            _draw(feed)
        else:
            print_lines(feed)
    except KeyboardInterrupt:
        pass
    if feed.refused is not None:
        raise ConfigError(f"{feed.url}: {feed.refused}")
    return 0


def _draw(feed: TopFeed) -> None:
    with _keyboard() as quit_pressed:
        sys.stdout.write(ENTER)
        try:
            while feed.refused is None:
                width, height = shutil.get_terminal_size()
                with feed.lock:
                    lines = screen(feed.known, feed.problem, feed.url, width, height)
                sys.stdout.write(HOME + "\r\n".join(line + CLEAR_LINE for line in lines) + CLEAR_REST)
                sys.stdout.flush()
                if quit_pressed(REDRAW_S):
                    return
        finally:
            sys.stdout.write(LEAVE)
            sys.stdout.flush()


@contextmanager
def _keyboard() -> "Iterator[Any]":
    """Yield a function that waits and returns whether a key was pressed that quits."""
    if not sys.stdin.isatty():
        yield lambda seconds: time.sleep(seconds)
        return
    import termios
    import tty

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    tty.setcbreak(number)

    def wait(seconds: float) -> bool:
        return bool(select([number], [], [], seconds)[0]) and os.read(number, 64)[:1] in (b"q", b"Q", b"\x04", b"")

    try:
        yield wait
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)


def print_lines(feed: TopFeed) -> None:
    """Print what `quire top` shows without a terminal, until the server refuses."""
    problem, due = None, 0.0
    while feed.refused is None:
        feed.wake.wait()
        feed.wake.clear()
        lines = []
        with feed.lock:
            while feed.news:
                kind, event = feed.news.popleft()
                if kind == "engine":
                    why = f": {event['reason']}" if event["reason"] and event["state"] == "restarting" else ""
                    lines.append(f"{name(feed.known, event)} {event['state']}, {event['restarts']} restarts{why}")
                elif kind == "requests":
                    done = [request for request in event["requests"] if request["state"] == "finished"]
                    lines += [finished(request, _generates(feed.known)) for request in done]
                elif kind == "gap":
                    lines.append(f"{event['lost']} events were lost: this client is too slow")
            if feed.known.hello and time.monotonic() >= due and feed.problem is None:
                due = time.monotonic() + LINE_INTERVAL_S
                lines += [numbers(feed.known), *tiers(feed.known)]
            if feed.problem != problem:
                problem = feed.problem
                lines.append(f"connected to {feed.url}" if problem is None else f"{feed.url}: {problem}")
        for line in lines:
            print(time.strftime("%H:%M:%S"), line, flush=True)
