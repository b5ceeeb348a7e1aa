"""KV cache manager: page tables over all KV cache groups, and the interface for the scheduler.

It maintains `request.pages`, `covered`, `keys` and `published`; the scheduler the cursors. It knows no slots, steps or rows.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from quire.cache.groups import make_groups
from quire.cache.policies import Evictable, Recency
from quire.cache.pool import NULL, Pool
from quire.cache.prefix import extend_keys
from quire.cache.snapshots import Snapshots
from quire.cache.tiers import STATES, Below, Content, HostTier
from quire.types.cache import CacheLayout
from quire.types.request import Request

PUBLISH_PAGES = 4  # of sampled tokens at a time; a request that ends or is preempted publishes the rest
Entries = tuple[int, int, list[int]]  # new page-table entries: table[group][first + i] = pages[i], as group, first, pages


class Tables:
    def __init__(
        self,
        layout: CacheLayout,
        pages: int,
        chunk: int,
        prefix_caching: bool,
        contiguous: bool = True,
        states: tuple[int, int] | None = None,
        policy: Callable[[], Evictable] = Recency,
        records: int = 0,
        snapshot_records: int = 1,
    ) -> None:
        """`states`: the first entry for snapshots of recurrent states, and their number. policy: of eviction.
        records: pages that the host tier holds; 0: there is none. snapshot_records: that a snapshot takes there.
        """
        self.page_size = layout.page_size
        self.prefix_caching = prefix_caching
        self.pool = Pool(pages, contiguous, policy)
        self.moving: Counter[int] = Counter()  # references to pages that are being fetched
        self.tier = HostTier(records, policy, snapshot_records) if records and prefix_caching else None
        if self.tier is not None:
            self.pool.on_evict = self.tier.evicted
        self.groups = make_groups(layout, self.pool, chunk)
        self.snapshots: Snapshots | None = None
        if states is not None:
            first, count = states
            self.snapshots = Snapshots(first, count if prefix_caching else 0, layout.page_size, remember=not self.groups)
            self.snapshots.on_evict = None if self.tier is None else self.tier.evicted
        self._windowed = [group for group, spec in zip(self.groups, layout.groups, strict=True) if spec.window is not None]

    @property
    def frees_only_at_end(self) -> bool:
        """Return whether no page is freed before its request ends."""
        return not self._windowed

    def find(self, request: Request) -> int:
        """Return how many leading tokens are cached: full pages only, never the last token, whose logits are needed."""
        if not self.prefix_caching or not request.shares:
            return 0
        extend_keys(request.keys, request.tokens, self.page_size, request.spec.salt, request.marks)
        pages = self._agree(request, (len(request.tokens) - 1) // self.page_size)
        if self.snapshots is not None:
            request.branch = self.snapshots.seen(request, pages) * self.page_size
            pages = self._agree_with(self.snapshots, request, pages)
        return pages * self.page_size

    def _agree_with(self, snapshots: Snapshots, request: Request, pages: int, below: Below | None = None) -> int:
        while pages != (found := snapshots.best(request, pages, below)):
            pages = self._agree(request, found, below)
        return pages

    def reach(self, request: Request, below: Below) -> int:
        """Return how many leading tokens are cached on the device and below it together. After `find`."""
        if not request.shares:
            return 0
        pages = self._agree(request, (len(request.tokens) - 1) // self.page_size, below)
        if self.snapshots is not None:
            pages = self._agree_with(self.snapshots, request, pages, below)
        return pages * self.page_size

    def missing(self, request: Request, tokens: int, below: Below) -> list[tuple[Content, int]]:
        """Return (content, record) of the pages, and then of the snapshot, that a hit of `tokens` lacks on the device."""
        pages = tokens // self.page_size
        found = [pair for group in self.groups for pair in group.missing(request, pages, below)]
        return found if self.snapshots is None else found + self.snapshots.missing(request, pages, below)

    def reserve(self, request: Request, tokens: int, contents: Sequence[Content]) -> tuple[list[int], list[int]] | None:
        """Allocate the pages, and the entry of a snapshot, that these contents of a hit of `tokens` tokens are fetched into.

        Return them, an entry as ~entry, and all pages that are kept until `arrived`: these and what the device has of the hit.
        None: there are not enough.
        """
        found = [page for group in self.groups for page in group.found(request, tokens // self.page_size)]
        count = sum(content[0][0] != STATES for content in contents)
        if count + sum(not self.pool.refs[page] for page in found) > self.pool.free:
            return None
        entries = list[int]()
        if count < len(contents) and self.snapshots is not None:
            entry = self.snapshots.reserve()
            if entry is None:
                return None
            entries = [~entry]
        kept = [self.pool.share(page) for page in found]
        pages = self.pool.take(count)
        self.moving.update(kept + pages)
        return pages + entries, kept + pages

    def arrived(self, page: int, content: Content | None) -> None:
        """A fetch into a reserved page or ~entry has ended. None: its content is not valid."""
        if page < 0 and self.snapshots is not None:
            self.snapshots.arrived(~page, content)
        elif content is not None:
            self.pool.publish(page, *content)

    def release(self, kept: Sequence[int]) -> None:
        """Release the pages that `reserve` kept."""
        self.moving.subtract(kept)
        self.pool.drop(kept)

    def holds(self, page: int, content: Content) -> bool:
        """Return whether a page, or the entry of a snapshot written ~entry, still has this content."""
        if page < 0:
            return self.snapshots is not None and self.snapshots.holds(~page, content)
        return self.pool.holds(page, content)

    def offer_published(self) -> None:
        """Offer pages and snapshots to the host tier as soon as they can be found."""
        if self.tier is not None:
            self.pool.on_publish = self.tier.offer
            if self.snapshots is not None:
                self.snapshots.on_publish = self.tier.offer

    @property
    def will_offer(self) -> bool:
        """Return whether there are snapshots that will be offered when they can be found."""
        return self.snapshots is not None and self.snapshots.on_publish is not None and self.snapshots.fresh

    def _agree(self, request: Request, pages: int, below: Below | None = None) -> int:
        """Return the longest hit, in full pages up to `pages`, that all groups have and that divides no span.
        below: a tier whose pages count, too."""
        agreed = -1
        while pages != agreed:  # each group can only lower the answer
            agreed = pages
            for group in self.groups:
                pages = group.best(request, pages, below)
            if request.spans:
                pages = request.whole_pages(pages * self.page_size, self.page_size) // self.page_size
        return pages

    def adopt(self, request: Request, tokens: int) -> None:
        """Start the request's tables from a hit that `find` returned; 0 starts empty ones."""
        request.pages = [[] for _ in self.groups]
        for group in self.groups:
            group.adopt(request, tokens // self.page_size)
        if self.snapshots is not None:
            self.snapshots.adopt(request, tokens)
        self._adopted(request, tokens)

    def can_fork(self, parent: Request, tokens: int) -> bool:
        """Return whether a fork can share the parent's pages. A recurrent state is never where the fork begins."""
        return self.snapshots is None and bool(parent.pages) and all(group.can_fork(parent, tokens) for group in self.groups)

    def fork(self, request: Request, parent: Request, tokens: int) -> list[int]:
        """Start the request's tables from its parent's; return the pages to copy, one per group, each with a reference."""
        request.pages = [[] for _ in self.groups]
        sources = [group.fork(request, parent, tokens) for group in self.groups]
        self._adopted(request, tokens)
        return [page for page in sources if page != NULL]

    def trim(self, request: Request) -> None:
        """Free pages outside of the windows, except what a query one position back needs, so that a fork can repeat a token."""
        for group in self._windowed:
            group.trim(request, request.settled - 1)

    def demand(self, request: Request, end: int) -> int:
        return sum(group.demand(request, end) for group in self.groups)

    def grow(self, request: Request, end: int) -> list[Entries] | None:
        """Allocate pages for the positions below `end`; return None, and allocate nothing, if there are not enough."""
        needs = [group.need(request, end) for group in self.groups]
        if sum(needs) > self.pool.free:
            return None
        grown = []
        for number, count in enumerate(needs):
            if count:
                table = request.pages[number]
                pages = self.pool.take(count, after=table[-1] if table else NULL)
                grown.append((number, self.groups[number].grow(request, pages), pages))
        request.covered = -(-end // self.page_size) * self.page_size
        return grown

    def entries(self, request: Request) -> list[Entries]:
        """Return the whole tables, without the leading NULLs."""
        whole = []
        for number, table in enumerate(request.pages):
            first = table.count(NULL)
            if first < len(table):
                whole.append((number, first, table[first:]))
        return whole

    def publish(self, request: Request) -> None:
        """Publish the full pages whose tokens are known and scheduled to be written."""
        if request.computed < (request.published + 1) * self.page_size or not self.prefix_caching:
            return
        last = min(request.computed, len(request.tokens)) // self.page_size
        if last > request.published and request.shares:
            self._offer(request, last)

    def _offer(self, request: Request, last: int) -> None:
        extend_keys(request.keys, request.tokens, self.page_size, request.spec.salt, request.marks)
        for group in self.groups:
            group.publish(request, request.published, last)
        if self.snapshots is not None:
            self.snapshots.remember(request, last)
        request.published = last

    def next_publication(self, request: Request) -> int:
        """Return the length at which pages are published next: several at a time, which costs little more than one."""
        publishes = self.prefix_caching and request.shares
        return (request.published + PUBLISH_PAGES) * self.page_size if publishes else sys.maxsize

    def forget(self, request: Request) -> None:
        """Remove all content of this request from the index, since it is invalid."""
        for number in [*range(len(self.groups)), *([] if self.snapshots is None else [STATES])]:
            keys = [(number, key) for key in request.keys]
            self.pool.forget_content(keys)
            if self.tier is not None:
                self.tier.forget(keys)
        if self.snapshots is not None:
            self.snapshots.forget(request)

    def forget_all(self) -> None:
        self.lose()
        if self.tier is not None:
            self.tier.forget_all()

    def lose(self) -> None:
        """Forget all content of the device."""
        self.pool.forget_all()
        if self.snapshots is not None:
            self.snapshots.forget_all()

    def free(self, request: Request) -> None:
        if request.pages:
            for group in self.groups:
                group.free(request)
        if self.snapshots is not None:
            self.snapshots.withdraw(request)
        request.pages = []
        request.covered = request.published = 0

    def freed_by(self, leaving: Request, owned: Counter[int]) -> int:
        """Return the pages that become free if a request leaves after those counted in `owned`, and add its pages to that."""
        freed = 0
        for table in leaving.pages:
            for page in table:
                if page != NULL:
                    owned[page] += 1
                    freed += owned[page] == self.pool.refs[page]
        return freed

    def check(self, owners: Iterable[Request]) -> None:
        if self.tier is not None:
            self.tier.check()
        if self.snapshots is not None:
            self.snapshots.check()
        owned = Counter(page for request in owners for table in request.pages for page in table if page != NULL)
        owned.update(self.moving)
        self.pool.check(owned)

    def _adopted(self, request: Request, tokens: int) -> None:
        request.published = tokens // self.page_size
        request.covered = request.published * self.page_size
