"""Which replica gets a request: the balancer of data-parallel serving itself, or what it is to be compared with."""

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.sched.balancer import Balancer
from quire.types.outputs import TokenDelta
from quire.types.request import EngineRequest


class Router(Protocol):
    def place(self, request: EngineRequest) -> int:
        """The number of the replica that is to have a request which has just come."""

    def heard(self, deltas: Sequence[TokenDelta]) -> None:
        """What a step brought."""

    def refused(self, name: str) -> None:
        """The replica did not take it."""


class RoundRobin:
    def __init__(self, replicas: int) -> None:
        self._replicas, self._next = replicas, 0

    def place(self, request: EngineRequest) -> int:  # noqa: ARG002
        self._next += 1
        return (self._next - 1) % self._replicas

    def heard(self, deltas: Sequence[TokenDelta]) -> None:
        """It does not matter here."""

    def refused(self, name: str) -> None:
        """Nor does that."""


class Balanced:
    """As `quire serve` places requests; by load alone without `caching`."""

    def __init__(self, replicas: int, pages: int, page_size: int, slots: int, caching: bool) -> None:
        self._balancer, self._all = Balancer(replicas), range(replicas)
        for replica in self._all:
            self._balancer.begin(replica, pages, page_size, slots, caching)

    def place(self, request: EngineRequest) -> int:
        return self._balancer.place(request, self._all)

    def heard(self, deltas: Sequence[TokenDelta]) -> None:
        add_tokens, end = self._balancer.add_tokens, self._balancer.end
        for delta in deltas:
            if delta.token_ids:
                add_tokens(delta.request_id, len(delta.token_ids))
            if delta.finish_reason is not None:
                end(delta.request_id)

    def refused(self, name: str) -> None:
        self._balancer.end(name)


ROUTERS = ("balancer", "load", "round-robin")
MakeRouter = Callable[[int], Router]


def router_maker(name: str, pages: int, page_size: int, slots: int, caching: bool = True) -> MakeRouter:
    """Return a factory of routers by number of replicas, each with `pages` of cache and `slots` requests at once."""
    if name == "round-robin":
        return RoundRobin
    return lambda replicas: Balanced(replicas, pages, page_size, slots, caching and name == "balancer")
