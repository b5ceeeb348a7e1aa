"""Pages 1 ... n: who counts on them, what they hold, and which is given away next.

    in use   refs > 0                     in one or more page tables
    cached   refs == 0, has content       can be found again; evicted oldest first, and only when no blank page is left
    blank    refs == 0, no content        given away first

A sequence that grows gets the page after its last one where that is blank. Where keys had better lie in one piece, a sequence
that begins gets a page with much room behind it: the first, then the middle, then the quarters, and so on.

    beginnings   [ 1st ....... | 3rd ....... | 2nd ....... | 4th ....... ]

Page 0 is the null page: it stands for "nothing here" in a table and is never handed out, shared or dropped.
The pool does not know requests or positions; a key is any value that stands for a page's content.
"""

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from quire.types.errors import EngineError

NULL = 0
Key = tuple[int, bytes]  # cache group, content key


class Pool:
    def __init__(self, pages: int, in_one_piece: bool = True) -> None:
        """`in_one_piece`: that is how the keys of a sequence had better lie."""
        self.pages = pages
        self.refs = [0] * (pages + 1)
        self.returned = 0  # how often a page became free, ever: tells whether trying again can make sense
        self.blank = pages
        self._is_blank = bytearray([0]) + bytearray([1]) * pages + bytearray([0])  # with a place behind the last page
        self._bits = max(pages - 1, 0).bit_length() if in_one_piece else 0
        self._untried = 0  # the first place among the beginnings that nobody looked at
        self._again: list[int] = []  # a heap of earlier places, whose pages came back; some were taken meanwhile
        self._queued = bytearray([1]) * (pages + 1)  # is in one of the two
        self._cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self._index: dict[Key, int] = {}
        self._content: list[tuple[Key, bytes] | None] = [None] * (pages + 1)

    @property
    def free(self) -> int:
        return self.blank + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def kinds(self, pages: slice) -> bytes:
        """What these pages are: 0 blank, 1 cached, 2 in use, 3 in use more than once."""
        rows = zip(self.refs[pages], self._content[pages], strict=True)
        return bytes([3 if refs > 1 else 2 if refs else content is not None for refs, content in rows])

    def take(self, count: int, after: int = NULL) -> list[int]:
        """That many pages with unspecified content, each with one reference, for a sequence that ends with `after`."""
        if count > self.free:
            raise EngineError(f"{count} pages were taken, but only {self.free} of {self.pages} are free")
        is_blank, taken = self._is_blank, []
        for _ in range(count):
            after += 1
            if after > 1 and is_blank[after]:  # behind the sequence's last page
                is_blank[after] = 0
                self.blank -= 1
            else:
                after = self._beginning() if self.blank else self._evict()
            self.refs[after] = 1
            taken.append(after)
        return taken

    def share(self, page: int) -> int:
        """One more reference to a page that is in use or cached."""
        if self.refs[page] == 0:
            del self._cached[page]
        self.refs[page] += 1
        return page

    def drop(self, pages: Sequence[int]) -> None:
        """One reference less to each; null pages are skipped. The tail of a sequence counts as older and is evicted first."""
        refs = self.refs
        for page in reversed(pages):
            if page == NULL:
                continue
            refs[page] -= 1
            if refs[page] == 0:
                self.returned += 1
                if self._content[page] is None:
                    self._give(page)
                else:
                    self._cached[page] = None

    def publish(self, page: int, key: Key, tokens: bytes) -> None:
        """Lets `page` be found by `key`. The first page of a key stays; another one with the same content remains private."""
        if key not in self._index and self._content[page] is None:
            self._index[key] = page
            self._content[page] = (key, tokens)

    def find(self, key: Key, tokens: bytes) -> int:
        """The page with that content, or NULL. The tokens are compared: a key alone proves nothing."""
        page = self._index.get(key, NULL)
        if page != NULL:
            content = self._content[page]
            if content is None or content[1] != tokens:
                return NULL
        return page

    def forget(self, pages: Iterable[int]) -> None:
        """These pages can no longer be found."""
        for page in pages:
            content = self._content[page]
            if content is None:
                continue
            del self._index[content[0]]
            self._content[page] = None
            if self.refs[page] == 0:
                del self._cached[page]
                self._give(page)

    def forget_content(self, keys: Iterable[Key]) -> None:
        self.forget([self._index[key] for key in keys if key in self._index])

    def forget_all(self) -> None:
        self.forget(list(self._index.values()))

    def check(self, owners: Counter[int]) -> None:
        """Raises unless the references are exactly `owners` and every page is in one place."""
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
        """The blank page with the most room behind it."""
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

    def _give(self, page: int) -> None:
        self._is_blank[page] = 1
        self.blank += 1
        if not self._queued[page]:
            heapq.heappush(self._again, self._place(page))
            self._queued[page] = 1

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        content = self._content[page]
        if content is not None:
            del self._index[content[0]]
            self._content[page] = None
        return page

    def _place(self, page: int) -> int:
        """A page's place among the beginnings: its number from 0, with the bits reversed where pages had better be spread."""
        return _reversed(page - 1, self._bits) if self._bits else page - 1

    def _page(self, place: int) -> int:
        """The page in that place of the order, or NULL: with bits reversed there are more places than pages."""
        page = _reversed(place, self._bits) + 1 if self._bits else place + 1
        return page if page <= self.pages else NULL


def _reversed(number: int, bits: int) -> int:
    return int(f"{number:0{bits}b}"[::-1], 2)
