"""Checkpoints are written by others: whatever trips over one says in one line which file it was, and why.

`reading` stands around everything that interprets a checkpoint; messages of our own pass through it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.types.errors import ModelError, QuireError
from quire.types.json_text import read_json

MOST_JSON = 256 << 20  # bytes; the index of the largest models has some megabytes
SHOWN = 200  # characters of what somebody else says

logger = logging.getLogger(__name__)


def told(error: BaseException) -> str:
    """An error of somebody else's in one short line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:SHOWN]}{'...' if len(words) > SHOWN else ''}"


def shown(value: Any) -> str:
    """A value out of a file, for a message."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """`what` could not be done if anything fails in here."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, QuireError):
            raise
        logger.debug("%s: %s", path, what, exc_info=True)
        raise ModelError(f"{path}: {what} ({told(error)})") from error


def read_object(path: Path, hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any] | None:
    """The JSON object in a file; None = there is no file. `hook` may replace the objects in it."""
    try:
        size = path.stat().st_size
        if size > MOST_JSON:
            raise ModelError(f"{path}: has {size:,} bytes; more than {MOST_JSON:,} are not read")
        value = read_json(path.read_text(encoding="utf-8"), hook)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path}: cannot be read as JSON ({told(error)})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must be a JSON object, but is a {type(value).__name__}")
    return value
