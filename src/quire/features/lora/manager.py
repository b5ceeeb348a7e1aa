"""Where each LoRA adapter is (host memory, device slot), and which requests wait for one. Never imports torch.

    requested ──► read by a thread, while steps run ──► host memory ──► device slot, filled between two steps
                                                          ▲                  │
                                                          └── evicted when ──┘  no request holds it and a slot is needed

A request holds its adapter's slot until it ends; before that it is out of the scheduler's queue. An adapter is identified by
the version (digest) of its files: a new version under the same name is another adapter, so an update never reaches a running
request. Names are resolved in the API process (`names.py`).

Free slots go to the adapter whose request has waited longest. While a request waits for a slot, at most PASSES requests whose
adapter already has a slot start before it, so that a popular adapter cannot starve the others.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

from quire.features.lora.reader import AdapterReader, Outcome
from quire.sched.queue import Rank
from quire.sched.roster import Roster
from quire.types.adapter import AdapterFacts, AdapterRef
from quire.types.errors import AdapterChanged, AdapterError, EngineDead, EngineError, NotSupported, RequestError
from quire.types.request import EngineRequest, Request

if TYPE_CHECKING:
    from quire.engine.executor.base import Executor


LAST: Rank = (1 << 63, 0)  # of those that nobody waits for

Tell = Callable[[RequestError | None], None]  # why it could not be loaded, or None: it was


@dataclass(eq=False, slots=True)
class AdapterState:
    """Where one adapter is, and which requests hold it or wait for it."""

    ref: AdapterRef  # of the first request; if its files cannot be read, of one whose files can
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


WAIT = 0.005  # seconds, while there is nothing else to do
PASSES = 64  # requests

logger = logging.getLogger(__name__)


class LoRAManager:
    """Assigns adapter slots to requests.

    places: adapter slots on the device (max_loras).
    host: adapters in host memory, including those on the device (max_cpu_loras).
    refuse: ends a request whose adapter cannot be loaded.
    """

    def __init__(
        self, roster: Roster, executor: "Executor", places: int, host: int, refuse: Callable[[str, RequestError], None]
    ) -> None:
        self._roster, self._executor, self._refuse = roster, executor, refuse
        self.places, self._host = places, max(places, host)
        self._kept: dict[str, AdapterState] = {}  # by version
        self._line: dict[str, AdapterState] = {}  # those of them that are wanted and not there
        self._in_memory: dict[str, AdapterState] = {}  # or on the way
        self._seated: dict[int, AdapterState] = {}  # by place
        self._free = list(range(places, 0, -1))
        self._reader = AdapterReader(lambda ref: executor.read_adapter(ref), lambda ref: executor.read_ahead(ref))
        self._news = False  # something has changed since the latest turn
        self._short = False  # somebody waits for a place
        self._passed = 0  # requests, meanwhile
        self._times = count(1)
        self.reads = self.puts = 0
        if places:
            roster.on_leave.append(self._left)

    # ---- requests --------------------------------------------------------------------------------------------------------

    def supported(self) -> None:
        if not self.places:
            raise NotSupported("lora_request cannot be used: this engine was started without enable_lora", "lora_request")

    def open(self, spec: EngineRequest) -> None:
        """Take in a scheduled request; with an adapter, it starts when the adapter has a slot."""
        ref = spec.extras.lora
        if ref is None:
            return
        kept = self._keep(ref)
        if kept.place and not (self._short and self._passed >= PASSES):
            self._passed += self._short
            self._hold(kept, spec.id)
            return
        kept.waiting[spec.id] = self._roster.order.rank(self._roster.live[spec.id])
        self._wait_for(kept)

    def _left(self, request: Request) -> None:
        """Release the slot of a request that has ended."""
        ref = request.spec.extras.lora
        kept = None if ref is None else self._kept.get(ref.version)
        if kept is None:
            return
        if request.spec.id in kept.waiting:
            del kept.waiting[request.spec.id]
            if not kept.wanted:
                self._line.pop(kept.ref.version, None)
        elif request.place:
            kept.holders -= 1
            kept.used = next(self._times)
            request.place = 0
        self._settle(kept)
        self._news = True

    def _hold(self, kept: AdapterState, name: str) -> None:
        kept.holders += 1
        kept.used = next(self._times)
        self._roster.live[name].place = kept.place
        self._roster.ready(name, "adapter")

    # ---- loading without a request ---------------------------------------------------------------------------------------

    def load(self, ref: AdapterRef, pinned: bool, tell: Tell) -> None:
        """Read an adapter, and put it on the device if a slot is free; a pinned one stays there. `tell` is called once with the
        outcome, perhaps before this returns."""
        try:
            self.supported()
        except NotSupported as error:
            tell(error)
            return
        kept = self._keep(ref)
        others = sum(other.pinned for other in self._kept.values() if other is not kept)
        if pinned and others >= self.places:
            self._settle(kept)
            tell(AdapterError(_all_pinned(self.places), "lora_request"))
            return
        kept.retired, kept.pinned = False, kept.pinned or pinned
        if kept.facts is not None and (kept.place or not kept.pinned):
            tell(None)
            return
        kept.told.append((ref, tell))
        self._wait_for(kept)

    def expect(self, path: str, stamp: str) -> None:
        """Read files ahead while the API process computes their version."""
        if self.places:
            self._reader.ask_ahead(AdapterRef(0, "", path, stamp=stamp))

    def load_now(self, ref: AdapterRef, pinned: bool) -> None:
        """Load an adapter and wait for it, running `turn` here. Raise its error."""
        told: list[RequestError | None] = []
        self.load(ref, pinned, told.append)
        while not told:
            self.turn()
            self.wait()
        if told[0] is not None:
            raise told[0]

    def retire(self, version: str) -> None:
        """Drop a version that no name has any more, when its last request has ended."""
        kept = self._kept.get(version)
        if kept is not None:
            kept.retired, kept.pinned = True, False
            if not kept.wanted:
                self._line.pop(version, None)
            self._settle(kept)
            self._news = True

    # ---- turns -----------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return whether there is work, even without requests."""
        return self._reader.pending > 0 or (self._news and bool(self._line))

    @property
    def reading(self) -> bool:
        return self._reader.pending > 0

    def wait(self) -> None:
        self._reader.wait(WAIT)

    def turn(self) -> None:
        """Between two steps: take in adapters that were read, fill slots, and start the next reads."""
        if self._reader.pending:
            for ref, outcome in self._reader.take():
                self._came(ref, outcome)
        if self._news:
            self._news = self._short = False
            self._fetch()
            self._fill()
            if self._short and sum(kept.pinned for kept in self._seated.values()) == self.places:
                error = AdapterError(_all_pinned(self.places), "lora_request")
                failed = [each for each in self._in_order() if not each.pinned]
                logger.warning("requests with %s end: %s", ", ".join(kept.ref.path for kept in failed), error)
                for kept in failed:
                    self._fail(kept, error)
            self._trim()

    def stop(self) -> None:
        self._reader.stop()

    def check(self) -> None:
        """Raise EngineError if the bookkeeping is inconsistent. For tests."""
        held = [r.spec.extras.lora.version for r in self._roster.live.values() if r.place and r.spec.extras.lora]
        for version, kept in self._kept.items():
            if kept.holders != held.count(version):
                raise EngineError(
                    f"adapter {version:.8} has {kept.holders} holders, but {held.count(version)} requests have it"
                )
            if kept.place and self._seated.get(kept.place) is not kept:
                raise EngineError(f"adapter {version:.8} is not in its place")
            if (version in self._in_memory) != (kept.facts is not None or kept.reading):
                raise EngineError(f"adapter {version:.8} is not in memory, or is there unknown")
        if sorted([*self._free, *self._seated]) != list(range(1, self.places + 1)):
            raise EngineError(f"places are lost or doubled: free {self._free}, taken {list(self._seated)}")

    # ---- inside ----------------------------------------------------------------------------------------------------------

    def _keep(self, ref: AdapterRef) -> AdapterState:
        if ref.version not in self._kept:
            self._kept[ref.version] = AdapterState(ref, used=next(self._times))
        return self._kept[ref.version]

    def _wait_for(self, kept: AdapterState) -> None:
        self._line[kept.ref.version] = kept
        self._news = True
        self._fetch()  # now, and not when the next step is planned

    def _came(self, ref: AdapterRef, outcome: Outcome) -> None:
        kept = self._kept[ref.version]
        if isinstance(outcome, RequestError):
            if isinstance(outcome, AdapterChanged):  # something was read, perhaps
                self._executor.forget_adapter(ref.version)
            kept.failed[ref.path] = outcome
            other = next((each for each in self._refs(kept) if each.path not in kept.failed), None)
            if other is not None:
                self._reader.ask(other)
                return
            kept.reading, self._news = False, True
            del self._in_memory[ref.version]
            self._fail(kept, outcome)
            return
        kept.reading, self._news = False, True
        kept.ref, kept.facts = ref, outcome
        kept.failed.clear()
        self.reads += 1
        self._settle(kept)

    def _refs(self, kept: AdapterState) -> list[AdapterRef]:
        """Return the references of all requests and loads that wait for it."""
        return [*(self._ref(name) or kept.ref for name in kept.waiting), *(ref for ref, _ in kept.told)]

    def _ref(self, name: str) -> AdapterRef | None:
        return self._roster.live[name].spec.extras.lora

    def _fill(self) -> None:
        """Give slots to waiting adapters, in order."""
        for kept in self._in_order():
            if kept.facts is None:
                self._short = self._short or (bool(kept.waiting) and not kept.reading)  # there is no room to read it
                continue
            needed = bool(kept.waiting) or kept.pinned  # otherwise it was only to be read, and takes a place that is free
            behind = self._short and bool(kept.waiting)
            if behind or (not kept.place and (needed or self._free) and not self._seat(kept)):
                self._short = self._short or bool(kept.waiting)
                kept.tell(None)
                if needed or kept.ref.version not in self._line:
                    continue
            for name in list(kept.waiting):
                self._hold(kept, name)
                self._passed = 0
            kept.waiting.clear()
            del self._line[kept.ref.version]
            kept.tell(None)

    def _fetch(self) -> None:
        """Start reading waiting adapters, as far as host memory allows."""
        room = True
        for kept in self._in_order():
            if kept.facts is not None or kept.reading:
                continue
            room = room and self._make_room(kept)
            if room or kept.told:  # who waits to hear whether it can be loaded at all is not kept waiting by others
                kept.reading = True
                self._in_memory[kept.ref.version] = kept
                self._reader.ask(kept.ref)

    def _in_order(self) -> Iterator[AdapterState]:
        return iter(sorted(self._line.values(), key=lambda kept: kept.rank) if self._line else ())

    def _seat(self, kept: AdapterState) -> bool:
        """Put the adapter in a slot, evicting an idle one if needed. Return False if no slot can be freed or it failed."""
        while self._free or self._evict():
            try:
                self._executor.put_adapter(kept.ref, self._free[-1])
            except AdapterError as error:
                changed = isinstance(error, AdapterChanged)  # as another rank found; otherwise more room is needed than a place
                if not changed and self._evict():
                    continue
                if changed or not any(other.holders for other in self._seated.values()):
                    self._fail(kept, error)
                return False
            except EngineDead:
                raise
            except Exception as error:
                logger.exception("an adapter could not be put on the device")
                self._fail(kept, AdapterError(f"{kept.ref.path}: {type(error).__name__}: {error}", "lora_request"))
                return False
            kept.place = self._free.pop()
            self._seated[kept.place] = kept
            self.puts += 1
            return True
        return False

    def _evict(self) -> bool:
        """Free the slot of the least recently used idle adapter."""
        victim = min((kept for kept in self._seated.values() if kept.idle), key=lambda kept: kept.used, default=None)
        if victim is not None:
            self._unseat(victim)
        return victim is not None

    def _unseat(self, kept: AdapterState) -> None:
        self._executor.drop_adapter(kept.place)
        del self._seated[kept.place]
        self._free.append(kept.place)
        kept.place = 0

    def _make_room(self, wanted: AdapterState) -> bool:
        """Make room in host memory for one more adapter."""
        while len(self._in_memory) >= self._host:
            if self._forget_idle():
                continue
            last = max((kept for kept in self._line.values() if kept.facts is not None and kept.idle and not kept.told),
                       key=lambda kept: kept.rank, default=None)  # fmt: skip
            if last is None or last.rank <= wanted.rank:
                return False
            self._forget(last)
        return True

    def _trim(self) -> None:
        while len(self._in_memory) > self._host and self._forget_idle():
            pass

    def _forget_idle(self) -> bool:
        """Free the host memory of the least recently used adapter that no request holds or waits for."""
        idle = (kept for kept in self._in_memory.values() if kept.idle and not kept.wanted and not kept.reading)
        victim = min(idle, key=lambda kept: kept.used, default=None)
        if victim is not None:
            self._discard(victim)
        return victim is not None

    def _forget(self, kept: AdapterState) -> None:
        if kept.place:
            self._unseat(kept)
        if kept.facts is not None:
            kept.facts = None
            del self._in_memory[kept.ref.version]
            self._executor.forget_adapter(kept.ref.version)

    def _settle(self, kept: AdapterState) -> None:
        """What nobody wants and cannot be asked for, or never was there, goes."""
        if kept.idle and not kept.wanted and not kept.reading and (kept.retired or kept.facts is None):
            self._discard(kept)

    def _discard(self, kept: AdapterState) -> None:
        self._forget(kept)
        del self._kept[kept.ref.version]

    def _fail(self, kept: AdapterState, error: RequestError) -> None:
        """Nobody can have it."""
        self._news = True
        self._line.pop(kept.ref.version, None)
        names = {name: self._ref(name) or kept.ref for name in kept.waiting}
        kept.waiting.clear()
        kept.pinned = False
        if not kept.holders and not kept.reading:
            self._discard(kept)
        for name, ref in names.items():
            self._refuse(name, kept.failed.get(ref.path, error))
        kept.tell(error)
        kept.failed.clear()


def _all_pinned(places: int) -> str:
    return f"no adapter can be put on the device: all {places} places have pinned ones; raise max_loras, or remove one of them"
