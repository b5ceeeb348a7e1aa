"""The threads of a rank that read and write records on disk, while steps run."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from quire.features.tiers.disk import DiskStore, log_others
from quire.features.tiers.host import DiskSetting

Group = tuple[int, ...]  # the records of one page or snapshot, in order
Pairs = Sequence[tuple[Group, bytes]]  # records, and names


class Records(Protocol):
    """The records in host memory."""

    @property
    def disk_bytes(self) -> int:
        """Return the bytes on disk of the largest page or snapshot, without its header."""

    def read(self, records: Group) -> tuple[bytes, memoryview]:
        """Return the tag and the content of a page or snapshot."""

    def room(self, records: Group) -> memoryview:
        """Return memory that the content of a page or snapshot is read into, before `write`."""

    def write(self, records: Group, tag: bytes, content: memoryview) -> None:
        """Take in what was read into `room`."""

    def wait(self) -> None:
        """Wait until what has been stored so far is in host memory."""


class DiskThreads:
    """One thread reads, another writes. A record that is read or written is not used for anything else meanwhile."""

    def __init__(self, setting: DiskSetting, share: str, records: Records) -> None:
        path, fingerprint = Path(setting.path).expanduser(), setting.fingerprint(share)
        self.store = DiskStore(path, fingerprint, setting.bytes, records.disk_bytes)
        if share.startswith("0 of "):  # one rank logs
            log_others(path, fingerprint)
        self._records = records
        self._reader = ThreadPoolExecutor(1, "quire-disk-reads")
        self._writer = ThreadPoolExecutor(1, "quire-disk-writes")
        self._read: SimpleQueue[tuple[int, bool]] = SimpleQueue()
        self._written: SimpleQueue[tuple[int, bool, list[bytes]]] = SimpleQueue()

    def begin(self, reads: Pairs, writes: Pairs, removals: Sequence[bytes]) -> None:
        for records, name in reads:
            self._reader.submit(self._read_one, records, name)
        for records, name in writes:
            self._writer.submit(self._write_one, records, name)
        for name in removals:
            self._writer.submit(self.store.remove, name)

    def take(self) -> tuple[list[tuple[int, bool]], list[tuple[int, bool]], list[bytes]]:
        """Return what was read and written since the last call, whether it worked, and names that were removed."""
        written = _all(self._written.get_nowait)
        removed = [name for _, _, names in written for name in names]
        return _all(self._read.get_nowait), [(record, done) for record, done, _ in written], removed

    def clear(self) -> None:
        """Remove all records, also those that wait to be written."""
        self._writer.submit(self.store.clear).result()

    def close(self) -> None:
        """Write what waits to be written, and end."""
        self._reader.shutdown(cancel_futures=True)
        self._writer.shutdown()
        self.store.close()

    def _read_one(self, records: Group, name: bytes) -> None:
        right = False
        try:
            self._records.wait()  # a copy of earlier content may still write to them
            content = self._records.room(records)
            tag = self.store.get(name, content)
            if tag is not None:
                self._records.write(records, tag, content)
                right = True
        finally:
            self._read.put((records[0], right))

    def _write_one(self, records: Group, name: bytes) -> None:
        done, removed = False, list[bytes]()
        try:
            self._records.wait()
            done, removed = self.store.put(name, *self._records.read(records))
        finally:
            self._written.put((records[0], done, removed))


T = TypeVar("T")


def _all(take: Callable[[], T]) -> list[T]:
    found: list[T] = []
    while True:
        try:
            found.append(take())
        except Empty:
            return found
