"""Quire's cache directory, and small JSON files of measurements of this machine in it.

A store maps keys, which name everything that a measurement depends on, to values. A missing or broken store only means that
the measurement is repeated.
"""

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.files.reading import open_regular

MAX_STORE_BYTES = 8 << 20
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
