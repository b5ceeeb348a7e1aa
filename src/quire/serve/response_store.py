"""Responses that clients may come back to, in memory and within bounds.

A response belongs to the tenant whose key made it; for others it does not exist. When there are too many, those of the tenant
with the most go first, and of these what was used longest ago: nobody loses anything to others while he has less than they.
Nothing survives a restart.
"""

import asyncio
from collections import Counter, OrderedDict, deque
from dataclasses import dataclass, field
from typing import Any

from quire.serve.body import stop
from quire.serve.response_objects import StoredItem, size_of


@dataclass
class StoredResponse:
    response: dict[str, Any]
    items: list[StoredItem]  # the conversation up to this response, without instructions
    tenant: str | None
    work: "asyncio.Task[None] | None" = None  # of one in the background, while it runs
    bytes: int = field(default=0)

    async def cancel(self) -> None:
        """Ends the work on it, if there still is any."""
        work, self.work = self.work, None
        if work is not None:
            await stop(work)
            if self.response["status"] in ("queued", "in_progress"):
                self.response["status"] = "cancelled"


class ResponseStore:
    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, StoredResponse] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def may_run(self, tenant: str | None, most: int) -> bool:
        """May this tenant have one more in the background? With others about, no more than are left for them then."""
        running = Counter(stored.tenant for stored in self._kept.values() if stored.work is not None)
        left = most - running.total()
        return left > 0 and (tenant is None or running[tenant] < left)

    def put(self, stored: StoredResponse) -> None:
        """Keeps it, or what has become of it. One that is too large for the store is not kept."""
        name = stored.response["id"]
        self.drop(name)
        stored.bytes = size_of(stored.response) + size_of(stored.items)
        if stored.bytes > self._most_bytes and stored.work is None:
            return
        self._kept[name] = stored
        self.bytes += stored.bytes
        if len(self._kept) > self._most or self.bytes > self._most_bytes:
            self._make_room()

    def _make_room(self) -> None:
        count, size = Counter[str | None](), Counter[str | None]()  # by tenant
        idle: dict[str | None, deque[StoredResponse]] = {}  # oldest first
        for one in self._kept.values():
            count[one.tenant] += 1
            size[one.tenant] += one.bytes
            if one.work is None:
                idle.setdefault(one.tenant, deque()).append(one)
        while idle and (len(self._kept) > self._most or self.bytes > self._most_bytes):
            held = size if self.bytes > self._most_bytes else count
            tenant = max(idle, key=lambda each: held[each])
            oldest = idle[tenant].popleft()
            count[tenant] -= 1
            size[tenant] -= oldest.bytes
            self.drop(oldest.response["id"])
            if not idle[tenant]:
                del idle[tenant]

    def get(self, name: str, tenant: str | None) -> StoredResponse | None:
        stored = self._kept.get(name)
        if stored is None or stored.tenant != tenant:
            return None
        self._kept.move_to_end(name)
        return stored

    def drop(self, name: str) -> None:
        stored = self._kept.pop(name, None)
        if stored is not None:
            self.bytes -= stored.bytes
