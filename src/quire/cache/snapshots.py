"""Recurrent states of prefixes: where they are kept, what they hold, and which is given away next.

A state has no positions: it can be gone on from only where it was saved. So a request is cut where its state is worth having
later, and what lies behind the last snapshot that fits another request is run again by it. Worth having are

    its last full page     the same prompt, or one that goes on from it, may come again
    where it branches off  the pages of others end here, so a second request has come that shares them: a third may follow
    every few pages of what it samples: the latest only, for whoever goes on from the answer

    entries  [ slot 0 | slot 1 | ... | snapshot | snapshot | ... ]      see `StepPlan`: loaded before rows, saved behind them

What a planned step saves can be found from the next step on, once its tokens are known. The oldest is given away first.
"""

from collections import OrderedDict
from collections.abc import Callable

from quire.cache.prefix import extend_keys
from quire.types.errors import EngineError
from quire.types.request import Request

STRIDE = 4  # pages of sampled tokens between two snapshots
MOST_SEEN = 1 << 16  # content keys remembered where no pages do


class Snapshots:
    def __init__(self, first: int, count: int, page_size: int, remember: bool) -> None:
        """`remember`: the content keys that requests had, for there are no pages that tell where one branches off."""
        self._entries = range(first, first + count)
        self._page_size = page_size
        self._free = list(reversed(self._entries))
        self._index: OrderedDict[bytes, int] = OrderedDict()  # content key -> entry, oldest first
        self._fresh: list[tuple[Request, int, int]] = []  # request, position, entry: saved, but not to be found yet
        self._seen: OrderedDict[bytes, None] | None = OrderedDict() if remember else None

    @property
    def count(self) -> int:
        return len(self._entries)

    def best(self, request: Request, pages: int) -> int:
        """The longest prefix of at most that many full pages whose state is there."""
        keys = request.keys
        return next((n for n in range(min(pages, len(keys)), 0, -1) if keys[n - 1] in self._index), 0)

    def seen(self, request: Request, pages: int) -> int:
        """How many full pages others had, as far as this is where it is known."""
        if self._seen is None:
            return pages
        return next((n for n in range(pages) if request.keys[n] not in self._seen), pages)

    def remember(self, request: Request, pages: int) -> None:
        if self._seen is not None:
            for key in request.keys[:pages]:
                self._seen[key] = None
                self._seen.move_to_end(key)
            while len(self._seen) > MOST_SEEN:
                self._seen.popitem(last=False)

    def adopt(self, request: Request, tokens: int) -> None:
        """The request begins behind so many tokens, whose state is there. What it is to save on its way is decided."""
        request.restored = -1
        if tokens:
            key = request.keys[tokens // self._page_size - 1]
            request.restored = self._index[key]
            self._index.move_to_end(key)
        last = (len(request.tokens) - 1) // self._page_size * self._page_size
        request.wanted = sorted({at for at in (request.branch, last) if at > tokens}) if self._entries else []

    def cut(self, request: Request, count: int) -> int:
        """A row of at most so many tokens ends where its state is wanted."""
        end = request.computed + count
        return next((at - request.computed for at in request.wanted if request.computed < at < end), count)

    def next_save(self, request: Request) -> int:
        """Of rows of one token, the first behind which the state is saved ends here."""
        stride = STRIDE * self._page_size
        return (request.computed // stride + 1) * stride

    def save(self, request: Request) -> int | None:
        """The entry that its state goes to behind the row that was just planned; None = it is not to be saved."""
        at, size = request.computed, self._page_size
        known = request.wanted and request.wanted[-1] >= at
        due = at in request.wanted
        request.wanted = [later for later in request.wanted if later > at]
        if known and not due:
            return None
        if not due and (at % (STRIDE * size) or not self._entries):
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

    def settle(self) -> None:
        """Before a step is planned: what earlier ones saved can be found, where all tokens are known."""
        fresh, self._fresh = self._fresh, []
        for request, at, entry in fresh:
            if len(request.tokens) < at:
                if request.finished is None:
                    self._fresh.append((request, at, entry))
                else:
                    self._free.append(entry)
                continue
            extend_keys(request.keys, request.tokens, self._page_size, request.spec.salt)
            key = request.keys[at // self._page_size - 1]
            if key in self._index:
                self._free.append(entry)
                continue
            self._index[key] = entry
            if request.rolling == b"" and at % (STRIDE * self._page_size) == 0:
                request.rolling = key

    def withdraw(self, request: Request) -> None:
        """It leaves its slot: tokens that are not known yet may not come, or be others."""
        request.wanted, request.restored, request.branch, request.rolling = [], -1, 0, None
        self._drop_fresh(lambda other, at: other is request and at > len(request.tokens))

    def forget(self, request: Request) -> None:
        """What was saved of this request cannot be trusted."""
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
        kept = [*self._free, *self._index.values(), *(entry for _, _, entry in self._fresh)]
        if sorted(kept) != list(self._entries):
            raise EngineError(f"snapshots are lost or doubled: {sorted(kept)} of {self._entries}")

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        return self._index.popitem(last=False)[1] if self._index else None

    def _let_go(self, key: bytes | None) -> None:
        if key and (entry := self._index.pop(key, None)) is not None:
            self._free.append(entry)

    def _drop_fresh(self, which: Callable[[Request, int], bool]) -> None:
        self._free += [entry for request, at, entry in self._fresh if which(request, at)]
        self._fresh = [fresh for fresh in self._fresh if not which(fresh[0], fresh[1])]
