"""Copies of pages between device, host memory and disk that only take time; which pages move is the engine's own decision.

    stores, fetches   one after the other on one stream, as in `features/tiers/records.py`: rows that overwrite stored pages
                      wait until these are in buffers; on a CPU, rows wait for all copies
    disk              one thread reads, another writes; a record is read or written, then its digest is computed

`SimulatedStore` removes records as `features/tiers/disk.py` does.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.features.tiers.disk import HEADER_BYTES, MAX_SEGMENT_BYTES, SEGMENTS
from quire.features.tiers.host import STAGED_BYTES
from quire.types.plan import StepPlan

COPY_S = 10e-6  # the host's work for a copy between device and host memory
DISK_S = 100e-6  # from a command to the first byte
DIGEST_BANDWIDTH = 1e9  # bytes per second of BLAKE2b on a core
Pairs = Sequence[tuple[tuple[int, ...], bytes]]  # records of a page or snapshot, and its name on disk


@dataclass(frozen=True)
class TierSizes:
    """page: bytes of a rank's page. host, disk: bytes per second, of a rank's link and of the disk, which `ranks` share.
    disk_bytes: of one rank; 0: no disk. buffers: for stored pages. waits: rows wait for all copies, since there is one memory.
    """

    page: int
    host: float
    ranks: int = 1
    disk: float = 0.0
    disk_bytes: int = 0
    buffers: int = 2
    waits: bool = False


class SimulatedStore:
    """The names of a store's records, without content."""

    def __init__(self, max_bytes: int, record_bytes: int) -> None:
        self._max, self._record = max_bytes, HEADER_BYTES + record_bytes
        self._limit = max(self._record, min(MAX_SEGMENT_BYTES, max(1, max_bytes // SEGMENTS)))
        self._segment_of: dict[bytes, int] = {}
        self._segments: OrderedDict[int, list[bytes]] = OrderedDict()  # used longest ago first; with removed names
        self._open, self._last = -1, 0  # the segment that is written to, and the newest

    @property
    def names(self) -> list[bytes]:
        return list(self._segment_of)

    def put(self, name: bytes, count: int = 1) -> tuple[bool, list[bytes]]:
        """Add a page, or a snapshot of the size of `count` pages. Return whether it is there now, and the names that were
        removed for it."""
        if name in self._segment_of:
            return True, []
        if count * self._record > self._max:
            return False, []
        removed = list[bytes]()
        while (sum(map(len, self._segments.values())) + count) * self._record > self._max:
            removed += self._remove_oldest()
        limit = max(self._limit, count * self._record)
        if self._open not in self._segments or (len(self._segments[self._open]) + count) * self._record > limit:
            self._last += 1
            self._open = self._last
            self._segments[self._open] = []
        self._segments[self._open] += [name] * count
        self._segment_of[name] = self._open
        return True, removed

    def get(self, name: bytes) -> bool:
        number = self._segment_of.get(name)
        if number is not None:
            self._segments.move_to_end(number)
        return number is not None

    def remove(self, name: bytes) -> None:
        self._segment_of.pop(name, None)

    def _remove_oldest(self) -> list[bytes]:
        number, names = self._segments.popitem(last=False)
        gone = [name for name in dict.fromkeys(names) if self._segment_of.get(name) == number]
        for name in gone:
            del self._segment_of[name]
        return gone


@dataclass
class Worker:
    """Does one thing after the other."""

    free: float = 0.0
    ends: deque[tuple[float, Any]] = field(default_factory=deque)  # when each ends that has not been reported, and what it is

    def run(self, now: float, seconds: float, item: Any = None) -> float:
        """Return when something that can begin now ends. item: what `take` returns then; None: nothing."""
        self.free = max(self.free, now) + seconds
        if item is not None:
            self.ends.append((self.free, item))
        return self.free

    def take(self, now: float) -> list[Any]:
        """Return what has ended since the last call, in order."""
        found = []
        while self.ends and self.ends[0][0] <= now:
            found.append(self.ends.popleft()[1])
        return found


class SimulatedTiers:
    """What `TiersPart` is to the engine; `now` is set before each call."""

    def __init__(self, sizes: TierSizes) -> None:
        self.sizes = sizes
        self._copy_s = COPY_S + sizes.page / sizes.host
        self._disk_s = DISK_S + sizes.page / DIGEST_BANDWIDTH
        self._disk_s += sizes.ranks * sizes.page / sizes.disk if sizes.disk_bytes else 0.0
        self._copies, self._reader, self._writer = Worker(), Worker(), Worker()
        self._stored = 0.0  # when the latest store is in host memory
        self._emptied = deque([0.0] * sizes.buffers, sizes.buffers)  # when each buffer is copied, the next one to use first
        self.store = SimulatedStore(sizes.disk_bytes, sizes.page)
        self.now = 0.0

    @property
    def due(self) -> float | None:
        """Return when something ends; None: nothing runs."""
        return min((worker.ends[0][0] for worker in (self._copies, self._reader, self._writer) if worker.ends), default=None)

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of the tiers, as `EngineCore` does on every rank; all ranks do the same."""
        return [getattr(self, method)(*args)]

    def move(self, plan: StepPlan, now: float) -> float:
        """Begin the copies of a plan; return when its rows can run."""
        begin = now
        for count in self._parts(len(plan.store_page)):
            begin = max(begin, self._emptied[0])
            self._stored = self._copies.run(begin, count * self._copy_s)
            self._emptied.append(self._stored)
        pages = plan.fetch_page.tolist()
        for count in self._parts(len(pages)):
            part, pages = pages[:count], pages[count:]
            self._copies.run(now, count * self._copy_s, [page for page in dict.fromkeys(part) if page not in pages[:1]])
        return self._copies.free if self.sizes.waits and (len(plan.store_page) or len(plan.fetch_page)) else begin

    def take_fetched(self) -> list[tuple[int, bool]]:
        return [(page, True) for pages in self._copies.take(self.now) for page in pages]

    def read_and_write(self, reads: Pairs, writes: Pairs, removals: Sequence[bytes]) -> None:
        for records, name in reads:
            self._reader.run(self.now, len(records) * self._disk_s, (records, name))
        for records, name in writes:
            self._writer.run(max(self.now, self._stored), len(records) * self._disk_s, (records, name))
        for name in removals:
            self.store.remove(name)

    def take_read_and_written(self) -> tuple[list[tuple[int, bool]], list[tuple[int, bool]], list[bytes]]:
        read = [(records[0], self.store.get(name)) for records, name in self._reader.take(self.now)]
        written, removed = list[tuple[int, bool]](), list[bytes]()
        for records, name in self._writer.take(self.now):
            done, names = self.store.put(name, len(records))
            written.append((records[0], done))
            removed += names
        return read, written, removed

    def _parts(self, pages: int) -> list[int]:
        """Return the sizes of the parts that pages are copied in."""
        most = max(1, STAGED_BYTES // self.sizes.page)
        return [min(most, pages - first) for first in range(0, pages, most)]
