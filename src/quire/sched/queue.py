"""The order of requests: one number pair says who goes first, among the waiting as among the running.

fcfs: the arrival number. priority: the lower value first, then the arrival number. A request keeps its rank for life, so a
preempted one comes back to its old place. The queue does not know why anyone waits.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Literal

from quire.types.request import Request

Policy = Literal["fcfs", "priority"]
Rank = tuple[int, int]


class Order:
    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def rank(self, request: Request) -> Rank:
        return (request.spec.priority if self.policy == "priority" else 0, request.order)

    def outranks(self, request: Request, other: Request) -> bool:
        """Strictly more important: arriving earlier is not enough."""
        return self.policy == "priority" and request.spec.priority < other.spec.priority


class Queue:
    """The waiting, best first. Leaving from the middle is lazy: the heap entry stays and is skipped."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._heap: list[Rank] = []
        self._members: dict[Rank, Request] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._members.values())

    def __contains__(self, request: Request) -> bool:
        return self._order.rank(request) in self._members

    def push(self, request: Request) -> None:
        rank = self._order.rank(request)
        self._members[rank] = request
        heapq.heappush(self._heap, rank)

    def peek(self) -> Request | None:
        while self._heap and self._heap[0] not in self._members:
            heapq.heappop(self._heap)
        return self._members[self._heap[0]] if self._heap else None

    def remove(self, request: Request) -> None:
        del self._members[self._order.rank(request)]


class Running:
    """The running, best first; the last is the one to preempt."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._requests: list[Request] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=self._order.rank)

    def remove(self, request: Request) -> None:
        del self._requests[bisect_left(self._requests, self._order.rank(request), key=self._order.rank)]
