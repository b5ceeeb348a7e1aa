"""The index of the host tier: which pages that left the device have a record in host memory, and what moves between them.

A record holds the content of one page. A page that is evicted from the pool is stored in a record by the plan that takes
the page; pages that a request needs are fetched from records by a later plan. The device does what plans say, in their order.

A snapshot of recurrent states takes several records, which are known by their first one, and move and leave together. As
pages have numbers from 1 on, the entry of a snapshot on the device is written ~entry, which is below 0.

    free ──► stored by a plan ──► landed: can be found, evicted, fetched ──► evicted, or forgotten ──► free
                                   ▲        │
                                   └────────┴── pinned while it is fetched

Only a record whose step has landed can be found: if a step fails, what its plan and later ones stored is dropped, since
the pages may not have been written. The index knows no bytes, devices or requests.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from hashlib import blake2b
from typing import Protocol

from quire.cache.policies import Evictable, Key, Recency
from quire.types.errors import EngineError

Content = tuple[Key, bytes]  # and the page's tokens
Store = tuple[int, int, int]  # page or ~entry, record, tag of its key
Fetch = tuple[int, int, int]  # record, page or ~entry, tag of its key
STATES = 255  # in place of the cache group, in the keys of snapshots
UNPLANNED = -1  # stored by the plan that is being built
READING = -2  # its content is read from disk
NAME_BYTES = 32


def record_name(key: Key, secret: bytes) -> bytes:
    """Return the name of a page outside of this process: without the secret it can neither be made nor tell the tokens."""
    return blake2b(bytes([key[0]]) + key[1], key=secret, digest_size=NAME_BYTES).digest()


def key_tag(key: Key) -> int:
    """Return 64 bits of a key. They enter a record's checksum, so that a record with the content of another key is wrong."""
    return int.from_bytes(key[1][:8], "little", signed=True) ^ key[0]


class Below(Protocol):
    """Tiers whose pages count as found."""

    def find(self, key: Key, tokens: bytes) -> int | None:
        """Return the record of this content, or None."""


class HostTier:
    def __init__(self, records: int, policy: Callable[[], Evictable] = Recency, snapshot_records: int = 1) -> None:
        """snapshot_records: that a snapshot takes"""
        self.records = records
        self._snapshot_records = snapshot_records
        self._untouched = 0  # the first record that was never used
        self._free: list[int] = []  # records below it
        self._make_policy = policy
        self._policy = policy()  # records that can be evicted
        self._index: dict[Key, int] = {}
        self._content: dict[int, Content] = {}
        self._others: dict[int, tuple[int, ...]] = {}  # the first record of a snapshot -> its other records
        self._pins: Counter[int] = Counter()
        self._storing: dict[int, int] = {}  # record -> step of the plan that stores it
        self._stores: list[Store] = []  # of the plan that is being built
        self._fetches: list[Fetch] = []  # of the same
        self._offered: list[tuple[int, Content]] = []  # pages that were published since the latest plan
        self._due: list[tuple[int, Content]] = []  # published before it: their rows were in earlier plans
        self.on_landed: Callable[[int, Content], None] | None = None  # called with each record that can be found from now on
        self.on_forget: Callable[[Iterable[Key]], None] | None = None  # called with keys whose content is wrong
        self.stored = self.dropped = 0  # ever: records that were stored; pages and snapshots that found all in use

    @property
    def used(self) -> int:
        return self._untouched - len(self._free)

    @property
    def has_offers(self) -> bool:
        """Return whether pages wait to be stored although nothing evicts them."""
        return bool(self._offered or self._due)

    def all_records(self, record: int) -> tuple[int, ...]:
        """Return all records of the page or snapshot whose first record this is, in order."""
        return record, *self._others.get(record, ())

    def _tagged(self, record: int, tag: int) -> list[tuple[int, int]]:
        """Return all records of a page or snapshot with their tags, which differ, so that they cannot be exchanged."""
        return [(each, tag ^ i << 8) for i, each in enumerate(self.all_records(record))]

    def records_of(self, contents: Iterable[Content]) -> int:
        """Return how many records these contents take together."""
        return sum(self._snapshot_records if content[0][0] == STATES else 1 for content in contents)

    def offer(self, page: int, content: Content) -> None:
        """Store a published page with a later plan: the row that fills it may be in the plan that is being built."""
        if content[0] not in self._index:
            self._offered.append((page, content))

    def evicted(self, page: int, content: Content) -> None:
        """Store a page that loses its content with the plan that is being built."""
        key = content[0]
        if (record := self._index.get(key)) is not None:
            self.touch(record)
            return
        self._store(page, content)

    def find(self, key: Key, tokens: bytes) -> int | None:
        """Return the record of this content, if it has landed."""
        record = self._index.get(key)
        if record is None or record in self._storing:
            return None
        return record if self._content[record][1] == tokens else None

    def touch(self, record: int) -> None:
        """Count a use of a record, which is evicted later for it."""
        if record in self._policy:
            self._policy.use(record)
            self._policy.add(record, 1)

    def pin(self, record: int) -> None:
        """Keep a record until `unpin`."""
        self._policy.use(record)
        self._pins[record] += 1

    def fetch(self, record: int, page: int) -> None:
        """Fetch a pinned record with the plan that is being built."""
        self._fetches.append((record, page, key_tag(self._content[record][0])))

    def holds(self, record: int, key: Key) -> bool:
        """Return whether the record still has this content."""
        content = self._content.get(record)
        return content is not None and content[0] == key

    def unpin(self, record: int) -> None:
        self._pins[record] -= 1
        self._settle(record)

    def reserve(self, content: Content) -> int | None:
        """Return the record that this content is read into, until `arrived`; None: all are in use, or one has it."""
        record = None if content[0] in self._index else self._take(content)
        if record is not None:
            self._enter(record, content)
            self._storing[record] = READING
        return record

    def arrived(self, record: int, right: bool) -> None:
        """A reserved record was read."""
        del self._storing[record]
        if not right:
            self._remove_content(record)
        self._settle(record)

    def take_moves(self, step: int, holds: Callable[[int, Content], bool]) -> tuple[list[Store], list[Fetch]]:
        """Return stores and fetches for the plan of this step. Stores come first. A snapshot is repeated for each record.

        holds: whether a page still has this content
        """
        due, self._due, self._offered = self._due, self._offered, []
        for page, content in due:
            if content[0] not in self._index and holds(page, content):
                self._store(page, content)
        for _, record, _ in self._stores:
            if record in self._storing:
                self._storing[record] = step
        stores = [(page, each, tag) for page, record, key in self._stores for each, tag in self._tagged(record, key)]
        fetches = [(each, page, tag) for record, page, key in self._fetches for each, tag in self._tagged(record, key)]
        self._stores, self._fetches = [], []
        return stores, fetches

    def landed(self, step: int) -> None:
        """The step was run: what it stored can be found."""
        for record in [record for record, by in self._storing.items() if UNPLANNED < by <= step]:
            del self._storing[record]
            if self.on_landed is not None and record in self._content:
                self.on_landed(record, self._content[record])
            self._settle(record)

    def failed(self, step: int) -> None:
        """The step was lost: drop what it and later plans store."""
        for record in [record for record, by in self._storing.items() if by == UNPLANNED or by >= step]:
            self._forget(record)
            if self._storing[record] == step:
                del self._storing[record]
                self._settle(record)

    def forget(self, keys: Iterable[Key]) -> None:
        """Remove this content, which is wrong, here and below."""
        keys = list(keys)
        for key in keys:
            if key in self._index:
                self._forget(self._index[key])
        if self.on_forget is not None:
            self.on_forget(keys)

    def forget_all(self) -> None:
        for record in list(self._index.values()):
            self._forget(record)
        self._policy = self._make_policy()  # what it learned was about this content

    def check(self) -> None:
        """Raise EngineError unless every record is in one state."""
        busy = {*self._pins, *self._storing}
        used = [each for record in [*self._policy, *busy] for each in self.all_records(record)]
        if sorted([*self._free, *used]) != list(range(self._untouched)) or self._untouched > self.records:
            raise EngineError(f"host records are lost or doubled: {self._free}, {list(self._policy)}, {busy}")
        named = {content[0]: record for record, content in self._content.items()}
        if named != self._index or not self._content.keys().isdisjoint(self._free):
            raise EngineError("the index of host records and their content disagree")

    def _store(self, page: int, content: Content) -> None:
        taken = self._take(content)
        if taken is None:
            self.dropped += 1
            return
        self._enter(taken, content)
        self._storing[taken] = UNPLANNED
        self._stores.append((page, taken, key_tag(content[0])))
        self.stored += len(self.all_records(taken))

    def _enter(self, record: int, content: Content) -> None:
        self._index[content[0]], self._content[record] = record, content
        self._policy.enter(record, content[0])

    def _take(self, content: Content) -> int | None:
        """Return a record for a page, or the first one for a snapshot; None: too many are in use."""
        count = self.records_of([content])
        if count > 1 and count > self.records - self._busy:
            return None
        while len(self._free) + self.records - self._untouched < count:
            if not len(self._policy):
                return None
            evicted = self._policy.pop()
            self._remove_content(evicted)
            self._release(evicted)
        record, *others = (self._take_one() for _ in range(count))
        if others:
            self._others[record] = tuple(others)
        return record

    def _take_one(self) -> int:
        if self._free:
            return self._free.pop()
        self._untouched += 1
        return self._untouched - 1

    @property
    def _busy(self) -> int:
        """Return how many records cannot be evicted."""
        return sum(len(self.all_records(record)) for record in {*self._pins, *self._storing})

    def _release(self, record: int) -> None:
        self._free.append(record)
        self._free += self._others.pop(record, ())

    def _settle(self, record: int) -> None:
        """Make a record that nothing moves any more findable or free."""
        if self._pins[record] or record in self._storing:
            return
        del self._pins[record]
        if record not in self._content:
            self._release(record)
        else:
            self._policy.add(record, 1)

    def _forget(self, record: int) -> None:
        self._remove_content(record)
        if record in self._policy:
            self._policy.forget(record)
            self._release(record)

    def _remove_content(self, record: int) -> None:
        content = self._content.pop(record, None)
        if content is not None:
            del self._index[content[0]]
