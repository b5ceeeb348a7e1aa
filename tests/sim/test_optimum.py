"""Belady's optimum, beside policies of the real pool in the simulator."""

from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sim_support import PAGE, simulate, trace

from quire.cache.policies import policy_maker
from quire.sim.optimum import optimal_hit_rate, optimal_hits
from quire.sim.trace import Arrival
from quire.types.cache import EVICTION_POLICIES

PROMPTS = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=5)


def _best(arrivals: list[Arrival], pages: int) -> int:
    """Return the most tokens that any choice of kept pages finds."""

    def go(number: int, cached: frozenset[tuple]) -> int:
        if number == len(arrivals):
            return 0
        arrival = arrivals[number]
        tokens = arrival.prompt()
        chains = [tokens[: end * PAGE] for end in range(1, (len(tokens) + arrival.output) // PAGE + 1)]
        reusable = chains[: (len(tokens) - 1) // PAGE]
        hits = next((i for i, chain in enumerate(reusable) if chain not in cached), len(reusable))
        everything = cached | {chain for chain in chains if len(chain) <= len(tokens)}
        kept = min(pages, len(everything))
        return hits * PAGE + max(go(number + 1, frozenset(some)) for some in combinations(everything, kept))

    return go(0, frozenset())


@settings(max_examples=25, deadline=None)
@example(prompts=[[1], [2], [1], [2, 1]], pages=1)  # the only page of a prompt is always computed
@example(prompts=[[1], [2, 2], [1, 1], [2], [2, 2, 1]], pages=2)  # a page that is computed again before it is looked up
@given(prompts=PROMPTS, pages=st.integers(1, 3))
def test_no_choice_of_pages_finds_more_than_the_optimum(prompts, pages: int):
    arrivals = [Arrival(float(i), tuple((content, PAGE) for content in blocks), 1) for i, blocks in enumerate(prompts)]
    assert optimal_hits(arrivals, PAGE, pages) == _best(arrivals, pages)


@pytest.mark.parametrize("name", EVICTION_POLICIES)
def test_policies_of_the_engine_stay_below_it_and_a_large_cache_reaches_it(name: str):
    visits = trace(*((100.0 * i, ((1, 12), (i * 5 % 7 + 2, 20)), 4) for i in range(40)))
    rates = []
    for pages in (24, 200):
        run = simulate(visits, pages=pages, evictable=policy_maker(name, 8.0), max_model_len=60)
        found = sum(visit.cached for visit in run.visits) / sum(visit.prompt for visit in run.visits)
        best = optimal_hit_rate(visits, run, PAGE, pages)
        assert 0 < found <= best < 1
        rates.append((found, best))
    assert rates[1][0] == rates[1][1] > rates[0][1]
