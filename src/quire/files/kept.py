"""Small files of what Quire found out about a machine, beside its other files: JSON, a key for everything that the finding
depends on. Whatever is in such a file, and whatever lies in its place, only means finding out again."""

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from quire.files.reading import open_regular

MOST_BYTES = 8 << 20
WRONG = (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError)  # whatever is in the file


def read_kept(path: Path) -> dict[str, Any]:
    """Raises OSError, or one of `WRONG`. Nobody is waited for, as at the end of a pipe."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            raise OSError(f"it has {size:,} bytes; more than {MOST_BYTES:,} are not read")
        return dict(json.loads(file.read(MOST_BYTES)))


def what_is_wrong(error: Exception) -> str:
    """With what `read_kept` or a look at what it read has raised."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return "it does not say what Quire writes there"


def write_kept(path: Path, known: Mapping[str, Any]) -> None:
    """At once for whoever reads. Of two who write together the later one is kept; where nobody can write, nothing is."""
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
