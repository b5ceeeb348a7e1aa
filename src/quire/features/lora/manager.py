"""Where each LoRA adapter is (host memory, device slot), and which requests wait for one. Never imports torch.

    requested ──► read by a thread, while steps run ──► host memory ──► device slot, filled between two steps
                                                          ▲                  │
                                                          └── evicted when ──┘  no request holds it and a slot is needed

A request holds its adapter's slot until it ends; before that it is out of the scheduler's queue. An adapter is identified by
the version (digest) of its files: a new version under the same name is another adapter, so an update never reaches a running
request. Names are resolved in the API process (`client.py`, `AdapterNames`).

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


LAST: Rank = (1 << 63, 0)  # rank of an adapter that no request waits for

OnLoaded = Callable[[RequestError | None], None]  # called with the error, or None when the adapter is loaded


@dataclass(eq=False, slots=True)
class AdapterState:
    """Where one adapter is, and which requests hold it or wait for it."""

    ref: AdapterRef  # of the first request; if its files cannot be read, of one whose files can
    facts: AdapterFacts | None = None  # None: not in host memory
    reading: bool = False
    slot: int = 0  # on the device; 0: none
    pinned: bool = False
    retired: bool = False  # no new request can use it
    holders: int = 0  # requests in slots
    waiting: dict[str, Rank] = field(default_factory=dict)  # rank of each waiting request, by id
    listeners: list[tuple[AdapterRef, OnLoaded]] = field(default_factory=list)  # called when it is loaded or refused
    failed: dict[str, RequestError] = field(default_factory=dict)  # by path: several paths may have the same content
    used: int = 0  # serial number of the latest use

    @property
    def rank(self) -> Rank:
        return min(self.waiting.values(), default=LAST)

    @property
    def idle(self) -> bool:
        return not (self.holders or self.pinned)

    @property
    def is_needed(self) -> bool:
        return bool(self.waiting or self.listeners) or (self.pinned and not self.slot)

    def report(self, error: RequestError | None) -> None:
        """Call and clear the listeners: with the error, or None when it is loaded."""
        listeners, self.listeners = self.listeners, []
        for ref, listener in listeners:
            listener(error and self.failed.get(ref.path, error))


READ_WAIT_S = 0.005  # for a read, while there is nothing else to do
PASSES = 64  # requests with a loaded adapter that may start before one that waits for a slot

logger = logging.getLogger(__name__)


class LoRAManager:
    """Assigns adapter slots to requests.

    slots: adapter slots on the device (max_loras).
    host: adapters in host memory, including those on the device (max_cpu_loras).
    refuse: ends a request whose adapter cannot be loaded.
    """

    def __init__(
        self, roster: Roster, executor: "Executor", slots: int, host: int, refuse: Callable[[str, RequestError], None]
    ) -> None:
        self._roster, self._executor, self._refuse = roster, executor, refuse
        self.slots, self._host = slots, max(slots, host)
        self._states: dict[str, AdapterState] = {}  # by version
        self._needed: dict[str, AdapterState] = {}  # by version: needed, and not on the device
        self._in_memory: dict[str, AdapterState] = {}  # by version: in host memory, or being read
        self._on_device: dict[int, AdapterState] = {}  # by slot
        self._free = list(range(slots, 0, -1))
        self._reader = AdapterReader(lambda ref: executor.read_adapter(ref), lambda ref: executor.read_ahead(ref))
        self._changed = False  # since the latest turn
        self._short = False  # a request waits for a slot
        self._passed = 0  # requests that started while another one waits for a slot
        self._times = count(1)
        self.reads = self.puts = 0
        if slots:
            roster.on_leave.append(self._release)

    # ---- requests --------------------------------------------------------------------------------------------------------

    def supported(self) -> None:
        if not self.slots:
            raise NotSupported("lora_request cannot be used: this engine was started without enable_lora", "lora_request")

    def open(self, spec: EngineRequest) -> None:
        """Take in a scheduled request; with an adapter, it starts when the adapter has a slot."""
        ref = spec.extras.lora
        if ref is None:
            return
        state = self._state_of(ref)
        if state.slot and not (self._short and self._passed >= PASSES):
            self._passed += self._short
            self._hold(state, spec.id)
            return
        state.waiting[spec.id] = self._roster.order.rank(self._roster.live[spec.id])
        self._wait_for(state)

    def _release(self, request: Request) -> None:
        """Release the slot of a request that has ended."""
        ref = request.spec.extras.lora
        state = None if ref is None else self._states.get(ref.version)
        if state is None:
            return
        if request.spec.id in state.waiting:
            del state.waiting[request.spec.id]
            if not state.is_needed:
                self._needed.pop(state.ref.version, None)
        elif request.adapter_slot:
            state.holders -= 1
            state.used = next(self._times)
            request.adapter_slot = 0
        self._settle(state)
        self._changed = True

    def _hold(self, state: AdapterState, name: str) -> None:
        state.holders += 1
        state.used = next(self._times)
        self._roster.live[name].adapter_slot = state.slot
        self._roster.mark_ready(name, "adapter")

    # ---- loading without a request ---------------------------------------------------------------------------------------

    def load(self, ref: AdapterRef, pinned: bool, on_loaded: OnLoaded) -> None:
        """Read an adapter, and put it on the device if a slot is free; a pinned one stays there.

        on_loaded: called once with the outcome, perhaps before this returns
        """
        try:
            self.supported()
        except NotSupported as error:
            on_loaded(error)
            return
        state = self._state_of(ref)
        others = sum(other.pinned for other in self._states.values() if other is not state)
        if pinned and others >= self.slots:
            self._settle(state)
            on_loaded(AdapterError(_all_pinned(self.slots), "lora_request"))
            return
        state.retired, state.pinned = False, state.pinned or pinned
        if state.facts is not None and (state.slot or not state.pinned):
            on_loaded(None)
            return
        state.listeners.append((ref, on_loaded))
        self._wait_for(state)

    def expect(self, path: str, stamp: str) -> None:
        """Read files ahead while the API process computes their version."""
        if self.slots:
            self._reader.ask_ahead(AdapterRef(0, "", path, stamp=stamp))

    def load_now(self, ref: AdapterRef, pinned: bool) -> None:
        """Load an adapter and wait for it, running `turn` here. Raise its error."""
        outcomes: list[RequestError | None] = []
        self.load(ref, pinned, outcomes.append)
        while not outcomes:
            self.turn()
            self.wait()
        if outcomes[0] is not None:
            raise outcomes[0]

    def retire(self, version: str) -> None:
        """Drop a version that no name has any more, when its last request has ended."""
        state = self._states.get(version)
        if state is not None:
            state.retired, state.pinned = True, False
            if not state.is_needed:
                self._needed.pop(version, None)
            self._settle(state)
            self._changed = True

    # ---- turns -----------------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Return whether there is work, even without requests."""
        return self._reader.pending > 0 or (self._changed and bool(self._needed))

    @property
    def reading(self) -> bool:
        return self._reader.pending > 0

    def wait(self) -> None:
        self._reader.wait(READ_WAIT_S)

    def turn(self) -> None:
        """Between two steps: take in adapters that were read, fill slots, and start the next reads."""
        if self._reader.pending:
            for ref, outcome in self._reader.take():
                self._note_read(ref, outcome)
        if self._changed:
            self._changed = self._short = False
            self._fetch()
            self._fill()
            if self._short and sum(state.pinned for state in self._on_device.values()) == self.slots:
                error = AdapterError(_all_pinned(self.slots), "lora_request")
                failed = [each for each in self._in_order() if not each.pinned]
                logger.warning("requests with %s end: %s", ", ".join(state.ref.path for state in failed), error)
                for state in failed:
                    self._fail(state, error)
            self._trim()

    def stop(self) -> None:
        self._reader.stop()

    def check(self) -> None:
        """Raise EngineError if the bookkeeping is inconsistent. For tests."""
        held = [r.spec.extras.lora.version for r in self._roster.live.values() if r.adapter_slot and r.spec.extras.lora]
        for version, state in self._states.items():
            if state.holders != held.count(version):
                raise EngineError(
                    f"adapter {version:.8} has {state.holders} holders, but {held.count(version)} requests have it"
                )
            if state.slot and self._on_device.get(state.slot) is not state:
                raise EngineError(f"adapter {version:.8} is not in its slot")
            if (version in self._in_memory) != (state.facts is not None or state.reading):
                raise EngineError(f"adapter {version:.8} is in memory without facts, or has facts without being in memory")
        if sorted([*self._free, *self._on_device]) != list(range(1, self.slots + 1)):
            raise EngineError(f"adapter slots are lost or doubled: free {self._free}, taken {list(self._on_device)}")

    # ---- inside ----------------------------------------------------------------------------------------------------------

    def _state_of(self, ref: AdapterRef) -> AdapterState:
        if ref.version not in self._states:
            self._states[ref.version] = AdapterState(ref, used=next(self._times))
        return self._states[ref.version]

    def _wait_for(self, state: AdapterState) -> None:
        self._needed[state.ref.version] = state
        self._changed = True
        self._fetch()  # before the next step is planned

    def _note_read(self, ref: AdapterRef, outcome: Outcome) -> None:
        """Record the outcome of a read. After an error, try another path that has the same content."""
        state = self._states[ref.version]
        if isinstance(outcome, RequestError):
            if isinstance(outcome, AdapterChanged):  # another rank may have read it
                self._executor.forget_adapter(ref.version)
            state.failed[ref.path] = outcome
            other = next((each for each in self._refs(state) if each.path not in state.failed), None)
            if other is not None:
                self._reader.ask(other)
                return
            state.reading, self._changed = False, True
            del self._in_memory[ref.version]
            self._fail(state, outcome)
            return
        state.reading, self._changed = False, True
        state.ref, state.facts = ref, outcome
        state.failed.clear()
        self.reads += 1
        self._settle(state)

    def _refs(self, state: AdapterState) -> list[AdapterRef]:
        """Return the references of all requests and loads that wait for the adapter."""
        return [*(self._ref(name) or state.ref for name in state.waiting), *(ref for ref, _ in state.listeners)]

    def _ref(self, name: str) -> AdapterRef | None:
        return self._roster.live[name].spec.extras.lora

    def _fill(self) -> None:
        """Give slots to waiting adapters, in order."""
        for state in self._in_order():
            if state.facts is None:
                self._short = self._short or (bool(state.waiting) and not state.reading)  # no host memory to read it
                continue
            needed = bool(state.waiting) or state.pinned  # otherwise it takes a slot only if one is free
            waits_longer = self._short and bool(state.waiting)  # a request before it in the order got no slot
            if waits_longer or (not state.slot and (needed or self._free) and not self._assign_slot(state)):
                self._short = self._short or bool(state.waiting)
                state.report(None)
                if needed or state.ref.version not in self._needed:
                    continue
            for name in list(state.waiting):
                self._hold(state, name)
                self._passed = 0
            state.waiting.clear()
            del self._needed[state.ref.version]
            state.report(None)

    def _fetch(self) -> None:
        """Start reading waiting adapters, as far as host memory allows."""
        room = True
        for state in self._in_order():
            if state.facts is not None or state.reading:
                continue
            room = room and self._make_room(state)
            if room or state.listeners:  # a caller that loads it need not wait for other adapters
                state.reading = True
                self._in_memory[state.ref.version] = state
                self._reader.ask(state.ref)

    def _in_order(self) -> Iterator[AdapterState]:
        return iter(sorted(self._needed.values(), key=lambda state: state.rank) if self._needed else ())

    def _assign_slot(self, state: AdapterState) -> bool:
        """Put the adapter in a slot, evicting an idle one if needed. Return False if no slot can be freed or it failed."""
        while self._free or self._evict():
            try:
                self._executor.put_adapter(state.ref, self._free[-1])
            except AdapterError as error:
                changed = isinstance(error, AdapterChanged)  # found by another rank; otherwise the device has too little memory
                if not changed and self._evict():
                    continue
                if changed or not any(other.holders for other in self._on_device.values()):
                    self._fail(state, error)
                return False
            except EngineDead:
                raise
            except Exception as error:
                logger.exception("an adapter could not be put on the device")
                self._fail(state, AdapterError(f"{state.ref.path}: {type(error).__name__}: {error}", "lora_request"))
                return False
            state.slot = self._free.pop()
            self._on_device[state.slot] = state
            self.puts += 1
            return True
        return False

    def _evict(self) -> bool:
        """Free the slot of the least recently used idle adapter."""
        victim = min((state for state in self._on_device.values() if state.idle), key=lambda state: state.used, default=None)
        if victim is not None:
            self._free_slot(victim)
        return victim is not None

    def _free_slot(self, state: AdapterState) -> None:
        self._executor.drop_adapter(state.slot)
        del self._on_device[state.slot]
        self._free.append(state.slot)
        state.slot = 0

    def _make_room(self, new: AdapterState) -> bool:
        """Make room in host memory for one more adapter."""
        while len(self._in_memory) >= self._host:
            if self._forget_idle():
                continue
            read = (state for state in self._needed.values() if state.facts is not None and state.idle and not state.listeners)
            last = max(read, key=lambda state: state.rank, default=None)
            if last is None or last.rank <= new.rank:
                return False
            self._forget(last)
        return True

    def _trim(self) -> None:
        while len(self._in_memory) > self._host and self._forget_idle():
            pass

    def _forget_idle(self) -> bool:
        """Free the host memory of the least recently used adapter that no request holds or waits for."""
        idle = (state for state in self._in_memory.values() if state.idle and not state.is_needed and not state.reading)
        victim = min(idle, key=lambda state: state.used, default=None)
        if victim is not None:
            self._discard(victim)
        return victim is not None

    def _forget(self, state: AdapterState) -> None:
        if state.slot:
            self._free_slot(state)
        if state.facts is not None:
            state.facts = None
            del self._in_memory[state.ref.version]
            self._executor.forget_adapter(state.ref.version)

    def _settle(self, state: AdapterState) -> None:
        """Discard an adapter that no request uses and that is retired or was never read."""
        if state.idle and not state.is_needed and not state.reading and (state.retired or state.facts is None):
            self._discard(state)

    def _discard(self, state: AdapterState) -> None:
        self._forget(state)
        del self._states[state.ref.version]

    def _fail(self, state: AdapterState, error: RequestError) -> None:
        """End the requests that wait for the adapter, and report the error to callers that load it."""
        self._changed = True
        self._needed.pop(state.ref.version, None)
        names = {name: self._ref(name) or state.ref for name in state.waiting}
        state.waiting.clear()
        state.pinned = False
        if not state.holders and not state.reading:
            self._discard(state)
        for name, ref in names.items():
            self._refuse(name, state.failed.get(ref.path, error))
        state.report(error)
        state.failed.clear()


def _all_pinned(slots: int) -> str:
    return f"no adapter can be put on the device: all {slots} slots have pinned ones. Raise max_loras, or remove one of them"
