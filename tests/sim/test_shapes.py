"""Generated traffic in the shape of recorded traces: the same for a seed, and what the names say."""

import json

import numpy as np
import pytest
from sim_support import PAGE, simulate

from quire.cache.policies import policy_maker
from quire.sim.optimum import optimal_hit_rate
from quire.sim.shapes import SHAPES, mooncake_lines, shaped_trace
from quire.sim.trace import MOONCAKE_BLOCK, mooncake_arrivals
from quire.types.cache import EVICTION_POLICIES


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_for_a_seed(name: str):
    one, again, other = (shaped_trace(name, 60, seed) for seed in (1, 1, 2))
    assert one == again != other
    assert len(one.arrivals) == 60 and one.arrivals[0].at == 0.0
    assert all(a.at <= b.at for a, b in zip(one.arrivals, one.arrivals[1:], strict=False))


@pytest.mark.parametrize("name", ["chat", "agent"])
def test_each_prompt_continues_the_session_with_its_answer(name: str):
    arrivals = shaped_trace(name, 80, 0).arrivals
    by_echo = {arrival.echo: arrival for arrival in arrivals}
    following = [arrival for arrival in arrivals if len(arrival.blocks) > 2]
    assert len(following) > 20
    for arrival in following:
        before = by_echo[arrival.blocks[-2][0]]
        assert arrival.blocks[:-1] == (*before.blocks, (before.echo, before.output)) and before.at < arrival.at
    assert len({arrival.blocks[0] for arrival in arrivals}) < 10, "few beginnings are shared by all"


def test_lines_of_mooncake_are_those_of_its_format():
    lines = list(mooncake_lines(np.random.default_rng(0), 100))
    for line in map(json.loads, lines):
        assert sorted(line) == ["hash_ids", "input_length", "output_length", "timestamp"]
        assert (len(line["hash_ids"]) - 1) * MOONCAKE_BLOCK < line["input_length"] <= len(line["hash_ids"]) * MOONCAKE_BLOCK
    arrivals = mooncake_arrivals("a", lines)
    assert [arrival.length for arrival in arrivals] == [json.loads(line)["input_length"] for line in lines]
    assert len({arrival.blocks[0] for arrival in arrivals}) < len(arrivals), "some begin alike"


@pytest.mark.parametrize("name", SHAPES)
def test_policies_find_something_and_not_more_than_the_optimum(name: str):
    trace = shaped_trace(name, 40, 0, 1 / 64)
    limits = {"pages": 1000, "max_model_len": 3000, "budget": 1024, "max_seqs": 8}
    for policy in EVICTION_POLICIES:
        run = simulate(trace, evictable=policy_maker(policy, 500.0), **limits)
        assert all(visit.done for visit in run.visits)
        found = sum(visit.cached for visit in run.visits) / sum(visit.prompt for visit in run.visits)
        assert 0 < found <= optimal_hit_rate(trace, run, PAGE, 1000)
