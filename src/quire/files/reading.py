"""Read files of a checkpoint, which may be broken or hostile, with errors that name the file and the cause in one line.

`reading` wraps all code that interprets a checkpoint; errors of Quire pass through it unchanged.
"""

import errno
import logging
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from quire.types.errors import ModelError, QuireError
from quire.types.json_text import read_json

MODEL_SUFFIXES = frozenset({".json", ".jinja", ".model", ".txt", ".tiktoken", ".safetensors", ".gguf", ".bin"})
MAX_JSON_BYTES = 256 << 20  # the index of the largest models has some megabytes
MAX_SHOWN_CHARS = 200  # of a foreign error or value, in a message

logger = logging.getLogger(__name__)


def error_summary(error: BaseException) -> str:
    """Return type and message of an error of another library in one short line."""
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:MAX_SHOWN_CHARS]}{'...' if len(words) > MAX_SHOWN_CHARS else ''}"


def shown(value: Any) -> str:
    """Return a value from a file as text for a message, shortened."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}..."


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Raise any error of the block as ModelError "<path>: <what> (<error>)"."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, QuireError):
            raise
        logger.debug("%s: %s", path, what, exc_info=True)
        raise ModelError(f"{path}: {what} ({error_summary(error)})") from error


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; raise OSError for anything else. Opening a FIFO would block until a writer comes, and
    a device such as /dev/zero has no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def check_regular_files(directory: Path) -> None:
    """Raise ModelError if a file of a model directory is a FIFO, a socket or a device: other libraries read these files, too,
    and would wait for ever."""
    for path in sorted(directory.iterdir()):
        if path.suffix in MODEL_SUFFIXES and path.exists() and not (path.is_file() or path.is_dir()):
            raise ModelError(f"{path}: cannot be read: it is not a regular file")


def read_bytes(path: Path, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return the content of a regular file of at most `max_bytes`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ModelError(f"{path}: is too large; got {size:,} bytes, at most {max_bytes:,} are read")
        return file.read(max_bytes)


def read_text(path: Path, max_bytes: int = MAX_JSON_BYTES) -> str:
    """As `read_bytes`, decoded from UTF-8."""
    return read_bytes(path, max_bytes).decode()


def read_object(
    path: Path, hook: Callable[[dict[str, Any]], Any] | None = None, max_bytes: int = MAX_JSON_BYTES
) -> dict[str, Any] | None:
    """Return the JSON object in a regular file, or None if there is no file. `hook` may replace the objects in it."""
    try:
        value = read_json(read_text(path, max_bytes), hook)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelError(f"{path}: cannot be read as JSON ({error_summary(error)})") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must be a JSON object, but is a {type(value).__name__}")
    return value
