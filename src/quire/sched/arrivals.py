"""Requests that wait for pages of the host tier, and what is fetched for them.

    head of the queue ──► hold: pages are allocated, a plan fetches them ──► every rank has reported ──► queue
                                                                               pages become cached pages

A request whose prefix continues in the host tier waits outside the queue while the pages are fetched, unless computing them is
estimated to be faster. The arrived pages are published like computed ones, and the request finds them by the usual
search. It waits once per admission; what did not arrive, or was evicted again, is computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.cache.pool import NULL
from quire.cache.tables import Tables
from quire.cache.tiers import Content, HostTier
from quire.sched.disk import ON_DISK, DiskTraffic
from quire.sched.plan_builder import PlanBuilder
from quire.sched.roster import Roster
from quire.types.request import Request
from quire.types.stats import NO_TIERS, TierCounts

DECAY = 0.95  # of what was measured, per measurement
Report = Sequence[tuple[int, bool]]  # of a rank: pages whose fetch ended, and whether their content is right


@dataclass(eq=False)
class Fetch:
    """Pages on their way to the device."""

    step: int
    began: float
    pages: dict[int, tuple[int, Content]]  # page -> its record, and its content
    held: list[int]  # pages with a reference until the end, in the order of positions
    waiting: list[Request]
    missing: dict[int, int] = field(default_factory=dict)  # page -> ranks that have not reported it
    wrong: set[int] = field(default_factory=set)  # pages


class Speeds:
    """Estimates of how long it takes to fetch pages and to compute tokens."""

    def __init__(self) -> None:
        self._least, self._pages, self._tokens = 0.0, 0.0, 0.0  # seconds of a fetch; pages and tokens per second

    def fetched(self, pages: int, seconds: float) -> None:
        seconds = max(seconds, 1e-6)
        self._least = min(self._least / DECAY, seconds) if self._least else seconds
        self._pages = max(self._pages * DECAY, pages / seconds)

    def computed(self, tokens: int, seconds: float) -> None:
        self._tokens = max(self._tokens * DECAY, tokens / max(seconds, 1e-6))

    def pays(self, pages: int, tokens: int) -> bool:
        """Return whether fetching these pages is faster than computing their tokens; True while it is unknown."""
        if not self._pages or not self._tokens or max(self._least, pages / self._pages) <= tokens / self._tokens:
            return True
        self._least *= DECAY  # so that it is tried again
        self._pages /= DECAY
        return False


class Arrivals:
    def __init__(self, tables: Tables, tier: HostTier, roster: Roster, page_bytes: int, mode: str = "auto") -> None:
        """mode: how preempted requests get their pages back: swap, recompute, or auto, as `Speeds` estimates."""
        self._page_bytes = page_bytes
        self._tables, self._tier, self._roster, self._mode = tables, tier, roster, mode
        self._fetches: dict[int, Fetch] = {}  # by each of their pages
        self._coming: dict[Content, Fetch] = {}
        self._tried: dict[Request, int] = {}  # preemptions of a request when it last waited
        self._speeds = Speeds()
        self.disk: DiskTraffic | None = None
        self._counts = NO_TIERS
        roster.on_leave.append(self._forget)

    @property
    def pending(self) -> bool:
        """Return whether pages are on their way to the device."""
        return bool(self._fetches)

    @property
    def waits(self) -> bool:
        """Return whether a request may wait for pages."""
        return bool(self._fetches) or (self.disk is not None and self.disk.pending)

    @property
    def busy(self) -> bool:
        """Return whether there is work, even without requests."""
        return self._tier.has_offers or (self.disk is not None and self.disk.has_commands)

    @property
    def counts(self) -> TierCounts:
        stored, skipped = self._tier.stored, self._tier.dropped
        queries, hits, fetched, lost = self._counts.queries, self._counts.hits, self._counts.fetched, self._counts.lost
        on_disk, written, read = (0, 0, 0) if self.disk is None else (self.disk.pages, self.disk.written, self.disk.read)
        lost += 0 if self.disk is None else self.disk.lost
        return TierCounts(
            self._tier.records, self._tier.used, stored, skipped, queries, hits, fetched, lost, self._page_bytes,
            on_disk, written, read,
        )  # fmt: skip

    def hold(self, request: Request, plan: PlanBuilder, now: float) -> bool:
        """Let a request wait for pages that the host tier has. It has adopted what the device has, and all of it fits.

        Return False if it should run now.
        """
        if self._tried.get(request) == request.preemptions or not request.spec.params.reads_prefix_cache:
            return False
        if request.preemptions and self._mode == "recompute":
            return False
        if self.disk is not None and self.disk.may_wait(request) and self._read(request, self.disk, now):
            return True
        hit, reach = request.computed, self._tables.reach(request, self._tier)
        self._count(queries=len(request.tokens) - hit)
        missing = self._tables.missing(request, reach, self._tier) if reach > hit else []
        if not missing or len(missing) > self._tables.pool.free or not self._pays(request, len(missing), reach - hit):
            return False
        contents = [self._tables.groups[group].content(request, i) for group, i, _ in missing]
        other = next((self._coming[content] for content in contents if content in self._coming), None)
        if other is not None:
            other.waiting.append(request)
        else:
            self._tried[request] = request.preemptions
            self._begin(request, [record for _, _, record in missing], contents, plan.step, now)
            self._count(hits=reach - hit)
        self._roster.wait_for_pages(request)
        return True

    def _forget(self, request: Request) -> None:
        self._tried.pop(request, None)

    def _pays(self, request: Request, pages: int, tokens: int) -> bool:
        swaps = bool(request.preemptions) and self._mode == "swap"
        return swaps or self._speeds.pays(pages, tokens)

    def _read(self, request: Request, disk: DiskTraffic, now: float) -> bool:
        """Let a request wait for pages on disk, which are read into host memory. Return False if there are none."""
        reach = self._tables.reach(request, disk)
        missing = self._tables.missing(request, reach, disk) if reach > request.computed else []
        if all(record != ON_DISK for _, _, record in missing):
            return False
        if not self._pays(request, len(missing), reach - request.computed):
            return False
        contents = [self._tables.groups[group].content(request, i) for group, i, record in missing if record == ON_DISK]
        if not disk.hold(request, contents, now):
            return False
        self._roster.wait_for_pages(request)
        return True

    def _begin(self, request: Request, records: list[int], contents: list[Content], step: int, now: float) -> None:
        pool, tier = self._tables.pool, self._tier
        for record in records:
            tier.pin(record)
        found = [pool.share(page) for table in request.pages for page in table if page != NULL]
        pages = pool.take(len(records))
        for record, page in zip(records, pages, strict=True):
            tier.fetch(record, page)
        moves = dict(zip(pages, zip(records, contents, strict=True), strict=True))
        fetch = Fetch(step, now, moves, found + pages, [request])
        self._tables.moving.update(fetch.held)
        self._fetches.update(dict.fromkeys(pages, fetch))
        self._coming.update(dict.fromkeys(contents, fetch))

    def reported(self, ranks: Sequence[Report], now: float) -> None:
        """Take in what the ranks report; every rank reports every page once."""
        ended: dict[Fetch, None] = {}
        for report in ranks:
            for page, right in report:
                fetch = self._fetches[page]
                left = fetch.missing.setdefault(page, len(ranks)) - 1
                fetch.missing[page] = left
                if not right:
                    fetch.wrong.add(page)
                if len(fetch.missing) == len(fetch.pages) and not any(fetch.missing.values()):
                    ended[fetch] = None
        for fetch in ended:
            self._speeds.fetched(len(fetch.pages), now - fetch.began)
            self._end(fetch)

    def of_step(self, step: int) -> list[int]:
        """Return the pages that are fetched by the plan of a step and have not arrived."""
        return [page for page, fetch in self._fetches.items() if fetch.step == step]

    def lost(self, pages: Sequence[int]) -> None:
        """These pages do not arrive, and nothing writes to them any more."""
        for fetch in {self._fetches[page]: None for page in pages}:
            fetch.wrong.update(fetch.pages)
            self._end(fetch)

    def computed(self, tokens: int, seconds: float) -> None:
        """Record the duration of a step of prompts."""
        self._speeds.computed(tokens, seconds)

    def _end(self, fetch: Fetch) -> None:
        """Publish what arrived and let the requests go on."""
        pool, tier = self._tables.pool, self._tier
        for page, (record, content) in fetch.pages.items():
            del self._fetches[page], self._coming[content]
            if page in fetch.wrong:
                tier.forget([content[0]])
            elif tier.holds(record, content[0]):  # otherwise it was forgotten meanwhile
                pool.publish(page, *content)
        for record, _ in reversed(fetch.pages.values()):
            tier.unpin(record)
        self._tables.moving.subtract(fetch.held)
        pool.drop(fetch.held)
        self._count(fetched=len(fetch.pages) - len(fetch.wrong), lost=len(fetch.wrong))
        for request in fetch.waiting:
            self._roster.mark_ready(request.spec.id, "pages")

    def _count(self, queries: int = 0, hits: int = 0, fetched: int = 0, lost: int = 0) -> None:
        before = self._counts
        self._counts = TierCounts(
            queries=before.queries + queries, hits=before.hits + hits, fetched=before.fetched + fetched, lost=before.lost + lost
        )
