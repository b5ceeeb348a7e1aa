"""Eviction policies: which content goes first when memory is needed. The page pool and the tiers below it ask one of these.

    lru    the content that was used longest ago
    lfu    the content with the fewest uses. Ageing: content that enters starts as high as the latest victim stood
    cost   as lfu, but a use counts for as much as it saves: recomputing a page of a long sequence takes more.
           Until that order would have found more than lru, and when it no longer would have, it is lru (`Contest`)

An item is a page (or another place for content). It enters with new content, is used, then added when nothing uses it any
more; only added items are evicted. Within a sequence the tail is added before the head, so the tail goes first: a head
without its tail is still a prefix, a tail without its head is not.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count
from math import sqrt
from typing import Protocol

Key = tuple[int, bytes]  # cache group, content key
MAX_STALE = 64  # outdated entries of a heap, besides as many as it has valid ones
MAX_SAMPLED = 512  # items whose keys are sampled
WINDOW_TURNOVERS = 4  # of the cache, in which a lead decays to 1 / e
MIN_LEAD = 2.0  # standard deviations of a lead that came by chance


class Evictable(Protocol):
    """Items whose content nothing uses, in the order of eviction."""

    def enter(self, item: int, key: Key) -> None:
        """The item, which is in use, has got the content of this key."""

    def add(self, item: int, length: int) -> None:
        """Nothing uses the item any more. length: pages of the sequence that used it last."""

    def use(self, item: int) -> None:
        """The item is used: it is not evicted until it is added again."""

    def forget(self, item: int) -> None:
        """The item has lost its content: its uses do not count any more."""

    def pop(self) -> int:
        """Remove and return the item to evict. There must be one."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]: ...

    def __contains__(self, item: object) -> bool: ...


class Recency:
    """lru"""

    def __init__(self) -> None:
        self._items: OrderedDict[int, None] = OrderedDict()  # oldest first

    def enter(self, item: int, key: Key) -> None:
        """Nothing depends on content."""

    def add(self, item: int, length: int) -> None:  # noqa: ARG002
        self._items[item] = None

    def use(self, item: int) -> None:
        self._items.pop(item, None)

    def forget(self, item: int) -> None:
        self._items.pop(item, None)

    def evict(self, item: int) -> None:
        """Remove an item that another order evicts in place of the oldest one."""
        del self._items[item]

    def pop(self) -> int:
        return self._items.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items


class Worth:
    """lfu: the item of least worth goes first; of equal ones, the one that was added longest ago.

    worth = worth of the latest victim when the item was added + uses * value of a use
    """

    def __init__(self, value: Callable[[int], float] = lambda _: 1.0) -> None:
        """value: of a use by a sequence of this many pages."""
        self._value = value
        self._uses: dict[int, int] = {}  # since the item has its content
        self._entries: dict[int, int] = {}  # item -> number of its valid entry
        self._heap: list[tuple[float, int, int]] = []  # (worth, number, item); entries become stale when items are used
        self._numbers = count()
        self._level = 0.0  # worth of the latest victim

    def enter(self, item: int, key: Key) -> None:  # noqa: ARG002
        self._uses.pop(item, None)

    def add(self, item: int, length: int) -> None:
        number = self._entries[item] = next(self._numbers)
        worth = self._level + (1 + self._uses.get(item, 0)) * self._value(length)
        heapq.heappush(self._heap, (worth, number, item))
        if len(self._heap) > 2 * len(self._entries) + MAX_STALE:
            self._heap = [entry for entry in self._heap if self._entries.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def use(self, item: int) -> None:
        self._uses[item] = self._uses.get(item, 0) + 1
        self._entries.pop(item, None)

    def forget(self, item: int) -> None:
        self._uses.pop(item, None)
        self._entries.pop(item, None)

    def evict(self, item: int) -> None:
        """Remove an item that another order evicts in place of the item of least worth."""
        self._first()
        self.forget(item)

    def pop(self) -> int:
        item = self._first()
        self.forget(item)
        return item

    def _first(self) -> int:
        """Return the item of least worth, which is the level from then on."""
        while self._entries.get(self._heap[0][2]) != self._heap[0][1]:
            heapq.heappop(self._heap)
        self._level, _, item = self._heap[0]
        return item

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries


class Contest:
    """cost: the order of `Recency`, or that of `Worth` once that would have found more.

    Both orders hold all items. What each would have found is counted in two ghosts, which hold keys without content and
    are as large as the cache, or as the share of it whose keys are sampled. A hit in the ghost of `Worth` alone raises the
    lead, one in the other ghost alone lowers it; what was found many turnovers ago counts for less. Hits that follow each
    other are mostly pages of one sequence, so a run of them is one observation: `Worth` is chosen if so large a lead would
    hardly come by chance, and dropped when it has lost the lead.
    """

    def __init__(self, value: Callable[[int], float]) -> None:
        self._orders = Recency(), Worth(value)
        self._ghosts: tuple[Evictable, ...] = Recency(), Worth(value)  # of numbers of keys
        self._keys: dict[int, int] = {}  # item -> number of its key, if that is sampled
        self._sample = 1  # the share of keys in ghosts is 1 / this
        self._chosen = 0  # index of the order that evicts
        self._run = 0  # hits of one ghost alone, below 0 of the first, since the other was as good or better
        self._lead = 0.0  # sum of runs, decaying
        self._variance = 0.0  # of the lead, if no ghost is better: the sum of squares of runs, decaying as squares do

    def enter(self, item: int, key: Key) -> None:
        self._orders[1].enter(item, key)
        number = int.from_bytes(key[1][-8:]) ^ key[0]
        if number % self._sample:
            self._keys.pop(item, None)
            return
        self._keys[item] = number
        self._look_up(number)
        while len(self._keys) > MAX_SAMPLED:
            self._sample_less()

    def add(self, item: int, length: int) -> None:
        for order in self._orders:
            order.add(item, length)
        if (number := self._keys.get(item)) is not None:
            for ghost in self._ghosts:
                ghost.add(number, length)

    def use(self, item: int) -> None:
        number = self._keys.get(item)
        if number is not None and item in self:
            self._look_up(number)
        elif number is not None:
            for ghost in self._ghosts:
                ghost.use(number)
        for order in self._orders:
            order.use(item)

    def forget(self, item: int) -> None:
        for order in self._orders:
            order.forget(item)
        if (number := self._keys.pop(item, None)) is not None:
            for ghost in self._ghosts:
                ghost.forget(number)

    def pop(self) -> int:
        item = self._orders[self._chosen].pop()
        self._orders[1 - self._chosen].evict(item)
        if self._keys.pop(item, None) is not None:
            self._age()
        return item

    def __len__(self) -> int:
        return len(self._orders[0])

    def __iter__(self) -> Iterator[int]:
        return iter(self._orders[0])

    def __contains__(self, item: object) -> bool:
        return item in self._orders[0]

    def _age(self) -> None:
        """Evict from the ghosts what is more than the cache holds, let the lead decay, and choose the order."""
        room = len(self) // self._sample
        for ghost in self._ghosts:
            while len(ghost) > room:
                ghost.pop()
        left = 1 - 1 / (WINDOW_TURNOVERS * (room + 1))
        self._lead *= left
        self._variance *= left * left
        self._chosen = int(self._lead > (0 if self._chosen else MIN_LEAD * sqrt(self._variance)))

    def _look_up(self, number: int) -> None:
        """A sequence needs the content of this key, which the ghosts have or not."""
        hit = 0
        for ghost, sign in zip(self._ghosts, (-1, 1), strict=True):
            if number in ghost:
                hit += sign
                ghost.use(number)
            else:
                ghost.forget(number)
        if self._run * hit <= 0:
            self._lead += self._run
            self._variance += self._run * self._run
            self._run = 0
        self._run += hit

    def _sample_less(self) -> None:
        """Halve the share of keys that are sampled."""
        self._sample *= 2
        self._lead, self._variance = self._lead / 2, self._variance / 4
        self._keys = {item: number for item, number in self._keys.items() if number % self._sample == 0}
        for ghost in self._ghosts:
            for number in [number for number in ghost if number % self._sample]:
                ghost.forget(number)


def policy_maker(name: str, even_pages: float = float("inf")) -> Callable[[], Evictable]:
    """Return what makes the policy of this name.

    even_pages: the length of a sequence at which attention takes as long as everything else in the model; for `cost`
    """
    if name == "lru":
        return Recency
    if name == "lfu":
        return Worth
    return lambda: Contest(lambda length: 1 + length / even_pages)
