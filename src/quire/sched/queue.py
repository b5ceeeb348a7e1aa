"""The order of requests: a pair of numbers ranks the requests of a tenant, waiting or running.

fcfs: the arrival number. priority: the lower value first, then the arrival number. The rank never changes, so a preempted
request returns to its old position. The queue does not know why a request waits.

Tenants share the slots: of equal priorities, the next admitted request is of the tenant with the fewest running ones, and a
tenant may take a slot from the one with the most as long as that has at least as many afterwards. So every tenant with
requests reaches an equal share of the slots, one slot per step, however many requests others have sent before.
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
        """Return whether the priority is strictly better; an earlier arrival is not enough."""
        return self.policy == "priority" and request.spec.priority < other.spec.priority


class Running:
    """Running requests, best first. Of equal priorities, a request that joins as the only one of its tenant precedes
    those of others, so that each tenant progresses. With one tenant, the last request is the one to preempt."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._requests: list[Request] = []
        self.of: dict[str, int] = {}  # tenant → running requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def add(self, request: Request) -> None:
        tenant = request.spec.tenant
        request.leads_tenant = bool(self.of) and tenant not in self.of
        insort(self._requests, request, key=self._rank)
        self.of[tenant] = self.of.get(tenant, 0) + 1

    def remove(self, request: Request) -> None:
        del self._requests[bisect_left(self._requests, self._rank(request), key=self._rank)]
        tenant = request.spec.tenant
        self.of[tenant] -= 1
        if not self.of[tenant]:
            del self.of[tenant]

    def _rank(self, request: Request) -> tuple[int, bool, int]:
        priority, arrival = self._order.rank(request)
        return priority, not request.leads_tenant, arrival

    def lowest_priority(self, request: Request) -> Request:
        """Return the request to preempt when `request` needs pages: of lowest priority, the newest of the largest tenant.

        It ranks after `request`, or is `request` itself.
        """
        if len(self.of) == 1:
            return self._requests[-1]
        least, found = self._order.rank(self._requests[-1])[0], self._requests[-1]
        for other in reversed(self._requests):
            if self._order.rank(other)[0] != least:
                break
            if self.of[other.spec.tenant] > self.of[found.spec.tenant]:
                found = other
            if other is request:
                break
        return found

    def next_victim(self, request: Request, staying: list[Request], of: dict[str, int]) -> int | None:
        """Return the index in `staying` of the request that is preempted first for `request`; None: none.

        of: running requests of each tenant in `staying`

        It is the lowest that `request` outranks; or else the newest request of the largest tenant, if after the swap that
        tenant still has at least as many slots as the request's tenant, and at least half of its former ones.
        """
        if staying and self._order.outranks(request, staying[-1]):
            return len(staying) - 1
        own, found = of.get(request.spec.tenant, 0), None
        if max(of.values(), default=0) <= own + 1:
            return None
        for i in range(len(staying) - 1, -1, -1):
            tenant = staying[i].spec.tenant
            if self._order.outranks(staying[i], request):
                break
            most = own + 1 if found is None else of[staying[found].spec.tenant]
            if of[tenant] > most and 2 * of[tenant] > self.of[tenant]:
                found = i
        return found


class Queue:
    """Waiting requests: a heap for each tenant, best first. Removal from the middle is lazy: the entry stays and is skipped."""

    def __init__(self, order: Order, running: Running) -> None:
        self._order, self._running = order, running
        self._lines: dict[str, list[Rank]] = {}  # heaps
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
        heapq.heappush(self._lines.setdefault(request.spec.tenant, []), rank)

    def peek(self) -> Request | None:
        heads = [(tenant, head) for tenant in list(self._lines) if (head := self._first(tenant)) is not None]
        if len(heads) < 2:
            return self._members[heads[0][1]] if heads else None
        running = self._running.of
        _, best = min(heads, key=lambda entry: (entry[1][0], running.get(entry[0], 0), entry[1][1]))
        return self._members[best]

    def remove(self, request: Request) -> None:
        del self._members[self._order.rank(request)]

    def _first(self, tenant: str) -> Rank | None:
        line = self._lines[tenant]
        while line and line[0] not in self._members:
            heapq.heappop(line)
        if not line:
            del self._lines[tenant]
            return None
        return line[0]
