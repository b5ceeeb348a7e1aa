"""Page tables by kind. The scheduler does not depend on the kind of a group.

`request.pages[group]` is the table: entry i holds positions i * page_size ... and NULL stands for "no page".
A kind defines how many entries a length needs (`most`, `need`, `demand`), what a prefix hit or a fork requires (`best`,
`can_fork`), and what no future query attends to (`trim`); it is a class, and a row in KINDS.
"""

import sys
from typing import Protocol

from quire.cache.pool import NULL, Pool
from quire.cache.tiers import Below, Content
from quire.types.cache import CacheGroup, CacheLayout
from quire.types.request import Request


class Group(Protocol):
    @staticmethod
    def most(spec: CacheGroup, tokens: int, page_size: int, chunk: int) -> int:
        """Return the maximum of pages of a request of `tokens` tokens, if no row is longer than `chunk`."""

    def need(self, request: Request, end: int) -> int:
        """Return how many new pages positions below `end` need now."""

    def demand(self, request: Request, end: int) -> int:
        """Return the maximum of new pages that the request needs at any time on the way to `end`."""

    def grow(self, request: Request, pages: list[int]) -> int:
        """Append the pages; return the table index of the first."""

    def best(self, request: Request, pages: int, below: Below | None = None) -> int:
        """Return the longest prefix hit, in full pages, up to `pages`. below: a tier whose pages count, too."""

    def missing(self, request: Request, pages: int, below: Below) -> list[tuple[Content, int]]:
        """Return (content, record) of the pages that a hit of `pages` pages needs and the device does not have."""

    def found(self, request: Request, pages: int) -> list[int]:
        """Return the pages that a hit of `pages` pages needs and the device has."""

    def adopt(self, request: Request, pages: int) -> None:
        """Make a prefix hit of `pages` full pages the request's table."""

    def can_fork(self, parent: Request, tokens: int) -> bool:
        """Return whether the parent still has all pages that a query at position `tokens` needs."""

    def fork(self, request: Request, parent: Request, tokens: int) -> int:
        """Share the parent's full pages; return the page to copy for the rest, with a reference, or NULL if there is none."""

    def trim(self, request: Request, position: int) -> None:
        """Free the pages that no query at `position` or later attends to."""

    def publish(self, request: Request, first: int, last: int) -> None:
        """Add the full pages first ... last - 1 to the content index."""

    def free(self, request: Request) -> None:
        """Free all pages."""


class Full:
    """One page per `page_size` tokens, until the request ends."""

    def __init__(self, pool: Pool, number: int, spec: CacheGroup, page_size: int, chunk: int) -> None:
        self.pool, self.number, self.spec, self.page_size, self.chunk = pool, number, spec, page_size, chunk
        self.window = sys.maxsize if spec.window is None else spec.window

    @staticmethod
    def most(spec: CacheGroup, tokens: int, page_size: int, chunk: int) -> int:  # noqa: ARG004
        return -(-tokens // page_size)

    def need(self, request: Request, end: int) -> int:
        missing = -(-end // self.page_size) - len(request.pages[self.number])
        return missing if missing > 0 else 0

    def demand(self, request: Request, end: int) -> int:
        return self.need(request, end)

    def grow(self, request: Request, pages: list[int]) -> int:
        table = request.pages[self.number]
        first = len(table)
        table += pages
        return first

    def best(self, request: Request, pages: int, below: Below | None = None) -> int:
        return next((i for i in range(pages) if not self._has(request, i, below)), pages)

    def missing(self, request: Request, pages: int, below: Below) -> list[tuple[Content, int]]:
        found = []
        for i in range(self._first(pages * self.page_size), pages):
            content = self.content(request, i)
            if self.pool.find(*content) == NULL and (record := below.find(*content)) is not None:
                found.append((content, record))
        return found

    def found(self, request: Request, pages: int) -> list[int]:
        each = (self._find(request, i) for i in range(self._first(pages * self.page_size), pages))
        return [page for page in each if page != NULL]

    def adopt(self, request: Request, pages: int) -> None:
        first = self._first(pages * self.page_size)
        hits = [self.pool.share(self._find(request, i)) for i in range(first, pages)]
        request.pages[self.number] = [NULL] * first + hits

    def can_fork(self, parent: Request, tokens: int) -> bool:
        table, last = parent.pages[self.number], -(-tokens // self.page_size)
        return len(table) >= last and NULL not in table[self._first(tokens) : last]

    def fork(self, request: Request, parent: Request, tokens: int) -> int:
        table, first, full = parent.pages[self.number], self._first(tokens), tokens // self.page_size
        request.pages[self.number] = [NULL] * first + [self.pool.share(page) for page in table[first:full]]
        return self.pool.share(table[full]) if tokens % self.page_size else NULL

    def trim(self, request: Request, position: int) -> None:
        pass  # full attention needs every position

    def publish(self, request: Request, first: int, last: int) -> None:
        table = request.pages[self.number]
        for i in range(first, last):
            if table[i] != NULL:
                self.pool.publish(table[i], *self.content(request, i))

    def free(self, request: Request) -> None:
        self.pool.drop(request.pages[self.number])
        request.pages[self.number] = []

    def _first(self, position: int) -> int:
        """Return the table index of the first page that a query at `position` reads."""
        return max(0, position - self.window + 1) // self.page_size

    def content(self, request: Request, i: int) -> Content:
        """Return what identifies the content of page i."""
        size = self.page_size
        return (self.number, request.keys[i]), request.tokens[i * size : (i + 1) * size].tobytes()

    def _find(self, request: Request, i: int) -> int:
        return self.pool.find(*self.content(request, i))

    def _has(self, request: Request, i: int, below: Below | None) -> bool:
        content = self.content(request, i)
        return self.pool.find(*content) != NULL or (below is not None and below.find(*content) is not None)


class Window(Full):
    """The same table, but a query attends to the last `window` positions: earlier pages are freed and left NULL."""

    @staticmethod
    def most(spec: CacheGroup, tokens: int, page_size: int, chunk: int) -> int:
        """Return the maximum of pages. For a row that starts at c, positions from c - window on have pages: one more than
        the row needs, so that a fork one token back finds all that it needs.

            c - window ........ c ........ c + chunk        window + chunk positions, at any offset inside the first page
        """
        assert spec.window is not None
        return min(-(-tokens // page_size), (spec.window + chunk + page_size - 2) // page_size + 1)

    def demand(self, request: Request, end: int) -> int:
        """Return the maximum of new pages. Own pages are freed as the window moves; shared ones are not, but cost nothing.
        Drafts may have allocated more than that."""
        refs = self.pool.refs
        own = sum(1 for page in request.pages[self.number] if page != NULL and refs[page] == 1)
        return max(0, min(self.need(request, end), self.most(self.spec, end, self.page_size, self.chunk) - own))

    def trim(self, request: Request, position: int) -> None:
        table = request.pages[self.number]
        last = first = min(self._first(position), len(table))
        while first > 0 and table[first - 1] != NULL:
            first -= 1
        self.pool.drop(table[first:last])
        table[first:last] = [NULL] * (last - first)

    def best(self, request: Request, pages: int, below: Below | None = None) -> int:
        """Walk back until an unbroken run of hits covers the window before its end."""
        i = pages
        while i > self._first(pages * self.page_size):
            i -= 1
            if not self._has(request, i, below):
                pages = i
        return pages


KINDS: dict[str, type[Full]] = {"full": Full, "window": Window}


def make_groups(layout: CacheLayout, pool: Pool, chunk: int) -> list[Group]:
    return [KINDS[spec.kind](pool, number, spec, layout.page_size, chunk) for number, spec in enumerate(layout.groups)]
