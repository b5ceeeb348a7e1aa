"""The state of every request, and its transitions.

    unready ──► queue, or parked with its parent ──► running, in a slot ──► finished; some keep their pages (held)
       ▲                   ▲                              │
       └───── suspend ─────┴─────────── preempt ──────────┘

The scheduler decides which request changes its state.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from quire.cache.tables import Tables
from quire.sched.queue import Order, Queue, Running
from quire.types.errors import EngineError
from quire.types.request import EngineRequest, FinishReason, Lack, Request, Spans


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
        if parent is None or parent is child or (parent.spec.salt, parent.marks) != (child.spec.salt, child.marks):
            return None
        return parent if child.shares or parent.spec.prompt == child.spec.prompt else None

    def park(self, child: Request, parent: Request, written: int) -> bool:
        """Park the child if waiting for its parent pays. It never waits for a request of lower rank."""
        if parent.finished is not None or self._order.rank(parent) > self._order.rank(child):
            return False
        target = common_prefix(child.tokens, parent.tokens) - 1
        if written >= target:
            return False
        self.families.setdefault(parent, []).append((target, child))
        return True

    def wake(self) -> list[Request]:
        """Return the children whose parent has computed enough."""
        return [child for parent in list(self.families) for child in self._take(parent, parent.computed)]

    def orphans(self, parent: Request) -> list[Request]:
        """Return all children parked with a parent that leaves."""
        return self._take(parent, parent.limit)

    def unpark(self, child: Request) -> None:
        for parent, family in list(self.families.items()):
            self._set_family(parent, [entry for entry in family if entry[1] is not child])

    def _take(self, parent: Request, computed: int) -> list[Request]:
        family = self.families.get(parent, [])
        self._set_family(parent, [entry for entry in family if entry[0] > computed])
        return [child for target, child in family if target <= computed]

    def _set_family(self, parent: Request, family: list[tuple[int, Request]]) -> None:
        if family:
            self.families[parent] = family
        else:
            self.families.pop(parent, None)


def common_prefix(a: "array[int]", b: "array[int]") -> int:
    shorter = min(len(a), len(b))
    if a[:shorter] == b[:shorter]:
        return shorter
    return next(i for i in range(shorter) if a[i] != b[i])


QueueState = Literal["unready", "waiting", "running", "gone"]


class Roster:
    def __init__(self, tables: Tables, order: Order, max_seqs: int) -> None:
        self._tables = tables
        self.max_seqs = max_seqs
        self.on_move: Callable[[Request, QueueState], None] | None = None  # while there are viewers
        self.on_leave: list[Callable[[Request], None]] = []  # called for every end
        self.order = order
        self.running = Running(self.order)
        self.queue = Queue(self.order, self.running)
        self.forks = Forks(self.order)
        self.live: dict[str, Request] = {}  # all that are not finished: running, in the queue, parked, or unready
        self.tenants: dict[str, int] = {}  # tenant → live requests
        self.discarded: set[Request] = set()  # their rows in flight read pages that were never written
        self.slots = list(range(max_seqs - 1, -1, -1))  # free
        self.forced: dict[Request, int] = {}  # running requests with tokens that the device lacks, from this position on
        self.retired: list[int] = []  # freed slots that no plan has reported to the device
        self.arrivals = self.departures = self.preemptions = 0  # departures: from a slot
        self._unready: set[Request] = set()  # they wait for their grammar, adapter or pages

    def add(self, spec: EngineRequest, limit: int, spans: Spans = ()) -> None:
        self.release([spec.id])
        tokens = array("i", spec.prompt + spec.resumed)
        request = Request(spec, limit=limit, order=self.arrivals, tokens=tokens, scored=spec.scored, spans=spans)
        self.arrivals += 1
        self.live[spec.id] = request
        self.tenants[spec.tenant] = self.tenants.get(spec.tenant, 0) + 1
        if request.constrained:
            request.lacks.add("grammar")
        if spec.extras.lora is not None:
            request.lacks.add("adapter")
        if request.lacks:
            self._unready.add(request)
            self._notify_move(request, "unready")
        else:
            self._enqueue(request)

    def mark_ready(self, name: str, lack: Lack = "grammar") -> None:
        """Record that something the request lacked is ready; it may run when it lacks nothing. Unknown ids are ignored."""
        request = self.live.get(name)
        if request is None or lack not in request.lacks:
            return
        request.lacks.discard(lack)
        if request.lacks:
            self._notify_move(request, "unready")
        else:
            self._unready.discard(request)
            self._enqueue(request)

    def wait_for_pages(self, request: Request) -> None:
        """Move a request out of the queue until `mark_ready`."""
        self.queue.remove(request)
        request.lacks.add("pages")
        self._unready.add(request)
        self._notify_move(request, "unready")

    def suspend(self, name: str) -> None:
        """Suspend a request whose grammar is lost until `mark_ready`. Tokens of its rows in flight are dropped."""
        request = self.live.get(name)
        if request is None:
            return
        waits = bool(request.lacks)
        request.lacks.add("grammar")
        if waits:
            return
        if request.rows:
            self.discarded.add(request)
        if request.slot >= 0:
            self._free_slot(request)
        else:
            self._withdraw(request)
        self._unready.add(request)
        self._notify_move(request, "unready")

    def assign_slot(self, request: Request) -> None:
        """Move a request from the queue to a slot."""
        self.queue.remove(request)
        self.running.add(request)
        request.slot = self.slots.pop()
        self._notify_move(request, "running")

    def preempt(self, request: Request) -> None:
        """Publish its full pages to the prefix cache, release all pages and its slot, and requeue it at its old position."""
        self._free_slot(request)
        request.preemptions += 1
        self.preemptions += 1
        self.queue.push(request)
        self._notify_move(request, "waiting")

    def leave(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state."""
        request.finished = reason
        del self.live[request.spec.id]
        self.tenants[request.spec.tenant] -= 1
        if not self.tenants[request.spec.tenant]:
            del self.tenants[request.spec.tenant]
        if request.slot >= 0:
            if reason != "error" and request not in self.discarded:
                self._tables.publish(request)
            self._vacate(request)
            if request.spec.hold and reason not in ("abort", "error"):
                self.forks.held[request.spec.id] = request
            else:
                self._tables.free(request)
        else:
            self._withdraw(request)
        if request in self.forks.families:
            for child in self.forks.orphans(request):
                self.queue.push(child)
        for callback in self.on_leave:
            callback(request)
        self._notify_move(request, "gone")

    @property
    def compiling(self) -> int:
        """Return how many requests wait for their grammar."""
        return sum("grammar" in request.lacks for request in self._unready)

    def state(self, request: Request) -> QueueState:
        if request.finished is not None:
            return "gone"
        return "running" if request.slot >= 0 else "unready" if request in self._unready else "waiting"

    def release(self, ids: Iterable[str]) -> None:
        """Free the pages of finished requests that hold them. Other ids are ignored."""
        for name in ids:
            if name in self.forks.held:
                self._tables.free(self.forks.held.pop(name))

    def _enqueue(self, request: Request) -> None:
        parent = None if request.spec.fork_of is None else self.forks.parent(request, self.live)
        if parent is None or not self.forks.park(request, parent, parent.computed):
            self.queue.push(request)
        self._notify_move(request, "waiting")

    def _notify_move(self, request: Request, to: QueueState) -> None:
        """Report the request's new state to the viewers, if there are any."""
        if self.on_move is not None:
            self.on_move(request, to)

    def _free_slot(self, request: Request) -> None:
        """Take a request out of its slot; it keeps only its tokens."""
        if request not in self.discarded:
            self._tables.publish(request)
        self._vacate(request)
        self._tables.free(request)
        request.rewind(0)
        request.fast_until = request.inspect_at = 0

    def _vacate(self, request: Request) -> None:
        self.forced.pop(request, None)
        self.running.remove(request)
        self.slots.append(request.slot)
        self.retired.append(request.slot)
        request.slot = -1
        self.departures += 1

    def _withdraw(self, request: Request) -> None:
        """Remove a waiting request."""
        if request in self._unready:
            self._unready.discard(request)
        elif request in self.queue:
            self.queue.remove(request)
        else:
            self.forks.unpark(request)

    def check(self) -> None:
        """Raise EngineError unless pages, references, slots and cursors are consistent. For tests and idle times."""
        running, held = list(self.running), list(self.forks.held.values())
        self._tables.check(running + held)
        if sorted(self.slots + [request.slot for request in running]) != list(range(self.max_seqs)):
            raise EngineError(f"slots are lost or doubled: free {self.slots}, running {[r.slot for r in running]}")
        waiting_and_running = [*running, *self.queue, *self.forks.parked(), *self._unready]
        if sorted(request.order for request in waiting_and_running) != sorted(request.order for request in self.live.values()):
            raise EngineError("a request has no state or two")
        for request in waiting_and_running:
            if min(request.rows, request.pending, request.known, request.unverified, request.settled) < 0:
                raise EngineError(f"the cursors of {request.spec.id!r} are out of bounds")
            if request.slot < 0 and (request.pages or request.computed or request.fast_until):
                raise EngineError(f"{request.spec.id!r} waits but has pages")
            if request.fast_until and (request.known != 1 or request.fast_until > request.covered):
                raise EngineError(f"{request.spec.id!r} takes the fast path, but must not")
