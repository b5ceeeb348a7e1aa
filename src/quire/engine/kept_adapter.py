"""One adapter as the desk (`adapters.py`) sees it: where it is, and who wants it."""

from collections.abc import Callable
from dataclasses import dataclass, field

from quire.sched.queue import Rank
from quire.types.adapter import AdapterFacts, AdapterRef
from quire.types.errors import RequestError

LAST: Rank = (1 << 63, 0)  # of those that nobody waits for

Tell = Callable[[RequestError | None], None]  # why it could not be loaded, or None: it was


@dataclass(eq=False, slots=True)
class KeptAdapter:
    """An adapter that somebody holds, waits for or has asked to be loaded, or that is still there."""

    ref: AdapterRef  # of whoever asked first; if its files cannot be read, of whoever's could
    facts: AdapterFacts | None = None  # in the host's memory, then
    reading: bool = False
    place: int = 0
    pinned: bool = False
    retired: bool = False  # nobody can ask for it any more
    holders: int = 0  # requests
    waiting: dict[str, Rank] = field(default_factory=dict)  # requests
    told: list[tuple[AdapterRef, Tell]] = field(default_factory=list)  # to be told when it is loaded
    failed: dict[str, RequestError] = field(default_factory=dict)  # by path: the same content may lie in several
    used: int = 0  # when it was, the latest time

    @property
    def rank(self) -> Rank:
        return min(self.waiting.values(), default=LAST)

    @property
    def idle(self) -> bool:
        return not (self.holders or self.pinned)

    @property
    def wanted(self) -> bool:
        return bool(self.waiting or self.told) or (self.pinned and not self.place)

    def tell(self, error: RequestError | None) -> None:
        """Those who wait to hear of it, and no longer: why it cannot be had, or None."""
        told, self.told = self.told, []
        for ref, hear in told:
            hear(error and self.failed.get(ref.path, error))
