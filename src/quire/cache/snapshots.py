"""Snapshots of recurrent states of prefixes: allocation, content, eviction.

A recurrent state can only be resumed at the position where it was saved. So prefill is cut where a snapshot is useful, and
tokens after the last matching snapshot are computed again. Snapshots are taken at

    the last full page     the same prompt, or a longer one, may come again
    the branch             where the pages of other requests end: a second request shares them, a third may follow
    every few pages of sampled tokens: the latest only, for the next turn of a conversation

    entries  [ slot 0 | slot 1 | ... | snapshot | snapshot | ... ]      see `StepPlan`: loaded before rows, saved after them

What a step saves can be found from the next step on, once its tokens are known. The least recently used is evicted first.
With a host tier (`tiers.py`) an evicted snapshot is stored there, and fetched into an entry again.
"""

from collections import OrderedDict
from collections.abc import Callable

from quire.cache.prefix import extend_keys
from quire.cache.tiers import STATES, Below, Content
from quire.types.errors import EngineError
from quire.types.request import Request

STRIDE_PAGES = 4  # of sampled tokens between two snapshots
MAX_REMEMBERED_KEYS = 1 << 16  # of a model without pages


class Snapshots:
    def __init__(self, first: int, count: int, page_size: int, remember: bool) -> None:
        """`remember`: record the content keys of requests, since a model without pages has no other way to find branches."""
        self._entries = range(first, first + count)
        self._page_size = page_size
        self._free = list(reversed(self._entries))
        self._index: OrderedDict[bytes, int] = OrderedDict()  # content key -> entry, oldest first
        self._fresh: list[tuple[Request, int, int]] = []  # (request, position, entry): saved, but not findable yet
        self._arriving: set[int] = set()  # entries that are being fetched
        self._seen: OrderedDict[bytes, None] | None = OrderedDict() if remember else None
        self.on_publish: Callable[[int, Content], None] | None = None  # ~entry, content: it can be found, and stays
        self.on_evict: Callable[[int, Content], None] | None = None  # ~entry, content: called before it is lost

    @property
    def count(self) -> int:
        return len(self._entries)

    @property
    def fresh(self) -> bool:
        """Return whether there are snapshots that `publish` may make findable."""
        return bool(self._fresh)

    def best(self, request: Request, pages: int, below: Below | None = None) -> int:
        """Return the longest prefix with a snapshot, in full pages, up to `pages`. below: a tier whose snapshots count, too."""
        keys = request.keys
        return next((n for n in range(min(pages, len(keys)), 0, -1) if self._has(keys[n - 1], below)), 0)

    def missing(self, request: Request, pages: int, below: Below) -> list[tuple[Content, int]]:
        """Return (content, record) of the snapshot after `pages` pages if the device does not have it."""
        if not pages or request.keys[pages - 1] in self._index:
            return []
        content = content_of(request.keys[pages - 1])
        record = below.find(*content)
        return [] if record is None else [(content, record)]

    def holds(self, entry: int, content: Content) -> bool:
        return self._index.get(content[0][1]) == entry

    def reserve(self) -> int | None:
        """Return an entry that a snapshot is fetched into, until `arrived`; None: all are in use."""
        entry = self._take()
        if entry is not None:
            self._arriving.add(entry)
        return entry

    def arrived(self, entry: int, content: Content | None) -> None:
        """A fetch into a reserved entry has ended. None: its content is not valid."""
        self._arriving.discard(entry)
        if content is None or content[0][1] in self._index:
            self._free.append(entry)
        else:
            self._index[content[0][1]] = entry

    def seen(self, request: Request, pages: int) -> int:
        """Return how many full pages other requests had; `pages` if the page pool knows that."""
        if self._seen is None:
            return pages
        return next((n for n in range(pages) if request.keys[n] not in self._seen), pages)

    def remember(self, request: Request, pages: int) -> None:
        if self._seen is not None:
            for key in request.keys[:pages]:
                self._seen[key] = None
                self._seen.move_to_end(key)
            while len(self._seen) > MAX_REMEMBERED_KEYS:
                self._seen.popitem(last=False)

    def adopt(self, request: Request, tokens: int) -> None:
        """Start the request after `tokens` tokens, which have a snapshot, and decide where it saves its state."""
        request.restored = -1
        if tokens:
            key = request.keys[tokens // self._page_size - 1]
            request.restored = self._index[key]
            self._index.move_to_end(key)
        wanted = (request.whole_pages(at, self._page_size) for at in (request.branch, len(request.tokens) - 1))
        request.save_at = sorted({at for at in wanted if at > tokens}) if self._entries else []

    def cut(self, request: Request, count: int) -> int:
        """Return the length of a row of up to `count` tokens that ends where the state has to be saved."""
        end = request.computed + count
        return next((at - request.computed for at in request.save_at if request.computed < at < end), count)

    def next_save(self, request: Request) -> int:
        """Return the end of the first decode row after which the state is saved."""
        stride = STRIDE_PAGES * self._page_size
        return (request.computed // stride + 1) * stride

    def save(self, request: Request) -> int | None:
        """Return the entry that receives the state after the row that was just planned; None: it is not saved."""
        at, size = request.computed, self._page_size
        known = request.save_at and request.save_at[-1] >= at
        due = at in request.save_at
        request.save_at = [later for later in request.save_at if later > at]
        if known and not due:
            return None
        if not due and (at % (STRIDE_PAGES * size) or not self._entries):
            return None
        if len(request.keys) >= at // size and request.keys[at // size - 1] in self._index:
            return None
        if not due:
            self._let_go(request.rolling)
        entry = self._take()
        if entry is not None:
            self._fresh.append((request, at, entry))
            if not due:
                request.rolling = b""
        return entry

    def publish(self) -> None:
        """Make snapshots of earlier steps findable if all their tokens are known; called before a step is planned."""
        fresh, self._fresh = self._fresh, []
        for request, at, entry in fresh:
            if len(request.tokens) < at:
                if request.finished is None:
                    self._fresh.append((request, at, entry))
                else:
                    self._free.append(entry)
                continue
            extend_keys(request.keys, request.tokens, self._page_size, request.spec.salt, request.marks)
            key = request.keys[at // self._page_size - 1]
            if key in self._index:
                self._free.append(entry)
                continue
            self._index[key] = entry
            if request.rolling == b"" and at % (STRIDE_PAGES * self._page_size) == 0:
                request.rolling = key
            elif self.on_publish is not None:
                self.on_publish(~entry, content_of(key))

    def withdraw(self, request: Request) -> None:
        """Drop snapshots of tokens that are not known yet, since the request leaves its slot. Offer the latest other one."""
        key = request.rolling
        if key and key in self._index and self.on_publish is not None:
            self.on_publish(~self._index[key], content_of(key))
        request.save_at, request.restored, request.branch, request.rolling = [], -1, 0, None
        self._drop_fresh(lambda other, at: other is request and at > len(request.tokens))

    def forget(self, request: Request) -> None:
        """Drop all snapshots of a request whose state is invalid."""
        self._drop_fresh(lambda other, _: other is request)
        for key in request.keys:
            self._let_go(key)

    def forget_all(self) -> None:
        self._drop_fresh(lambda *_: True)
        self._free += self._index.values()
        self._index.clear()
        if self._seen is not None:
            self._seen.clear()

    def check(self) -> None:
        entries = [*self._free, *self._index.values(), *self._arriving, *(entry for _, _, entry in self._fresh)]
        if sorted(entries) != list(self._entries):
            raise EngineError(f"snapshots are lost or doubled: {sorted(entries)} of {self._entries}")

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._index:
            return None
        key, entry = self._index.popitem(last=False)
        if self.on_evict is not None:
            self.on_evict(~entry, content_of(key))
        return entry

    def _has(self, key: bytes, below: Below | None) -> bool:
        return key in self._index or (below is not None and below.find(*content_of(key)) is not None)

    def _let_go(self, key: bytes | None) -> None:
        if key and (entry := self._index.pop(key, None)) is not None:
            self._free.append(entry)

    def _drop_fresh(self, which: Callable[[Request, int], bool]) -> None:
        self._free += [entry for request, at, entry in self._fresh if which(request, at)]
        self._fresh = [fresh for fresh in self._fresh if not which(fresh[0], fresh[1])]


def content_of(key: bytes) -> Content:
    """Return what identifies a snapshot in the tiers below. The key of the page before it depends on all tokens."""
    return (STATES, key), b""
