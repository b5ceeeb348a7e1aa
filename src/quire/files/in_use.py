"""Mark the files of models as in use, so that `quire rm` refuses to remove what a running process reads.

The mark is a shared `flock` on one file of the model. The kernel releases it when the process ends, in whatever way, and
processes of other users and containers see it.
"""

import fcntl
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from quire.files.resolve import PARAMS, ModelFiles
from quire.types.errors import ModelError

CONFIG = "config.json"
MARKED_NAMES = {CONFIG, PARAMS}  # of a directory; of a GGUF model, the first shard is marked


class InUse:
    """Marks of models, which end when this object is freed or `end` is called."""

    def __init__(self, models: Iterable[ModelFiles]) -> None:
        self._descriptors: list[int] = []
        self.end = weakref.finalize(self, _close, self._descriptors)
        self.end.atexit = False
        for files in models:
            path = _marked_file(files)
            with suppress(FileNotFoundError, PermissionError):  # reading the model reports that
                self._descriptors.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK))
                _mark(self._descriptors[-1], files.name)


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def _marked_file(files: ModelFiles) -> Path:
    if files.format == "gguf":
        return files.path
    return files.path / (PARAMS if files.format == "mistral" else CONFIG)


def _mark(descriptor: int, name: str) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ModelError(f"{name}: its files are being removed by `quire rm`. Start again when it has ended") from None
    except OSError:  # a file system without locks: open descriptors still show the process's own user that it is in use
        pass


@contextmanager
def claimed(paths: Iterable[Path]) -> Iterator[list[Path]]:
    """Keep other processes from marking these files; yield those that are marked already."""
    marked = []
    with ExitStack() as stack:
        for path in _distinct(paths):
            with suppress(OSError):
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                stack.callback(os.close, descriptor)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    marked.append(path)
        yield marked


def _distinct(paths: Iterable[Path]) -> list[Path]:
    """Return one path of each file that exists; several may be links to one."""
    found: dict[tuple[int, int], Path] = {}
    for path in paths:
        with suppress(OSError):
            status = path.stat()
            found.setdefault((status.st_dev, status.st_ino), path)
    return [*found.values()]
