"""Files in shared memory that hold preprocessed images and videos, and the cache of processed items.

A process has one directory of files. A file lives as long as an object of this process refers to it: the cache, or an item of
an unfinished request. The owner makes it, empty, so that a media process whose job was abandoned cannot make it again after
its removal. The directory goes when the process ends; the directory of a process that was killed is removed by the
next one that starts. A locked file in it shows that its owner runs, also in another container.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO

from quire.features.media.workers import wire
from quire.types.media import MediaArray, Modality

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "quire-media-"


class SharedFile:
    """A file that is removed when the last reference to this object is gone."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.remove = weakref.finalize(self, _remove, self.path, os.getpid())
        self.remove.atexit = False

    def keep_for(self, owner: object) -> None:
        """Let the file live as long as `owner`."""
        weakref.finalize(owner, _let_go, self).atexit = False


@contextlib.contextmanager
def removed_on_error(*files: SharedFile | None) -> Iterator[None]:
    """Remove files at once if an error is raised: its traceback may keep them alive."""
    try:
        yield
    except BaseException:
        for file in files:
            if file is not None:
                file.remove()
        raise


def _let_go(file: SharedFile) -> None:
    """The registry of finalizers has dropped its reference to the file."""


class SharedFiles:
    """The files of this process."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or (SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir()))
        sweep(parent)
        self.directory, lock = _claim(parent)
        self._numbers = count()
        self.close = weakref.finalize(self, _close, self.directory, lock, os.getpid())

    def new(self) -> SharedFile:
        """Make an empty file."""
        path = self.directory / f"{next(self._numbers):x}"
        path.touch(0o600, exist_ok=False)
        return SharedFile(path)


def open_for_writing(path: str) -> IO[bytes]:
    """Open a file that its owner made, for a media process. FileNotFoundError: its owner has removed it."""
    file = Path(path).open("r+b")  # noqa: SIM115
    file.truncate()
    return file


def _claim(parent: Path) -> tuple[Path, int]:
    """Make a directory, and lock its file "owner". Try again if another process removed the directory before the lock."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        with contextlib.suppress(OSError):
            lock = os.open(directory / "owner", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if (directory / "owner").exists():
                    return directory, lock
            except OSError:
                pass
            os.close(lock)


def sweep(parent: Path) -> None:
    """Remove directories whose owner has ended."""
    for directory in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            lock = os.open(directory / "owner", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(lock)


def _remove(path: str, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            Path(path).unlink()


def _close(directory: Path, lock: int, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


@dataclass(frozen=True)
class Processed:
    """An image or a video that is ready for any prompt."""

    modality: Modality
    digest: str
    arrays: tuple[MediaArray, ...]
    tokens: tuple[int, ...]
    before: str
    after: str
    embedded: tuple[tuple[int, int], ...]
    grid: tuple[int, int, int] | None
    interval: float
    bytes: int

    @classmethod
    def of(cls, modality: Modality, item: wire.ProcessedItem, file: SharedFile | None) -> "Processed":
        """file: has the arrays, if they are in one"""
        path = file.path if file is not None and item.in_file else ""
        arrays = tuple(MediaArray(one.name, one.dtype, tuple(one.shape), one.data, path, one.offset) for one in item.arrays)
        if file is not None and item.in_file:
            for array in arrays:
                file.keep_for(array)
        size = sum(_bytes(array) for array in arrays)
        return cls(
            modality, item.digest, arrays, tuple(item.tokens), item.before, item.after, tuple(item.embedded), item.grid,
            item.interval, size,
        )  # fmt: skip


def _bytes(array: MediaArray) -> int:
    size = {"float32": 4, "int64": 8, "bool": 1}[array.dtype]
    for length in array.shape:
        size *= length
    return size


class ProcessorCache:
    """Processed items by the digest of their source, least recently used first out. Any thread may use it."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._items: OrderedDict[str, Processed] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = self.queries = self.hits = 0
        self.on_query: Callable[[bool], None] = lambda hit: None  # noqa: ARG005

    def get(self, key: str) -> Processed | None:
        with self._lock:
            self.queries += 1
            item = self._items.get(key)
            if item is not None:
                self.hits += 1
                self._items.move_to_end(key)
        self.on_query(item is not None)
        return item

    def put(self, key: str, item: Processed) -> None:
        with self._lock:
            if item.bytes > self._most or key in self._items:
                return
            self._items[key] = item
            self.bytes += item.bytes
            while self.bytes > self._most:
                _, oldest = self._items.popitem(last=False)
                self.bytes -= oldest.bytes

    def clear(self) -> None:
        with self._lock:
            self._items.clear()
            self.bytes = 0
