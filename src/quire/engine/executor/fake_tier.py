"""The host tier of the fake executor. It checks that nothing is read before it has arrived."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from quire.engine.executor.fake_model import Words
from quire.types.errors import EngineError
from quire.types.plan import Ints, StepPlan


class Part(NamedTuple):
    """What a record has of a snapshot."""

    state: bytes
    number: int
    of: int


class FakeTier:
    """Records by number. A page has the content of its record only when its fetch has been reported; so has a snapshot, which
    is written ~entry and takes several records."""

    def __init__(self, cells: Words, sums: Words, states: dict[int, bytes] | None = None) -> None:
        """cells [pages, page_size], sums [pages]: the pages of the device. states: by entry."""
        self._cells, self._sums, self._blank = cells, sums, cells[0].copy()
        self._states = {} if states is None else states
        self.records: dict[int, Words | Part] = {}
        self.arriving: dict[int, tuple[list[Words | Part], bool]] = {}  # page -> content, and whether it is right
        self.is_broken: Callable[[int], bool] = lambda _: False  # whether the content of a record does not come back
        self.disk: dict[bytes, list[Words | Part]] | None = None  # by name; None: there is no disk tier
        self.is_lost: Callable[[bytes], bool] = lambda _: False  # whether a record on disk does not come back
        self._reads: list[tuple[tuple[int, ...], bytes]] = []
        self._writes: list[tuple[tuple[int, ...], bytes]] = []
        self._removals: list[bytes] = []
        self.is_late: Callable[[int], bool] = lambda _: False  # whether a page is reported later

    def move(self, plan: StepPlan) -> None:
        if not len(plan.store_page) and not len(plan.fetch_page):
            return
        if set(plan.store_page.tolist()) & set(self.arriving):
            raise EngineError("a page was stored before it had arrived")
        for page, records in _grouped(plan.store_page, plan.store_record).items():
            for number, record in enumerate(records):
                self.records[record] = self._cells[page].copy() if page > 0 else Part(self._states[~page], number, len(records))
        for page, records in _grouped(plan.fetch_page, plan.fetch_record).items():
            if missing := [record for record in records if record not in self.records]:
                raise EngineError(f"records {missing} were fetched, where nothing was stored")
            if page in self.arriving:
                raise EngineError(f"page {page} was fetched twice")
            self.arriving[page] = [self.records[record] for record in records], not any(map(self.is_broken, records))
            self._blot(page)

    def take_fetched(self) -> list[tuple[int, bool]]:
        reports = []
        for page in [page for page in self.arriving if not self.is_late(page)]:
            content, right = self.arriving.pop(page)
            if right:
                self._set(page, content)
            reports.append((page, right))
        return reports

    def disk_contents(self) -> tuple[bytes, list[bytes]] | None:
        return None if self.disk is None else (b"secret", list(self.disk))

    def read_and_write(
        self,
        reads: Sequence[tuple[tuple[int, ...], bytes]],
        writes: Sequence[tuple[tuple[int, ...], bytes]],
        removals: Sequence[bytes],
    ) -> None:
        self._reads += reads
        self._writes += writes
        self._removals += removals

    def take_read_and_written(self) -> tuple[list[tuple[int, bool]], list[tuple[int, bool]], list[bytes]]:
        assert self.disk is not None
        if self.is_late(0):
            return [], [], []
        reads, writes = [], []
        for records, name in self._reads:
            right = name in self.disk and not self.is_lost(name)
            if right:
                self.records |= zip(records, self.disk[name], strict=True)
            reads.append((records[0], right))
        for records, name in self._writes:
            self.disk[name] = [self.records[record] for record in records]
            writes.append((records[0], True))
        for name in self._removals:
            self.disk.pop(name, None)
        removed = [name for name in self.disk if self.is_lost(name)]
        self._reads, self._writes, self._removals = [], [], []
        return reads, writes, removed[:1]

    def clear_disk(self) -> None:
        if self.disk is not None:
            self.disk.clear()

    def abandon(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.arriving.pop(page, None)

    def _blot(self, page: int) -> None:
        """Make what a page or an entry has unusable."""
        if page > 0:
            self._set(page, [self._blank])
        else:
            self._states.pop(~page, None)

    def _set(self, page: int, content: "list[Words | Part]") -> None:
        if page < 0:
            self._states[~page] = _whole(content)
            return
        (cells,) = content
        if isinstance(cells, Part):
            raise EngineError(f"page {page} was fetched from a record of a snapshot")
        self._cells[page] = cells
        self._sums[page] = cells.sum(dtype=np.uint64)


def _grouped(pages: Ints, records: Ints) -> dict[int, list[int]]:
    """Return the records of each page or snapshot, in order."""
    found: dict[int, list[int]] = {}
    for page, record in zip(pages.tolist(), records.tolist(), strict=True):
        found.setdefault(page, []).append(record)
    return found


def _whole(parts: "list[Words | Part]") -> bytes:
    """Return the snapshot that these records hold together."""
    states = {part.state for part in parts if isinstance(part, Part)}
    places = [(part.number, part.of) for part in parts if isinstance(part, Part)]
    if len(states) != 1 or places != [(i, len(parts)) for i in range(len(parts))]:
        raise EngineError("the records of a snapshot do not belong together")
    return states.pop()
