"""No simulated engine idles while another one queues, whatever is cached where; at low load, prefixes stay together."""

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim_support import PAGE, alone, replica, simulate, trace

from quire.bench.arrivals import LoadShape
from quire.sim.figures import figures_of
from quire.sim.fleet import Fleet, router_maker
from quire.sim.trace import Generated

PAGES, CONTEXT = 4000, 600


class Watched:
    """A router that checks each placement against the replicas as they are."""

    def __init__(self, router, replicas, slots):
        self._router, self._replicas, self._slots = router, replicas, slots
        self.queued = 0

    def place(self, request):
        before = [replica.unfinished for replica in self._replicas]
        chosen = self._router.place(request)
        if before[chosen] >= self._slots:
            self.queued += 1
            assert min(before) >= self._slots, f"a request queues on replica {chosen} while slots are free: {before}"
            assert before[chosen] - min(before) <= max(1, self._slots // 4), f"queues differ: {before}"
        return chosen

    def observe(self, deltas):
        self._router.observe(deltas)

    def refused(self, name):
        self._router.refused(name)


def watched_run(work, replicas, slots, **numbers):
    engines = [replica(pages=PAGES, max_seqs=slots, max_model_len=CONTEXT, **numbers) for _ in range(replicas)]
    router = Watched(router_maker("balancer", PAGES, PAGE, slots)(replicas), engines, slots)
    return Fleet(engines, router).run(work), router


def idle_beside_a_queue(run):
    """Seconds in which some replica had no request while another one had requests that waited for a slot."""
    total = 0.0
    numbers = range(len(run.replicas))
    open_between = [[(visit.at, visit.last) for visit in run.visits if visit.replica == i] for i in numbers]
    for i, engine in enumerate(run.replicas):
        for before, step in pairwise(engine.steps):
            if step.waiting and before.waiting:
                middle = (before.at + step.at) / 2
                others = (spans for j, spans in enumerate(open_between) if j != i)
                if any(not any(first <= middle <= last for first, last in spans) for spans in others):
                    total += step.at - before.at
    return total


@settings(deadline=None, max_examples=25)
@given(
    slots=st.integers(1, 12),
    replicas=st.integers(2, 4),
    prefix=st.sampled_from([0, 16, 128, 400]),
    prefixes=st.integers(1, 3),
    output=st.integers(1, 40),
    rate=st.sampled_from([0.05, 0.3, 1.0, 4.0]),
    depth=st.integers(0, 1),
    seed=st.integers(0, 100),
)
def test_no_engine_idles_while_another_queues(slots, replicas, prefix, prefixes, output, rate, depth, seed):
    shape = Generated(40, input_len=8, output_len=output, prefix_len=prefix, num_prefixes=prefixes, seed=seed)
    run, _ = watched_run(shape.trace(LoadShape(request_rate=rate)), replicas, slots, depth=depth)
    assert all(visit.done for visit in run.visits)
    alone_takes = max(visit.last - visit.first for visit in run.visits) + 1.0 + 0.1 * (prefix + 8)
    assert idle_beside_a_queue(run) <= alone_takes, "one request's worth"


@settings(deadline=None, max_examples=10)
@given(st.integers(2, 4), st.integers(1, 5), st.integers(0, 100))
def test_at_low_load_every_prefix_is_computed_once(replicas, prefixes, seed):
    order = random.Random(seed)
    arrivals = [(20.0 * i, ((1 + order.randrange(prefixes), 64), (10 + i, 4)), 4) for i in range(20)]  # one after the other
    run = simulate(trace(*arrivals), replicas, "balancer", pages=1000)
    met = len({visit.replica for visit in run.visits})
    assert sum(not visit.cached for visit in run.visits) <= prefixes and met <= prefixes


def test_a_prefix_that_one_engine_has_does_not_bring_it_all_requests():
    """Long answers after a prefix that is cached on the first replica before the others arrive."""
    shared = ((7, 400),)
    arrivals = [(0.0, (*shared, (8, 4)), 1), *((60.0 + 6.0 * i, (*shared, (9 + i, 4)), 150) for i in range(60))]
    work = trace(*arrivals)
    numbers = {"pages": PAGES, "max_seqs": 64, "max_model_len": CONTEXT, "budget": 512}
    balanced, by_load = (simulate(work, 2, name, **numbers) for name in ("balancer", "load"))
    split = [sum(visit.replica == i for visit in balanced.visits) for i in (0, 1)]
    assert min(split) >= 20, split
    means = [figures_of(run).spreads["e2el"].mean for run in (balanced, by_load)]
    assert means[0] <= 1.05 * means[1]


def test_a_queue_is_seen_by_the_property():
    """Two requests at once on one slot each: the check of placements fires for a router that stacks them."""
    engines = [replica(max_seqs=1) for _ in range(2)]
    stacking = type("Stacking", (), {"place": lambda *_: 0, "heard": lambda *_: None, "refused": lambda *_: None})()
    with pytest.raises(AssertionError, match="slots are free"):
        Fleet(engines, Watched(stacking, engines, 1)).run(trace(alone(0.0, 10, 4), alone(0.0, 10, 4, content=2)))
