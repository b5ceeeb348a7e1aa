"""Quire's cache directory, and small JSON files of measurements of this machine in it.

A store maps keys, which name everything that a measurement depends on, to values. A missing or broken store only means that
the measurement is repeated.
"""

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from quire.files.reading import open_regular

MAX_STORE_BYTES = 8 << 20
LOCK_TIMEOUT_S, LOCK_POLL_S = 60.0, 0.05
STORE_ERRORS = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)  # of broken content


def cache_directory() -> Path:
    if given := os.environ.get("QUIRE_CACHE"):
        return Path(given).expanduser()
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given) / "quire"
    return Path.home() / ".cache" / "quire"


def read_json_store(path: Path) -> dict[str, Any]:
    """Return the content of a store; raise OSError or one of `STORE_ERRORS`. A FIFO is refused, so this never blocks."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_STORE_BYTES:
            raise OSError(f"must have at most {MAX_STORE_BYTES:,} bytes; got {size:,}")
        return dict(json.loads(file.read(MAX_STORE_BYTES)))


def store_problem(error: Exception) -> str:
    """Describe an error of `read_json_store`, or of checking what it returned, for a log line."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "its content is not what Quire writes"


def write_json_store(path: Path, known: Mapping[str, Any]) -> None:
    """Replace a store atomically. The last of two concurrent writers wins; without write permission nothing happens."""
    own = path.with_suffix(f".{os.getpid()}-{threading.get_native_id()}")
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        own.unlink(missing_ok=True)
        try:
            with own.open("x", encoding="utf-8") as file:
                file.write(json.dumps(known, indent=1))
            own.replace(path)
        finally:
            own.unlink(missing_ok=True)


@contextmanager
def lock_store(path: Path) -> Iterator[None]:
    """Hold a lock on the store's directory, so that one process measures and the others find the result.

    If there is no such directory, or another process holds it for too long, nothing is locked.
    """
    with ExitStack() as held:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
            held.callback(os.close, descriptor)
            deadline = time.monotonic() + LOCK_TIMEOUT_S
            while not _lock(descriptor) and time.monotonic() < deadline:
                time.sleep(LOCK_POLL_S)
        yield


def _lock(descriptor: int) -> bool:
    """Return whether this process holds the lock now."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the descriptor is closed, also by a crash
    except BlockingIOError:
        return False
    return True
