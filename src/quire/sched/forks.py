"""Requests that share another one's pages by reference (n > 1, beam search).

    parked   children whose parent, still at work, has not been scheduled through what they share; they are not in the queue
    held     finished requests that keep their pages for children to come, until released or until the room is needed

A child may share only what its parent wrote for the same tokens under the same salt, so both are compared.
"""

from array import array
from collections.abc import Iterator

from quire.sched.queue import Order
from quire.types.request import Request


class Forks:
    def __init__(self, order: Order) -> None:
        self._order = order
        self.families: dict[Request, list[tuple[int, Request]]] = {}  # parent → (tokens it must have computed, child)
        self.held: dict[str, Request] = {}  # oldest first

    def parked(self) -> Iterator[Request]:
        return (child for family in self.families.values() for _, child in family)

    def parent(self, child: Request, live: dict[str, Request]) -> Request | None:
        name = child.spec.fork_of
        if name is None or not child.spec.params.reads_prefix_cache:
            return None
        parent = live.get(name) or self.held.get(name)
        return None if parent is None or parent is child or parent.spec.salt != child.spec.salt else parent

    def park(self, child: Request, parent: Request, settled: int) -> bool:
        """Parks the child if waiting is worth it. It never waits for someone who comes after itself."""
        if parent.finished is not None or self._order.rank(parent) > self._order.rank(child):
            return False
        target = common_prefix(child.tokens, parent.tokens) - 1
        if settled >= target:
            return False
        self.families.setdefault(parent, []).append((target, child))
        return True

    def wake(self) -> list[Request]:
        """Children whose parent has come far enough."""
        return [child for parent in list(self.families) for child in self._take(parent, parent.computed)]

    def orphans(self, parent: Request) -> list[Request]:
        """All children parked with a parent that leaves."""
        return self._take(parent, parent.limit)

    def unpark(self, child: Request) -> None:
        for parent, family in list(self.families.items()):
            self._keep(parent, [entry for entry in family if entry[1] is not child])

    def _take(self, parent: Request, computed: int) -> list[Request]:
        family = self.families.get(parent, [])
        self._keep(parent, [entry for entry in family if entry[0] > computed])
        return [child for target, child in family if target <= computed]

    def _keep(self, parent: Request, family: list[tuple[int, Request]]) -> None:
        if family:
            self.families[parent] = family
        else:
            self.families.pop(parent, None)


def common_prefix(a: "array[int]", b: "array[int]") -> int:
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])
