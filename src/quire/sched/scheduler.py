"""The scheduling rules: which requests get a row, are admitted, or are preempted.

Every step is a list of rows "n more tokens of this request". Running requests go first, best rank first; then the queue is
admitted as far as slots, pages and the token budget allow. When pages run out, held ones are released, then the running
request of lowest priority is preempted: it frees its pages, keeps its tokens, and returns to its position in the queue. So
is the newest of a tenant with more than its share of the slots, if a tenant with less waits.

Cursors move when a row is planned, not when its result returns: the device runs the steps in order, so everything that a plan
assigns (pages, slots, cached content) is in place for every later plan. A page may therefore be published as soon as the row
that fills it is planned, and reused as soon as its last reader is planned. Only `results` sees token values.

Even in the same step one row may fill a page and another read it, so that requests which arrive together share a prefix at
once: in steps with rows of several tokens, a device writes all keys of a layer before it reads any, or runs decode rows
last. Keys of a decode row are read in the same step only on devices with `single_rows_share`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from quire.cache.policies import Evictable, Recency
from quire.cache.tables import Entries, Tables
from quire.sched.arrivals import Arrivals
from quire.sched.budget import Budget, StepBudget
from quire.sched.draft.speculation import Speculation
from quire.sched.encoding import Encoding
from quire.sched.limits import RequestLimits, finish, reasoning_budget_left
from quire.sched.plan_builder import PlanBuilder, Scheduled
from quire.sched.queue import Order, Policy
from quire.sched.repeat import steady_decode
from quire.sched.results import Results, delta
from quire.sched.roster import Roster, common_prefix
from quire.types.cache import CacheLayout
from quire.types.errors import ConfigError, EngineError, RequestError
from quire.types.outputs import TokenDelta
from quire.types.request import EngineRequest, Request
from quire.types.stats import NO_TIERS, Stats

MAX_COUNTED_REQUESTS = 16  # waiting ones, for the backlog
GROWTH_PAGES = 3  # that a growing request gets in advance while many are free: it allocates less often


class Scheduler:
    """Decide which requests run in each step, and with which tokens.

    A subclass (`scheduler_cls`) may replace `order_class` and extend `add`, `abort`, `schedule` and `stats`.
    """

    order_class: type[Order] = Order

    def __init__(
        self,
        layout: CacheLayout,
        *,
        pages: int,
        max_model_len: int,
        max_batched_tokens: int,
        max_seqs: int,
        chunk_cap: int | None = None,
        chunked: bool = True,
        prefix_caching: bool = True,
        policy: Policy = "fcfs",
        budget: Budget | None = None,
        single_rows_share: bool = False,
        contiguous: bool = True,
        drafts: int = 0,
        speculation: Speculation | None = None,
        snapshots: int | None = None,
        turns: int = 1,
        encoding: Encoding | None = None,
        evictable: Callable[[], Evictable] = Recency,
        records: int = 0,
        snapshot_records: int = 1,
        record_bytes: int | None = None,
        preemption_mode: str = "auto",
        eager_stores: bool = False,
    ) -> None:
        """Create a scheduler.

        budget: tokens of a step; default: `max_batched_tokens`
        single_rows_share: other rows of a step may read keys that a decode row writes
        contiguous: see `Pool`
        drafts: most draft tokens per row of a drafter on the device that drafts in every step; the next row verifies them
        speculation: policy that chooses the drafts of each row; the host (`by_host`) or the device makes them
        snapshots: the model has recurrent layers; number of states besides those of the slots
        turns: pipeline steps in flight; running requests take turns, so that no step waits for a sampled token
        encoding: of the images and videos of prompts; None: requests have none
        evictable: makes the eviction policy of cached pages
        records: pages that the host tier holds; 0: there is none
        snapshot_records: that a snapshot takes there. record_bytes: of a record; default: of a page
        preemption_mode: how preempted requests get pages back that are in the host tier
        eager_stores: full pages go to the host tier at once, not only those that are evicted
        """
        if max_seqs < 1:
            raise ConfigError(f"max_seqs must be at least 1, got {max_seqs}")
        self._encoding = encoding = encoding or Encoding()
        undivided = bool(encoding.undivided)
        self._limits = RequestLimits(layout, pages, max_model_len, max_batched_tokens, chunk_cap, chunked, undivided)
        states = None if snapshots is None else (max_seqs, snapshots)
        self._tables = Tables(
            layout, pages, self._limits.longest_row, prefix_caching, contiguous, states, evictable, records, snapshot_records
        )
        self.pool = self._tables.pool
        self._snapshots = self._tables.snapshots
        self._cuts = chunked and self._snapshots is not None
        self._budget: Budget = budget or StepBudget.constant(max_batched_tokens)
        self._room = max_batched_tokens  # of the current step
        self.roster = roster = Roster(self._tables, self.order_class(policy), max_seqs)
        self._running, self._queue, self._forks, self._live = roster.running, roster.queue, roster.forks, roster.live
        tier = self.tier = self._tables.tier
        size = layout.bytes_per_page if record_bytes is None else record_bytes
        self.arrivals = None if tier is None else Arrivals(self._tables, tier, roster, size, preemption_mode)
        if eager_stores:
            self._tables.offer_published()
        self.results = Results(self._tables, roster, encoding)
        self._paused: set[Request] = set()  # without a row in the next step
        self._to_publish: list[Request] = []  # latest rows may fill pages that are not published yet
        self._to_publish_decode: list[Request] = []  # the same, of decode rows
        self._last: Scheduled | None = None  # the latest step
        self._blocked: tuple[Request, int, int] | None = None  # the request that did not fit, and when
        self._single_rows_share = single_rows_share
        self._drafts, self._turns = drafts, turns
        self.speculation = speculation
        if speculation is not None:
            roster.on_leave.append(speculation.forget)
        self._granted: Mapping[Request, int] = {}  # drafts that `speculation` allows each row of the current step
        self._preallocated_tokens = (
            GROWTH_PAGES * layout.page_size if self._tables.frees_only_at_end and pages >= 4 * GROWTH_PAGES * max_seqs else 0
        )
        self._owed = 0  # pages that requests of the latest plan still need
        self._step = self._queries = self._hits = 0

    # ---- add and end ------------------------------------------------------------------------------------------------

    def add(self, spec: EngineRequest) -> None:
        """Queue a request. One that could never run, even alone, is refused."""
        if spec.id in self._live:
            raise RequestError(f"request id {spec.id!r} is in use; ids of unfinished requests must differ", "request_id")
        spans = self._encoding.admit(spec) if spec.extras.media else ()
        self.roster.add(spec, self._limits.admissible_length(spec), spans)

    def abort(self, ids: Iterable[str]) -> list[TokenDelta]:
        """End requests in any state; their pages and slots are free at once. Unknown and finished ids are ignored."""
        leaving = [self._live[name] for name in dict.fromkeys(ids) if name in self._live]
        for request in leaving:
            self.roster.leave(request, "abort")
        return [delta(request, []) for request in leaving]

    def end(self, name: str, error: str) -> list[TokenDelta]:
        """End a request with an error."""
        request = self._live.get(name)
        if request is None:
            return []
        self.roster.leave(request, "error")
        return [delta(request, [], error=error)]

    def extend(self, name: str, tokens: Iterable[int]) -> list[TokenDelta]:
        """Append tokens to a request that its grammar determines, so that they need not be sampled.

        Nothing happens before it has run, or if it requests logprobs or pooling, or forbids tokens itself: only sampling
        finds out whether these are allowed. While a row is in flight, the request gets no other in the next step, so that this
        can be tried again.
        """
        request = self._live.get(name)
        if request is None or request.admitted < 0 or request.spec.params.wants_logprobs or request.spec.forbids:
            return []
        if request.spec.params.prompt_logprobs is not None and request.scored < len(request.spec.prompt) - 1:
            return []
        if request.rows:
            self._paused.add(request)
            return []
        start, stop, news = len(request.tokens), None, list[int]()
        for token in tokens:
            request.tokens.append(token)
            request.known += 1
            news.append(token)
            if (ending := finish(request, token)) is not None:
                reason, stop = ending
                self.roster.leave(request, reason)
                break
        else:
            if request.slot >= 0:
                self.roster.forced.setdefault(request, start)
        return [delta(request, news, stop=stop)]

    def reset_prefix_cache(self, preempt_running: bool = False) -> bool:
        """Forget all cached content, also of the encoder, and release held pages. Return False, and forget nothing, while a
        request runs.

        preempt_running: running requests are preempted first and compute their tokens' keys and values again
        """
        self.roster.release(list(self._forks.held))
        for request in list(self._running) if preempt_running else ():
            self.roster.preempt(request)
        if len(self._running):
            return False
        self._tables.forget_all()
        if self.arrivals is not None and self.arrivals.disk is not None:
            self.arrivals.disk.clear()
        self._encoding.forget_all()
        return True

    @property
    def has_unfinished(self) -> bool:
        return bool(self._live)

    @property
    def unfinished(self) -> list[str]:
        """Return the ids of all unfinished requests."""
        return list(self._live)

    @property
    def running(self) -> list[str]:
        """Return the ids of requests in slots."""
        return [request.spec.id for request in self._running]

    def in_flight(self, name: str) -> int:
        """Return how many rows of a request are in flight."""
        return self._live[name].rows if name in self._live else 0

    @property
    def waits(self) -> bool:
        """Return whether planning waits for all sampled tokens, which drafts depend on. In a pipeline, requests of the current
        turn have theirs."""
        return self._turns == 1 and self.speculation is not None and self.speculation.waits

    @property
    def stats(self) -> Stats:
        return Stats(
            running=len(self._running),
            waiting=len(self._live) - len(self._running),
            pages=self.pool.pages,
            free_pages=self.pool.free,
            queries=self._queries,
            hits=self._hits,
            preemptions=self.roster.preemptions,
            drafts=self.results.drafts,
            encoder=self._encoding.counts,
            tier=NO_TIERS if self.arrivals is None else self.arrivals.counts,
        )

    # ---- planning --------------------------------------------------------------------------------------------------------

    def schedule(self, now: float) -> Scheduled | None:
        """Return the next step, or None if there is nothing to run."""
        self.publish()
        last = None if self.speculation is None else self._repeatable_step()
        if last is not None and self.speculation is not None:
            scheduled = self._reschedule(last, self.speculation)
            if scheduled is not None:
                return scheduled
        if self._snapshots is not None:
            self._snapshots.publish()
        self._encoding.begin()
        plan = PlanBuilder(self._step)
        decoding = any(request.known == 1 for request in self._running)
        self._room = self._budget.tokens(self.pool.pages - self.pool.free, len(self._running), self._backlog(), decoding)
        if self._forks.families:
            for child in self._forks.wake():
                self._queue.push(child)
        if len(self._running) and (self.roster.order.policy != "fcfs" or len(self.roster.tenants) > 1):
            self._make_way(plan)
        if self.speculation is not None and last is None:
            self._grant(self.speculation)
        left = self._advance(plan)
        self._admit(plan, left, now)
        self.pool.drop(plan.sources)
        self._paused.clear()
        if self.tier is not None:
            plan.move(self.tier.take_moves(plan.step, self._tables.holds))
        for request, start in self.roster.forced.items():
            plan.give(request, start)
        guessed = () if self.speculation is None else (self.speculation.next_drafts, self.speculation.guesses)
        scheduled = plan.build(self.roster.retired, self._last, *guessed)
        if scheduled is not None:
            self.roster.retired, self.roster.forced, self._owed = [], {}, plan.owed
            self._step += 1
            self._last = scheduled
        return scheduled

    def _grant(self, speculation: Speculation) -> None:
        speculation.grant(self._running, None if self._turns == 1 else list(self._requests_of_turn()))
        self._granted = speculation.granted

    def _repeatable_step(self) -> Scheduled | None:
        """Return the latest step if it may be repeated: it had drafts, and a row of every request."""
        last, roster = self._last, self.roster
        if last is None or not len(last.plan.draft_token) or len(last.requests) != len(self._live) or self._turns > 1:
            return None
        if roster.retired or roster.forced or roster.discarded or self._paused or self._snapshots is not None:
            return None
        return last if all(request.slot >= 0 for request in last.requests) else None

    def _reschedule(self, last: Scheduled, speculation: Speculation) -> Scheduled | None:
        """Repeat the latest step, if planning would give the same."""
        self._grant(speculation)
        scheduled = steady_decode(last, self._step, speculation)
        if scheduled is not None:
            self._last, self._step, self._owed = scheduled, self._step + 1, 0
            for request in scheduled.requests:
                (self._to_publish if request.unverified or self._single_rows_share else self._to_publish_decode).append(request)
        return scheduled

    def record_step_time(
        self, scheduled: Scheduled, seconds: float, idle_before: float = 0.0, synchronous: bool = False
    ) -> None:
        """Record the duration of a step; 0: unknown.

        idle_before: seconds that the device was idle before the step, while it was planned
        synchronous: the step was planned after the tokens of the last one were known
        """
        plan = scheduled.plan
        if not scheduled.requests:
            return
        if seconds:
            tokens = plan.tokens - plan.shapes.drafted + scheduled.embeddings
            self._budget.record_step_time(len(scheduled.requests), tokens, seconds)
            if self.arrivals is not None and tokens > 2 * len(scheduled.requests):
                self.arrivals.computed(tokens, seconds)
        if self.speculation is not None:
            self.speculation.record_step_time(scheduled, seconds + idle_before, synchronous)

    def _backlog(self) -> int:
        """Return the waiting prompt tokens, of a limited number of requests."""
        begun = self._running[-1].known if len(self._running) else 0  # of the newest request, whose prompt is chunked first
        return begun + sum(len(request.tokens) for request in islice(self._queue, MAX_COUNTED_REQUESTS))

    def catch_up(self) -> None:
        """Do the work that can wait until a step has started."""
        self.publish()
        if self.speculation is not None:
            self.speculation.evaluate()

    def publish(self, decode: bool = True) -> None:
        """Publish the pages that planned rows fill; decode=False: not those of decode rows. It may be delayed until the next
        search for a prefix."""
        for filling in (self._to_publish, self._to_publish_decode)[: 1 + decode]:
            for request in filling:
                if request.slot >= 0 and request not in self.roster.discarded:
                    self._tables.publish(request)
            filling.clear()

    def _advance(self, plan: PlanBuilder) -> int:
        """Add rows for running requests, best first; return the rest of the budget.

        Only requests after the current one are preempted for it, so the list may lose its end during the loop.
        """
        left, requests, ends, granted = self._room, plan.requests, plan.ends, self._granted
        for request in self._running if self._turns == 1 else self._requests_of_turn():
            if not left:
                break
            end = request.computed + 1
            if end <= request.fast_until and request not in granted:  # the short form of `_place`, for most rows of most steps
                request.computed = end
                requests.append(request)
                ends.append(end)
                left -= 1
                continue
            count = 0 if request in self._paused or self._end_unknown(request) else self._row_length(request, left, plan)
            if count and self._cover(request, request.computed + count, plan):
                most = granted.get(request, self._drafts) if request.known == 1 else 0
                drafts = self._guesses(request, most, left, plan) if most else 0
                left -= self._place(request, count + drafts, plan, drafts, left)
        return left

    def _requests_of_turn(self) -> Iterator[Request]:
        """Yield an equal part of the running requests, of those without a sampled token in flight."""
        share = -(-len(self._running) // self._turns)
        for request in self._running:
            if not share:
                return
            if not request.pending:
                before = request.computed
                yield request
                # one that waits for space in the encoder cache leaves its turn to another
                share -= request.computed != before or request.computed >= request.media_end

    def _admit(self, plan: PlanBuilder, left: int, now: float) -> None:
        while left and self.roster.slots:
            request = self._head(plan)
            if request is None or self._blocked == self._blocked_key(request):
                return
            sources = self._adopt(request, plan)
            count = self._row_length(request, left, plan)
            if not count or not self._fits(request, plan.owed):
                self._undo_adoption(request, sources)
                if count and len(self._running):  # until a page is freed, another attempt would fail, too
                    self._blocked = self._blocked_key(request)
                return
            if self.arrivals is not None and not sources and self.arrivals.hold(request, plan, now):
                self._undo_adoption(request, sources)
                continue
            self._enter(request, plan, now)
            if not self._cover(request, request.computed + count, plan):
                raise EngineError(f"{request.spec.id!r} did not fit in the step that admits it")
            if sources:
                for source, table in zip(sources, request.pages, strict=True):
                    plan.copy(source, table[request.computed // self._tables.page_size])
            left -= self._place(request, count, plan, 0, left)

    def _enter(self, request: Request, plan: PlanBuilder, now: float) -> None:
        """Give the request a slot; it starts after the adopted prefix."""
        self.roster.assign_slot(request)
        plan.admit(request, request.computed)
        if request.restored >= 0:
            plan.load(request.restored, request.slot)
        plan.enter(request.slot, self._tables.entries(request))
        if request.admitted < 0:
            request.scheduled_at = now
            request.cached = min(request.computed, len(request.spec.prompt) - 1)  # a resumed request may find more
            if request.spec.params.reads_prefix_cache and self._tables.prefix_caching:
                self._queries += len(request.spec.prompt)
                self._hits += request.cached
                if self.arrivals is not None:
                    self.arrivals.admitted(request)
        request.admitted = plan.step

    def _row_length(self, request: Request, left: int, plan: PlanBuilder) -> int:
        count = self._limits.row_length(request, left)
        if self._cuts and self._snapshots is not None and count > 1:
            count = self._snapshots.cut(request, count)
        if count and request.computed < request.media_end:
            most = self._limits.budget - plan.tokens
            count = self._encoding.row_length(request, count, left, most, first_prompt=not plan.has_prompts)
        return count

    def _place(self, request: Request, count: int, plan: PlanBuilder, drafts: int, left: int) -> int:
        """Add a row of `count` tokens, the last of which are drafts. Return its part of what is `left` of the budget."""
        start, cost = request.computed, count
        request.computed += count
        request.known -= count - drafts
        if self._snapshots is not None and not drafts and (entry := self._snapshots.save(request)) is not None:
            plan.save(request.slot, entry)
        sample = not request.known and request.spec.samples
        masked = sample and request.spec.params.needs_masks and (request.constrained or reasoning_budget_left(request) <= 0)
        request.sampled = sample
        if sample:
            request.known = 1
            request.unverified += drafts
            if not request.spec.params.needs_masks and not self._drafts:
                request.fast_until = 0 if drafts else min(request.covered, request.limit - 1)
                if self._snapshots is not None:
                    request.fast_until = min(request.fast_until, self._snapshots.next_save(request) - 1)
        else:
            request.chunks += 1
            plan.owed += self._tables.demand(request, len(request.tokens))
        (self._to_publish if count > 1 or self._single_rows_share else self._to_publish_decode).append(request)
        plan.row(request, count, request.computed, 1 + drafts if sample else 0, masked)
        if drafts and self.speculation is not None and self.speculation.by_host:
            plan.draft(self.speculation.tokens(request, drafts))
        if start < request.media_end:
            cost += self._encoding.place(request, start, plan)
        return min(cost, left)

    def _end_unknown(self, request: Request) -> bool:
        """Return whether the end of the last row is unknown. Drafts of the host have positions, so the next row needs it."""
        return request.unverified > 0 and self.speculation is not None and self.speculation.by_host

    def _guesses(self, request: Request, most: int, left: int, plan: PlanBuilder) -> int:
        """Return how many drafts follow the request's known token: as many as fit without cost for other requests."""
        if not request.sampled:
            return 0
        end = request.computed + 1
        room = min(left, self._limits.chunk, reasoning_budget_left(request)) - 1
        drafts = min(most, room, request.limit - 1 - end)
        if drafts > 0 and end + drafts > request.covered:
            self._tables.trim(request)
            grown = self._tables.grow(request, end + drafts)
            if grown is None:
                return max(0, min(drafts, request.covered - end))
            plan.enter(request.slot, grown)
        return max(0, drafts)

    # ---- pages -----------------------------------------------------------------------------------------------------------

    def _head(self, plan: PlanBuilder) -> Request | None:
        """Return the next request to admit. Forks for which waiting for their parent pays are parked."""
        while (request := self._queue.peek()) is not None:
            if request.rows:  # preempted, with rows in flight
                return None
            parent = None if request.spec.fork_of is None else self._forks.parent(request, self._live)
            if parent is None or not self._forks.park(request, parent, plan.written(parent)):
                return request
            self._queue.remove(request)
        return None

    def _adopt(self, request: Request, plan: PlanBuilder) -> list[int]:
        """Start the tables from the content index or from the parent, whichever has more; return the pages to copy."""
        self.publish(decode=False)
        hit = self._tables.find(request) if request.spec.params.reads_prefix_cache else 0
        if request.spec.fork_of is not None and (sources := self._fork(request, plan, hit)) is not None:
            return sources
        request.rewind(hit)
        self._tables.adopt(request, hit)
        return []

    def _fork(self, request: Request, plan: PlanBuilder, hit: int) -> list[int] | None:
        """Share the parent's pages; return None if there is no parent, or it has no more than the index."""
        parent = self._forks.parent(request, self._live)
        if parent is None:
            return None
        shared = min(common_prefix(request.tokens, parent.tokens), len(request.tokens) - 1, plan.written(parent))
        if shared <= hit or not self._tables.can_fork(parent, shared):
            return None
        request.rewind(shared)
        return self._tables.fork(request, parent, shared)

    def _blocked_key(self, request: Request) -> tuple[Request, int, int]:
        """Return a key: as long as it is unchanged, a request that did not fit still does not."""
        return request, self.pool.returned, self.roster.departures

    def _undo_adoption(self, request: Request, sources: list[int]) -> None:
        self.pool.drop(sources)
        self._tables.free(request)
        request.rewind(0)

    def _fits(self, request: Request, owed: int) -> bool:
        """Return whether all tokens of a request fit, besides the pages that others still need. Held pages are released."""
        needed = self._tables.demand(request, len(request.tokens)) + owed
        while needed > self.pool.free:
            if not self._drop_oldest_hold():
                return False
        return True

    def _cover(self, request: Request, end: int, plan: PlanBuilder) -> bool:
        """Allocate pages up to `end`, with preemption if necessary.

        Return False if the request itself was preempted, or if unverified drafts may make the pages unnecessary.
        """
        if end <= request.covered:
            return True
        self._tables.trim(request)
        plenty = self.pool.free - max(self._owed, plan.owed) > self.pool.pages // 4
        reach = min(end + self._preallocated_tokens, request.limit - 1)
        grown = self._tables.grow(request, reach) if plenty and reach > end else None
        if grown is None:
            grown = self._tables.grow(request, end)
        if grown is None:
            grown = self._take_from_others(request, end)
        if grown is not None:
            plan.enter(request.slot, grown)
        return grown is not None

    def _take_from_others(self, request: Request, end: int) -> list[Entries] | None:
        grown: list[Entries] | None = None
        while grown is None:
            if request.unverified:
                return None
            if not self._drop_oldest_hold():
                victim = self._running.lowest_priority(request)
                self.roster.preempt(victim)
                if victim is request:
                    return None
            grown = self._tables.grow(request, end)
        return grown

    def _drop_oldest_hold(self) -> bool:
        name = next(iter(self._forks.held), None)
        if name is not None:
            self.roster.release([name])
        return name is not None

    def _make_way(self, plan: PlanBuilder) -> None:
        """Preempt running requests for the head of the queue, if it can be admitted only then."""
        request = self._head(plan)
        if request is None or self._blocked == self._blocked_key(request):
            return
        if self._running.next_victim(request, list(self._running), self._running.of) is not None:
            sources = self._adopt(request, plan)
            victims = self._victims(request)
            self._undo_adoption(request, sources)
            for victim in victims:
                self.roster.preempt(victim)

    def _victims(self, request: Request) -> list[Request]:
        """Return the fewest requests, in order of preemption, whose slots and pages suffice for `request`; none if none do.

        For a fair share the step's budget does not matter: prompts that have begun are completed.
        """
        staying, of, victims, owned = list(self._running), dict(self._running.of), list[Request](), Counter[int]()
        left = self._room - sum(min(other.known, self._limits.chunk) for other in staying)
        owed = sum(self._tables.demand(other, other.computed + other.known) for other in staying)
        fair = not self.roster.order.outranks(request, staying[-1])
        while True:
            slot = bool(self.roster.slots or victims)
            row = fair or (left > 0 and self._limits.row_length(request, left))
            if slot and row and self._fits(request, owed):
                return victims
            index = self._running.next_victim(request, staying, of)
            if index is None:
                return []
            victim = staying.pop(index)
            of[victim.spec.tenant] -= 1
            victims.append(victim)
            left += min(victim.known, self._limits.chunk)
            owed -= self._tables.demand(victim, victim.computed + victim.known) + self._tables.freed_by(victim, owned)
