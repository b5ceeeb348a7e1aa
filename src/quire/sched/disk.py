"""The disk tier, as the scheduler sees it: which pages it has, and what is read and written.

    written   a page whose record in host memory has landed, at once: a process that is killed loses little
    read      into records of host memory, for a request that waits; from there the pages are fetched like others

Ranks do the work in threads, each with its share of the pages; a page is there if all of them have it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from quire.cache.policies import Key
from quire.cache.tiers import STATES, Content, HostTier, record_name
from quire.sched.roster import Roster
from quire.sched.speeds import Speeds
from quire.types.request import Request

ON_DISK = -1  # in place of a record
MAX_WRITES = 256  # records that wait to be written; others are not written
READ_TIMEOUT_S = 10.0  # after which a request goes on without its pages
Pairs = Sequence[tuple[tuple[int, ...], bytes]]  # records of a page or snapshot, and its name on disk
Done = Sequence[tuple[int, bool]]  # first records, and whether it worked
DiskReport = tuple[Done, Done, Sequence[bytes]]  # of a rank: what was read and written, and names that were removed


@dataclass(eq=False)
class Read:
    """Pages that are read for a request, and others that wait for some of them."""

    began: float
    left: set[int]  # records
    waiting: list[Request] = field(default_factory=list)
    pages: int = 0  # that are read until its end, with those before it


class DiskTraffic:
    def __init__(self, tier: HostTier, roster: Roster, ranks: Sequence[tuple[bytes, Sequence[bytes]]]) -> None:
        """ranks: the secret of each rank's store, and the names of its records."""
        self._tier, self._roster, self._secret = tier, roster, ranks[0][0]
        self._names = set.intersection(*(set(names) if secret == self._secret else set[bytes]() for secret, names in ranks))
        self._reading: dict[int, tuple[Content, Read]] = {}  # by record
        self._writing: dict[int, bytes] = {}  # record -> name
        self._reads: list[tuple[tuple[int, ...], bytes]] = []  # not sent to the ranks yet
        self._writes: list[tuple[tuple[int, ...], bytes]] = []
        self._reports: Counter[tuple[str, int]] = Counter()  # of a record, by ranks
        self._failed: set[tuple[str, int]] = set()
        self._tried: dict[Request, int] = {}  # preemptions of a request when it last waited
        self.read = self.written = self.lost = 0  # ever: records read and written; pages and snapshots that did not come
        self.speeds = Speeds()
        self._removals: list[bytes] = []  # names, not sent to the ranks yet
        tier.on_landed, tier.on_forget = self._write, self._remove
        roster.on_leave.append(self._forget)

    @property
    def pages(self) -> int:
        return len(self._names)

    @property
    def pending(self) -> bool:
        """Return whether ranks read or write."""
        return bool(self._reading or self._writing)

    def find(self, key: Key, tokens: bytes) -> int | None:
        """Return the record of this content, or ON_DISK."""
        record = self._tier.find(key, tokens)
        if record is None and record_name(key, self._secret) in self._names:
            return ON_DISK
        return record

    def may_wait(self, request: Request) -> bool:
        return bool(self._names) and self._tried.get(request) != request.preemptions

    def hold(self, request: Request, contents: Sequence[Content], now: float) -> bool:
        """Read these pages, which are on disk, as far as host memory has room; with a snapshot all of them, or nothing.

        Return whether the request waits for them.
        """
        if any(now - read.began > READ_TIMEOUT_S for _, read in self._reading.values()):
            return False  # the disk is too slow: others have stopped waiting for it
        other = next((read for content, read in self._reading.values() if content in contents), None)
        if other is not None:
            other.waiting.append(request)
            return True
        self._tried[request] = request.preemptions
        read, most = Read(now, set(), [request]), max(1, self._tier.records // 2)
        if contents[-1][0][0] == STATES and len(contents) > 1 and self._tier.records_of(contents) > most:
            return False
        for content in contents[:most]:
            record = self._tier.reserve(content)
            if record is None:
                break
            read.left.add(record)
            self._reading[record] = content, read
            self._reads.append((self._tier.all_records(record), record_name(content[0], self._secret)))
        read.pages = self._pages_being_read
        return bool(read.left)

    def pays(self, pages: int, tokens: int) -> bool:
        """Return whether reading these pages, after those that are being read, is faster than computing their tokens."""
        return self.speeds.pays(self._pages_being_read + pages, tokens)

    @property
    def _pages_being_read(self) -> int:
        return self._tier.records_of(content for content, _ in self._reading.values())

    def commands(self) -> tuple[Pairs, Pairs, Sequence[bytes]]:
        """Return what ranks shall read, write, and then remove, since the last call."""
        found = self._reads, self._writes, self._removals
        self._reads, self._writes, self._removals = [], [], []
        return found

    @property
    def has_commands(self) -> bool:
        return bool(self._reads or self._writes or self._removals)

    def reported(self, ranks: Sequence[DiskReport], now: float) -> None:
        """Take in what the ranks report; each reports each record once."""
        for reads, writes, removed in ranks:
            self._names.difference_update(removed)
            for kind, done in (("read", reads), ("write", writes)):
                for record, worked in done:
                    self._note(kind, record, worked, len(ranks), now)
        for _, read in self._reading.values():
            if now - read.began > READ_TIMEOUT_S:
                self._go_on(read)

    def clear(self) -> None:
        """Nothing on disk counts any more; what is being read has been forgotten by the host tier."""
        self._names.clear()
        for (record, *_), _ in self._writes:
            del self._writing[record]
            self._tier.unpin(record)
        self._writes, self._removals = [], []
        self._writing = dict.fromkeys(self._writing, b"")

    def _note(self, kind: str, record: int, worked: bool, ranks: int, now: float) -> None:
        self._reports[kind, record] += 1
        if not worked:
            self._failed.add((kind, record))
        if self._reports[kind, record] < ranks:
            return
        del self._reports[kind, record]
        worked = (kind, record) not in self._failed
        self._failed.discard((kind, record))
        if kind == "read":
            self._end_read(record, worked, now)
            return
        name, size = self._writing.pop(record), len(self._tier.all_records(record))
        self._tier.unpin(record)
        if worked and name:
            self._names.add(name)
            self.written += size

    def _end_read(self, record: int, worked: bool, now: float) -> None:
        content, read = self._reading.pop(record)
        self._tier.arrived(record, worked)
        if worked:
            self.read += self._tier.records_of([content])
        else:
            self.lost += 1
            self._names.discard(record_name(content[0], self._secret))
        read.left.discard(record)
        if not read.left:
            self.speeds.fetched(read.pages, now - read.began)
            self._go_on(read)

    def _go_on(self, read: Read) -> None:
        waiting, read.waiting = read.waiting, []
        for request in waiting:
            self._roster.mark_ready(request.spec.id, "pages")

    def _write(self, record: int, content: Content) -> None:
        name = record_name(content[0], self._secret)
        if name in self._names or len(self._writing) >= MAX_WRITES:
            return
        self._tier.pin(record)
        self._writing[record] = name
        self._writes.append((self._tier.all_records(record), name))

    def _remove(self, keys: Iterable[Key]) -> None:
        """Remove wrong content, also where it is being written."""
        for name in [record_name(key, self._secret) for key in keys]:
            if name in self._names or name in self._writing.values():
                self._names.discard(name)
                self._removals.append(name)
                self._writing = {record: b"" if each == name else each for record, each in self._writing.items()}

    def _forget(self, request: Request) -> None:
        self._tried.pop(request, None)
