"""The host tier of the fake executor. It checks that nothing is read before it has arrived."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from quire.engine.executor.fake_model import Words
from quire.types.errors import EngineError
from quire.types.plan import StepPlan


class FakeTier:
    """Records by number. A page has the content of its record only when its fetch has been reported."""

    def __init__(self, cells: Words, sums: Words) -> None:
        """cells [pages, page_size], sums [pages]: the pages of the device."""
        self._cells, self._sums, self._blank = cells, sums, cells[0].copy()
        self.records: dict[int, Words] = {}
        self.arriving: dict[int, tuple[Words, bool]] = {}  # page -> content, and whether it is right
        self.is_broken: Callable[[int], bool] = lambda _: False  # whether the content of a record does not come back
        self.disk: dict[bytes, Words] | None = None  # by name; None: there is no disk tier
        self.is_lost: Callable[[bytes], bool] = lambda _: False  # whether a record on disk does not come back
        self._reads: list[tuple[int, bytes]] = []
        self._writes: list[tuple[int, bytes]] = []
        self._removals: list[bytes] = []
        self.is_late: Callable[[int], bool] = lambda _: False  # whether a page is reported later

    def move(self, plan: StepPlan) -> None:
        if not len(plan.store_page) and not len(plan.fetch_page):
            return
        if set(plan.store_page.tolist()) & set(self.arriving):
            raise EngineError("a page was stored before it had arrived")
        for page, record in zip(plan.store_page.tolist(), plan.store_record.tolist(), strict=True):
            self.records[record] = self._cells[page].copy()
        for record, page in zip(plan.fetch_record.tolist(), plan.fetch_page.tolist(), strict=True):
            if record not in self.records:
                raise EngineError(f"record {record} was fetched, where nothing was stored")
            if page in self.arriving:
                raise EngineError(f"page {page} was fetched twice")
            self.arriving[page] = self.records[record].copy(), not self.is_broken(record)
            self._set(page, self._blank)

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
        self, reads: Sequence[tuple[int, bytes]], writes: Sequence[tuple[int, bytes]], removals: Sequence[bytes]
    ) -> None:
        self._reads += reads
        self._writes += writes
        self._removals += removals

    def take_read_and_written(self) -> tuple[list[tuple[int, bool]], list[tuple[int, bool]], list[bytes]]:
        assert self.disk is not None
        if self.is_late(0):
            return [], [], []
        reads, writes = [], []
        for record, name in self._reads:
            right = name in self.disk and not self.is_lost(name)
            if right:
                self.records[record] = self.disk[name].copy()
            reads.append((record, right))
        for record, name in self._writes:
            self.disk[name] = self.records[record].copy()
            writes.append((record, True))
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

    def _set(self, page: int, content: npt.NDArray[np.uint64]) -> None:
        self._cells[page] = content
        self._sums[page] = content.sum(dtype=np.uint64)
