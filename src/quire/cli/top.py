"""`quire top [URL]`: what a server's engine is doing, live in the terminal; without a terminal, a line for everything new."""

import argparse
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from select import select
from typing import Any

from quire.cli.top_feed import TopFeed
from quire.cli.top_screen import finished, name, numbers, screen
from quire.types.errors import ConfigError

REDRAW = 0.2  # seconds between two pictures, at least
LINE_EVERY = 1.0  # seconds between two lines, at least, where nobody redraws
KEYS = ("QUIRE_API_KEY", "VLLM_API_KEY")
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # another screen, without a cursor; and back
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
            _print(feed)
    except KeyboardInterrupt:
        pass
    if feed.refused is not None:
        raise ConfigError(f"{feed.url}: {feed.refused}")
    return 0


def _draw(feed: TopFeed) -> None:
    with _keyboard() as asked_to_quit:
        sys.stdout.write(ENTER)
        try:
            while feed.refused is None:
                width, height = shutil.get_terminal_size()
                with feed.lock:
                    lines = screen(feed.known, feed.trouble, feed.url, width, height)
                sys.stdout.write(HOME + "\r\n".join(line + CLEAR_LINE for line in lines) + CLEAR_REST)
                sys.stdout.flush()
                if asked_to_quit(REDRAW):
                    return
        finally:
            sys.stdout.write(LEAVE)
            sys.stdout.flush()


@contextmanager
def _keyboard() -> "Iterator[Any]":
    """Gives a function that waits, and says whether a key was pressed that quits."""
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


def _print(feed: TopFeed) -> None:
    trouble, due = None, 0.0
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
                    lines += [finished(request) for request in event["requests"] if request["state"] == "finished"]
                elif kind == "gap":
                    lines.append(f"{event['lost']} events were lost: we are too slow")
            if feed.known.hello and time.monotonic() >= due and feed.trouble is None:
                due = time.monotonic() + LINE_EVERY
                lines.append(numbers(feed.known))
            if feed.trouble != trouble:
                trouble = feed.trouble
                lines.append(f"connected to {feed.url}" if trouble is None else f"{feed.url}: {trouble}")
        for line in lines:
            print(time.strftime("%H:%M:%S"), line, flush=True)
