"""Requests that wait for pages of the host tier, and what is fetched for them.

    head of the queue ──► hold: pages are allocated, a plan fetches them ──► every rank has reported ──► queue
                                                                               pages become cached pages

A request whose prefix continues in the host tier waits outside the queue while the pages are fetched, unless computing them is
estimated to be faster. The arrived pages are published like computed ones, and the request finds them by the usual
search. It waits once per admission; what did not arrive, or was evicted again, is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.cache.tables import Tables
from quire.cache.tiers import Content, HostTier
from quire.sched.disk import ON_DISK, DiskTraffic
from quire.sched.plan_builder import PlanBuilder
from quire.sched.roster import Roster
from quire.sched.speeds import Speeds
from quire.types.request import Request
from quire.types.stats import NO_TIERS, TierCounts

Report = Sequence[tuple[int, bool]]  # of a rank: pages whose fetch ended, and whether their content is right
Call = Callable[..., list[Any]]  # calls a method of the tiers on every rank: its name, arguments
Missing = Sequence[tuple[Content, int]]  # what the device lacks, and its record


@dataclass(eq=False)
class Fetch:
    """Pages on their way to the device."""

    step: int
    began: float
    pages: dict[int, tuple[int, Content]]  # page, or ~entry of a snapshot -> its record, and its content
    held: list[int]  # pages with a reference until the end, in the order of positions
    waiting: list[Request]
    missing: dict[int, int] = field(default_factory=dict)  # page -> ranks that have not reported it
    wrong: set[int] = field(default_factory=set)  # pages


class Arrivals:
    def __init__(self, tables: Tables, tier: HostTier, roster: Roster, page_bytes: int, mode: str = "auto") -> None:
        """mode: how preempted requests get their pages back: swap, recompute, or auto, as `Speeds` estimates."""
        self._page_bytes = page_bytes
        self._tables, self._tier, self._roster, self._mode = tables, tier, roster, mode
        self._fetches: dict[int, Fetch] = {}  # by each of their pages
        self._coming: dict[Content, Fetch] = {}
        self._tried: dict[Request, int] = {}  # preemptions of a request when it last waited
        self._on_host: dict[Request, int] = {}  # tokens that device and host memory had when a read from disk began
        self._prefixes: dict[Request, tuple[int, int]] = {}  # tokens of a fetch: on the device, and with host memory
        self._speeds = Speeds()
        self.disk: DiskTraffic | None = None
        self._counts = NO_TIERS
        roster.on_leave.append(self._forget)

    def open_disk(self, ranks: Sequence[tuple[bytes, Sequence[bytes]]]) -> None:
        """Also keep pages on disk. ranks: see `DiskTraffic`."""
        self.disk = DiskTraffic(self._tier, self._roster, ranks)
        self._tables.offer_published()

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
        return self._tier.has_offers or self._tables.will_offer or (self.disk is not None and self.disk.has_commands)

    @property
    def counts(self) -> TierCounts:
        stored, skipped = self._tier.stored, self._tier.dropped
        queries, hits, fetched, lost = self._counts.queries, self._counts.hits, self._counts.fetched, self._counts.lost
        on_disk, written, read = (0, 0, 0) if self.disk is None else (self.disk.pages, self.disk.written, self.disk.read)
        lost += 0 if self.disk is None else self.disk.lost
        return TierCounts(
            self._tier.records, self._tier.used, stored, skipped, queries, hits, fetched, lost, self._page_bytes,
            on_disk, written, read, self._counts.disk_hits,
        )  # fmt: skip

    def exchange(self, call: Call, clock: Callable[[], float]) -> None:
        """Take in pages that ranks have fetched, read or written, and let them read and write others."""
        disk = self.disk
        if self.pending:
            self.reported(call("take_fetched"), clock())
        if disk is not None and disk.pending:
            disk.reported(call("take_read_and_written"), clock())
        if disk is not None and disk.has_commands:
            call("read_and_write", *disk.commands())

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
        if request.admitted < 0:
            self._count(queries=len(request.tokens) - hit)
        missing = self._tables.missing(request, reach, self._tier) if reach > hit else []
        if not missing or not self._pays(request, self._speeds.pays, missing, reach - hit):
            return False
        other = next((self._coming[content] for content, _ in missing if content in self._coming), None)
        if other is not None:
            other.waiting.append(request)
        elif self._begin(request, reach, missing, plan.step, now):
            self._tried[request] = request.preemptions
            self._prefixes[request] = hit, self._on_host.get(request, reach)
        else:
            return False
        self._roster.wait_for_pages(request)
        return True

    def admitted(self, request: Request) -> None:
        """Count what was fetched for a request, whose prefix of `request.cached` tokens is on the device. Called when it first
        gets a slot; what others waited for, and what was evicted again, is not counted."""
        on_host, (device, host) = self._on_host.pop(request, None), self._prefixes.pop(request, (request.cached, 0))
        if request.cached > device:
            from_disk = 0 if on_host is None else max(0, request.cached - max(device, host))
            self._count(hits=request.cached - device, disk_hits=from_disk)

    def _forget(self, request: Request) -> None:
        for found in (self._tried, self._on_host, self._prefixes):
            found.pop(request, None)

    def _pays(self, request: Request, estimate: Callable[[int, int], bool], missing: Missing, tokens: int) -> bool:
        swaps = bool(request.preemptions) and self._mode == "swap"
        return swaps or estimate(self._tier.records_of(content for content, _ in missing), tokens)

    def _read(self, request: Request, disk: DiskTraffic, now: float) -> bool:
        """Let a request wait for pages on disk, which are read into host memory. Return False if there are none."""
        reach = self._tables.reach(request, disk)
        missing = self._tables.missing(request, reach, disk) if reach > request.computed else []
        contents = [content for content, record in missing if record == ON_DISK]
        if not contents or not self._pays(request, disk.pays, missing, reach - request.computed):
            return False
        for _, record in missing:
            if record != ON_DISK:
                self._tier.touch(record)  # what is read must not evict what comes before it
        if not disk.hold(request, contents, now):
            return False
        self._on_host[request] = self._tables.reach(request, self._tier)
        self._roster.wait_for_pages(request)
        return True

    def _begin(self, request: Request, reach: int, missing: Missing, step: int, now: float) -> bool:
        """Fetch what a hit of `reach` tokens lacks on the device. Return False if there is no memory for it."""
        tier, contents = self._tier, [content for content, _ in missing]
        for _, record in missing:  # an evicted snapshot may need a record
            tier.pin(record)
        reserved = self._tables.reserve(request, reach, contents)
        if reserved is None:
            for _, record in missing:
                tier.unpin(record)
            return False
        pages, kept = reserved
        for page, (_, record) in zip(pages, missing, strict=True):
            tier.fetch(record, page)
        moves = {page: (record, content) for page, (content, record) in zip(pages, missing, strict=True)}
        fetch = Fetch(step, now, moves, kept, [request])
        self._fetches.update(dict.fromkeys(pages, fetch))
        self._coming.update(dict.fromkeys(contents, fetch))
        return True

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
            self._speeds.fetched(self._tier.records_of(content for _, content in fetch.pages.values()), now - fetch.began)
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
        if self.disk is not None:
            self.disk.speeds.computed(tokens, seconds)

    def _end(self, fetch: Fetch) -> None:
        """Publish what arrived and let the requests go on."""
        tier, right = self._tier, [content for page, (_, content) in fetch.pages.items() if page not in fetch.wrong]
        for page, (record, content) in fetch.pages.items():
            del self._fetches[page], self._coming[content]
            if page in fetch.wrong:
                tier.forget([content[0]])
            valid = tier.holds(record, content[0])  # otherwise it is wrong, or was forgotten meanwhile
            self._tables.arrived(page, content if valid else None)
        for record, _ in reversed(fetch.pages.values()):
            tier.unpin(record)
        self._tables.release(fetch.held)
        self._count(fetched=tier.records_of(right), lost=len(fetch.wrong))
        for request in fetch.waiting:
            self._roster.mark_ready(request.spec.id, "pages")

    def _count(self, **more: int) -> None:
        replaced = {name: getattr(self._counts, name) + count for name, count in more.items()}
        self._counts = msgspec.structs.replace(self._counts, **replaced)
