"""Which replica gets a request."""

from collections.abc import Callable, Sequence
from typing import Protocol

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


class LeastWork:
    """Whoever has the fewest tokens left to run, prompts and answers together: what a trace knows, and a server does not."""

    def __init__(self, replicas: int) -> None:
        self._work = [0] * replicas
        self._open: dict[str, tuple[int, int]] = {}  # request -> replica, tokens

    def place(self, request: EngineRequest) -> int:
        chosen = min(range(len(self._work)), key=lambda replica: (self._work[replica], replica))
        tokens = len(request.prompt) + (request.params.max_tokens or 0)
        self._open[request.id] = chosen, tokens
        self._work[chosen] += tokens
        return chosen

    def heard(self, deltas: Sequence[TokenDelta]) -> None:
        for delta in deltas:
            if delta.finish_reason is not None:
                self.refused(delta.request_id)

    def refused(self, name: str) -> None:
        replica, tokens = self._open.pop(name)
        self._work[replica] -= tokens


ROUTERS: dict[str, Callable[[int], Router]] = {"load": LeastWork, "round-robin": RoundRobin}
