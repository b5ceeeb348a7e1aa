"""Pages 1 ... n: reference counts, content, and the order of allocation.

    in use   refs > 0                     in one or more page tables
    cached   refs == 0, has content       can be found again; evicted (`policies.py`), only when no blank page is left
    blank    refs == 0, no content        allocated first

A sequence that grows gets the page after its last one if that is blank. If contiguous keys are faster, a new sequence gets
a page with much space after it: the first, then the middle, then the quarters, and so on.

    beginnings   [ 1st ....... | 3rd ....... | 2nd ....... | 4th ....... ]

Page 0 is the null page: it stands for "no page" in a table and is never allocated, shared or dropped.
The pool does not know requests or positions; a key is any value that identifies a page's content.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from quire.cache.policies import Evictable, Key, Recency
from quire.types.errors import EngineError

NULL = 0


class Pool:
    def __init__(self, pages: int, contiguous: bool = True, policy: Callable[[], Evictable] = Recency) -> None:
        """`contiguous`: contiguous keys of a sequence are faster."""
        self.pages = pages
        self.refs = [0] * (pages + 1)
        self.returned = 0  # pages that became free, ever: unchanged, a failed allocation fails again
        self.blank = pages
        self._is_blank = bytearray([0]) + bytearray([1]) * pages + bytearray([0])  # with an entry after the last page
        self._bits = max(pages - 1, 0).bit_length() if contiguous else 0
        self._untried = 0  # the first untried position in the order of beginnings
        self._again: list[int] = []  # a heap of earlier positions, whose pages were freed; some were allocated meanwhile
        self._queued = bytearray([1]) * (pages + 1)  # is in one of the two
        self._policy = policy
        self._cached = policy()
        self.on_publish: Callable[[int, tuple[Key, bytes]], None] | None = None  # page, content
        self.on_evict: Callable[[int, tuple[Key, bytes]], None] | None = None  # page, content: called before it is lost
        self._index: dict[Key, int] = {}
        self._content: list[tuple[Key, bytes] | None] = [None] * (pages + 1)

    @property
    def free(self) -> int:
        return self.blank + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def kinds(self, pages: slice) -> bytes:
        """Return the state of each page: 0 blank, 1 cached, 2 in use, 3 in use more than once."""
        rows = zip(self.refs[pages], self._content[pages], strict=True)
        return bytes([3 if refs > 1 else 2 if refs else content is not None for refs, content in rows])

    def take(self, count: int, after: int = NULL) -> list[int]:
        """Allocate pages with unspecified content, each with one reference, for a sequence whose last page is `after`."""
        if count > self.free:
            raise EngineError(f"{count} pages were requested, but only {self.free} of {self.pages} are free")
        is_blank, taken = self._is_blank, []
        for _ in range(count):
            after += 1
            if after > 1 and is_blank[after]:  # after the sequence's last page
                is_blank[after] = 0
                self.blank -= 1
            else:
                after = self._beginning() if self.blank else self._evict()
            self.refs[after] = 1
            taken.append(after)
        return taken

    def share(self, page: int) -> int:
        """Add a reference to a page that is in use or cached."""
        self._cached.use(page)
        self.refs[page] += 1
        return page

    def drop(self, pages: Sequence[int]) -> None:
        """Remove a reference from each page; null pages are skipped. The tail of a sequence is evicted before its head."""
        refs = self.refs
        for page in reversed(pages):
            if page == NULL:
                continue
            refs[page] -= 1
            if refs[page] == 0:
                self.returned += 1
                if self._content[page] is None:
                    self._free_blank(page)
                else:
                    self._cached.add(page, len(pages))

    def publish(self, page: int, key: Key, tokens: bytes) -> None:
        """Make `page` the page of `key`. The first page of a key stays; another one with the same content remains private."""
        if key not in self._index and self._content[page] is None:
            self._index[key] = page
            self._content[page] = (key, tokens)
            self._cached.enter(page, key)
            if self.on_publish is not None:
                self.on_publish(page, (key, tokens))

    def find(self, key: Key, tokens: bytes) -> int:
        """Return the page with that content, or NULL. The tokens are compared, too, since different content may share a key."""
        page = self._index.get(key, NULL)
        if page != NULL:
            content = self._content[page]
            if content is None or content[1] != tokens:
                return NULL
        return page

    def holds(self, page: int, content: tuple[Key, bytes]) -> bool:
        return self._content[page] == content

    def forget(self, pages: Iterable[int]) -> None:
        """Remove the content of these pages from the index."""
        for page in pages:
            content = self._content[page]
            if content is None:
                continue
            del self._index[content[0]]
            self._content[page] = None
            self._cached.forget(page)
            if self.refs[page] == 0:
                self._free_blank(page)

    def forget_content(self, keys: Iterable[Key]) -> None:
        self.forget([self._index[key] for key in keys if key in self._index])

    def forget_all(self) -> None:
        self.forget(list(self._index.values()))
        self._cached = self._policy()  # what it learned was about this content

    def check(self, owners: Counter[int]) -> None:
        """Raise EngineError unless the references are exactly `owners` and every page is in one state."""
        blank = [page for page, is_blank in enumerate(self._is_blank) if is_blank]
        free = [*blank, *self._cached]
        used = [page for page in range(1, self.pages + 1) if self.refs[page]]
        if sorted(free + used) != list(range(1, self.pages + 1)):
            raise EngineError(f"pages are lost or doubled: free {sorted(free)}, in use {used}, of {self.pages}")
        wrong = {page: (self.refs[page], owners[page]) for page in range(self.pages + 1) if self.refs[page] != owners[page]}
        if wrong:
            raise EngineError(f"page references (counted, owned) differ: {wrong}")
        published = {page: content[0] for page, content in enumerate(self._content) if content is not None}
        if published != {page: key for key, page in self._index.items()} or set(self._cached) - set(published):
            raise EngineError("the content index and the pages disagree")
        if any(page in published for page in blank) or len(blank) != self.blank:
            raise EngineError("a blank page has content, or was not counted")

    def _beginning(self) -> int:
        """Allocate the blank page with the most space after it."""
        page = NULL
        while not self._is_blank[page]:
            if self._again:
                page = self._page(heapq.heappop(self._again))
            else:
                page = self._page(self._untried)
                self._untried += 1
            self._queued[page] = 0
        self._is_blank[page] = 0
        self.blank -= 1
        return page

    def _free_blank(self, page: int) -> None:
        self._is_blank[page] = 1
        self.blank += 1
        if not self._queued[page]:
            heapq.heappush(self._again, self._rank_of(page))
            self._queued[page] = 1

    def _evict(self) -> int:
        page = self._cached.pop()
        content = self._content[page]
        if content is not None:
            del self._index[content[0]]
            self._content[page] = None
            if self.on_evict is not None:
                self.on_evict(page, content)
        return page

    def _rank_of(self, page: int) -> int:
        """Return a page's position in the order of beginnings: its number from 0, with reversed bits if `contiguous`."""
        return _reversed(page - 1, self._bits) if self._bits else page - 1

    def _page(self, rank: int) -> int:
        """Return the page of a position, or NULL: with reversed bits there are more positions than pages."""
        page = _reversed(rank, self._bits) + 1 if self._bits else rank + 1
        return page if page <= self.pages else NULL


def _reversed(number: int, bits: int) -> int:
    return int(f"{number:0{bits}b}"[::-1], 2)
