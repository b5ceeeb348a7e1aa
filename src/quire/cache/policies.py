"""Eviction policies: which content goes first when memory is needed. The page pool and the tiers below it ask one of these.

    lru    the content that was used longest ago
    lfu    the content with the fewest uses. Ageing: content that enters starts as high as the latest victim stood
    cost   as lfu, but a use counts for as much as it saves: recomputing a page of a long sequence takes more

An item is a page (or another place for content). It is used, then added when nothing uses it any more; only added items are
evicted. Within a sequence the tail is added before the head, so the tail goes first: a head without its tail is still a
prefix, a tail without its head is not.
"""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import count
from typing import Protocol

MAX_STALE = 64  # outdated entries of a heap, besides as many as it has valid ones


class Evictable(Protocol):
    """Items whose content nothing uses, in the order of eviction."""

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

    def add(self, item: int, length: int) -> None:  # noqa: ARG002
        self._items[item] = None

    def use(self, item: int) -> None:
        self._items.pop(item, None)

    def forget(self, item: int) -> None:
        self._items.pop(item, None)

    def pop(self) -> int:
        return self._items.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[int]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._items


class Worth:
    """lfu and cost: the item of least worth goes first; of equal ones, the one that was added longest ago.

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

    def pop(self) -> int:
        while True:
            worth, number, item = heapq.heappop(self._heap)
            if self._entries.get(item) == number:
                self._level = worth
                self.forget(item)
                return item

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __contains__(self, item: object) -> bool:
        return item in self._entries


def policy_maker(name: str, even_pages: float = float("inf")) -> Callable[[], Evictable]:
    """Return what makes the policy of this name.

    even_pages: the length of a sequence at which attention takes as long as everything else in the model; for `cost`
    """
    if name == "lru":
        return Recency
    if name == "lfu":
        return Worth
    return lambda: Worth(lambda length: 1 + length / even_pages)
