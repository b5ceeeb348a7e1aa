"""What a simulation says can be computed by hand, is the same every time, and is what the engine itself would do."""

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from sim_support import LAYOUT, PerToken, alone, replica, simulate, trace

from quire.bench.arrivals import LoadShape
from quire.engine.core import EngineCore
from quire.engine.executor.fake import FakeExecutor
from quire.engine.executor.fake_model import FakeModel
from quire.sched.scheduler import Scheduler
from quire.sim.analytic import HostTime
from quire.sim.figures import figures_of, timeline_of
from quire.sim.fleet import Fleet, FrontTime, Objectives, RoundRobin, fewest_replicas
from quire.sim.trace import Generated
from quire.types.plan import StepPlan
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams


def test_one_request_takes_its_steps() -> None:
    run = simulate(trace(alone(5.0, 10, 4)))
    (visit,) = run.visits
    prompt, token = 1.0 + 0.1 * 10, 1.0 + 0.1
    assert visit.ttft == pytest.approx(prompt)
    assert visit.tpot == pytest.approx(token)
    assert visit.e2e == pytest.approx(prompt + 3 * token)
    figures = figures_of(run)
    assert figures.spreads["ttft"] is not None and figures.spreads["ttft"].mean == pytest.approx(1000 * prompt)
    assert figures.fleet.steps == 4 and figures.fleet.busy == pytest.approx(1.0)
    assert figures.fleet.kv_peak == pytest.approx(4 / 200)  # pages of 4 tokens, 13 of which are stored


def test_a_chunked_prompt_takes_all_of_its_steps() -> None:
    (visit,) = simulate(trace(alone(0.0, 100, 1)), budget=64).visits
    assert visit.ttft == visit.e2e == pytest.approx((1.0 + 6.4) + (1.0 + 3.6))


def test_the_processor_is_hidden_behind_the_step_before_where_they_overlap() -> None:
    ahead = simulate(trace(alone(0.0, 10, 5)), depth=1, host=0.5).visits[0]
    behind = simulate(trace(alone(0.0, 10, 5)), depth=0, host=0.5).visits[0]
    assert ahead.ttft == behind.ttft == pytest.approx(0.5 + 2.0)
    assert behind.tpot == pytest.approx(0.5 + 1.1)
    assert ahead.tpot == pytest.approx(1.1)


def test_who_comes_while_a_step_runs_is_in_the_next() -> None:
    first, second = simulate(trace(alone(0.0, 10, 3), alone(1.5, 20, 1, content=2))).visits
    assert second.last == pytest.approx(2.0 + 1.0 + 0.1 * 21)  # beside a token of the first
    assert first.last == pytest.approx(second.last + 1.1)


def test_the_way_to_the_engine_is_waited_for_and_may_cost_a_step() -> None:
    work = trace(alone(0.0, 10, 3), alone(0.0, 10, 3, content=2), alone(0.0, 10, 2, content=3))
    near, far = (
        Fleet([replica()], RoundRobin(1), max_concurrency=2, front=FrontTime(way)).run(work).visits for way in (0.0, 0.25)
    )
    assert far[0].ttft == pytest.approx(near[0].ttft + 0.25)
    alone_there = near[2].ttft  # it came when the others had ended, and nothing ran
    assert far[2].at == pytest.approx(near[2].at + 0.25) and far[2].ttft == pytest.approx(alone_there + 0.25)
    work = trace(alone(0.0, 10, 9), alone(0.0, 10, 3, content=2), alone(0.0, 10, 2, content=3))
    near, far = (
        Fleet([replica()], RoundRobin(1), max_concurrency=2, front=FrontTime(way)).run(work).visits for way in (0.0, 0.25)
    )
    assert near[2].ttft == pytest.approx(1.0 + 0.1 * 11)  # at once, beside the first
    assert far[2].ttft == pytest.approx(1.0 + 0.1 + near[2].ttft), "a step had begun without it"


def test_an_api_process_does_one_thing_after_the_other() -> None:
    """Requests that come together reach the engine one by one, and the tokens of a step their clients."""
    work = trace(*(alone(0.0, 10, 3, content=i) for i in range(3)))
    front = FrontTime(way=0.5, request=0.25, token=0.125)
    visits = Fleet([replica()], RoundRobin(1), front=front).run(work).visits
    first = 0.5 + 2.0
    assert visits[0].ttft == pytest.approx(first + 0.125)
    second = first + 1.0 + 0.1 * 21  # beside a token of the first; its token is written behind that one's
    assert sorted(visit.ttft for visit in visits[1:]) == pytest.approx([second + 0.125 * k for k in (2, 3)])
    apart = Fleet([replica() for _ in range(3)], RoundRobin(3), front=front).run(work).visits
    assert [visit.ttft for visit in apart] == pytest.approx([first + 0.125] * 3)  # as many API processes as engines
    run = Fleet([replica()], RoundRobin(1), max_concurrency=1, front=front).run(work)
    assert [visit.at for visit in run.visits[1:]] == [visit.last for visit in run.visits[:2]]  # when its client has heard
    assert run.end == run.visits[2].last
    front = FrontTime(way=0.5, request=0.25, token=0.125, finish=2.0)
    slow = Fleet([replica()], RoundRobin(1), max_concurrency=1, front=front).run(work)
    assert [visit.at for visit in slow.visits[1:]] == [visit.last + 2.0 for visit in slow.visits[:2]]
    assert [visit.ttft for visit in slow.visits] == pytest.approx([visit.ttft for visit in run.visits])


def test_newcomers_cost_the_processor_more() -> None:
    timing = PerToken(HostTime(0.5, 0.0, 0.25, 0.125))
    one = replica()
    one._host = timing.host
    visits = Fleet([one], RoundRobin(1)).run(trace(alone(0.0, 10, 2), alone(0.0, 10, 2, content=2))).visits
    assert [visit.ttft for visit in visits] == pytest.approx([0.5 + 0.25 + 2 * 0.125 + 3.0] * 2)
    assert [visit.tpot for visit in visits] == pytest.approx([0.5 + 1.2] * 2)


def test_a_shared_beginning_is_computed_once() -> None:
    shared = ((7, 16),)
    run = simulate(trace((0.0, (*shared, (1, 4)), 1), (10.0, (*shared, (2, 4)), 1), (20.0, ((3, 20),), 1)))
    assert [visit.cached for visit in run.visits] == [0, 16, 0]
    assert [visit.ttft for visit in run.visits] == pytest.approx([3.0, 1.4, 3.0])
    assert figures_of(run).hit_rate == pytest.approx(16 / 60)
    off = simulate(trace((0.0, (*shared, (1, 4)), 1), (10.0, (*shared, (2, 4)), 1)), prefix_caching=False)
    assert [visit.cached for visit in off.visits] == [0, 0]


def test_a_conversation_finds_what_was_answered() -> None:
    """The second prompt is the first one, its answer and something new."""
    talk = Generated(requests=2, input_len=8, output_len=9, turns=2, think_time=100.0).trace(LoadShape(request_rate=1.0))
    run = simulate(talk)
    assert [visit.prompt for visit in run.visits] == [8, 8 + 9 + 8]
    assert [visit.cached for visit in run.visits] == [0, 16]  # 8 + 8 of 9: the last token of an answer is never run


def test_pages_that_run_out_preempt() -> None:
    run = simulate(trace(*(alone(0.0, 12, 40, content=i) for i in range(1, 4))), pages=20)
    assert all(visit.done for visit in run.visits)
    figures = figures_of(run)
    assert figures.preemptions == sum(visit.preemptions for visit in run.visits) > 0
    assert figures.fleet.kv_peak == 1.0


def test_what_could_never_run_is_refused_and_told() -> None:
    run = simulate(trace(alone(0.0, 300, 1), alone(0.0, 10, 1, content=2)))
    long, short = run.visits
    assert not long.done and "none is left to generate" in long.refused
    assert short.done
    figures = figures_of(run)
    assert (figures.completed, figures.requests, sum(figures.refused.values())) == (1, 2, 1)


def test_an_answer_ends_where_the_context_does() -> None:
    (visit,) = simulate(trace(alone(0.0, 190, 50)), depth=1).visits
    assert (visit.output, visit.refused) == (10, "")
    assert visit.tpot == pytest.approx(1.1)


def test_no_more_at_once_than_allowed() -> None:
    run = simulate(trace(*(alone(0.0, 10, 2, content=i) for i in range(1, 5))), replicas=2, most=2)
    assert [visit.at for visit in run.visits] == pytest.approx([0.0, 0.0, 3.1, 3.1])
    assert [visit.replica for visit in run.visits] == [0, 1, 0, 1]


def test_the_balancer_keeps_prefixes_together() -> None:
    """Fifteen beginnings, which four replicas in turns would all meet."""
    prompts = Generated(requests=200, input_len=8, output_len=4, prefix_len=64, num_prefixes=15, seed=3)
    work = prompts.trace(LoadShape(request_rate=0.4))
    found = {name: figures_of(simulate(work, 4, name)) for name in ("balancer", "load", "round-robin")}
    assert all(figures.completed == 200 for figures in found.values())
    assert found["balancer"].hit_rate > max(found["round-robin"].hit_rate, found["load"].hit_rate)
    means = {name: figures.spreads["ttft"].mean for name, figures in found.items() if figures.spreads["ttft"] is not None}
    assert means["balancer"] < means["round-robin"]


def test_load_is_counted_in_tokens() -> None:
    """A long request is worth several short ones, wherever they stand in turn."""
    work = trace(alone(0.0, 100, 4), *(alone(0.0, 10, 4, content=i) for i in range(2, 7)))
    assert [visit.replica for visit in simulate(work, 2, "load", max_seqs=8).visits] == [0, 1, 1, 1, 1, 1]
    assert [visit.replica for visit in simulate(work, 2, "round-robin").visits] == [0, 1, 0, 1, 0, 1]


def test_the_same_every_time() -> None:
    work = Generated(requests=60, input_len=20, output_len=8, range_ratio=0.5, prefix_len=8, num_prefixes=3).trace(
        LoadShape(request_rate=1.0)
    )
    first, second = (simulate(work, 3, "balancer", depth=1, pages=40) for _ in range(2))
    assert first.visits == second.visits
    assert [replica.steps for replica in first.replicas] == [replica.steps for replica in second.replicas]
    other = dataclasses.replace(work, arrivals=[dataclasses.replace(work.arrivals[0], output=5), *work.arrivals[1:]])
    assert simulate(other, 3, "balancer", depth=1, pages=40).visits != first.visits


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("pages", [30, 200])
def test_decisions_are_the_engines_own(depth: int, pages: int) -> None:
    """The engine's loop on the executor without a model plans the same steps, if the same requests join in the same turns."""
    work = Generated(requests=40, input_len=24, output_len=16, range_ratio=0.5, prefix_len=12, num_prefixes=3).trace(
        LoadShape(request_rate=0.5)
    )
    one = replica(pages=pages, depth=depth, budget=32)
    planned: list[StepPlan] = []
    schedule = one.scheduler.schedule

    def note(now: float):
        scheduled = schedule(now)
        planned.extend([] if scheduled is None else [scheduled.plan])
        return scheduled

    one.scheduler.schedule = note
    run = Fleet([one], RoundRobin(1)).run(work)
    assert (figures_of(run).preemptions > 0) == (pages == 30)

    numbers = {"pages": pages, "max_seqs": 4, "max_model_len": 200}
    scheduler = Scheduler(LAYOUT, max_batched_tokens=32, **numbers)
    executor = FakeExecutor(LAYOUT, FakeModel.of(LAYOUT), **numbers)
    submitted: list[StepPlan] = []
    submit = executor.submit
    executor.submit = lambda plan: (submitted.append(plan), submit(plan))[1]
    core = EngineCore(scheduler, executor, depth, clock=lambda: 7.0)
    joining = defaultdict(list)
    for name, turn in one.joined.items():
        joining[turn].append(int(name))
    for turn in range(one.turns):
        for number in joining[turn]:
            arrival = work.arrivals[number]
            params = SamplingParams(temperature=0.0, max_tokens=arrival.output, ignore_eos=True)
            core.add(EngineRequest(str(number), arrival.prompt(), params, 0, frozenset(), frozenset(), arrival=0.0))
        core.step()
    assert not core.has_unfinished
    assert len(planned) == len(submitted) > 100
    for ours, theirs in zip(planned, submitted, strict=True):
        for name in ("step", "retired", "slot", "count", "end", "entry_slot", "entry_index", "entry_page", "copy_from"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
        assert [(a.slot, a.start) for a in ours.admitted] == [(a.slot, a.start) for a in theirs.admitted]


def test_the_fewest_replicas_for_an_objective() -> None:
    """Eight requests come together; a replica runs one at a time, so with n of them the slowest waits for 8 / n."""
    work = trace(*(alone(0.0, 10, 1, content=i) for i in range(1, 9)))
    tried: list[int] = []

    def run(replicas: int, wanted):
        tried.append(replicas)
        return Fleet([replica(max_seqs=1) for _ in range(replicas)], RoundRobin(replicas)).run(work, wanted)

    found = fewest_replicas(run, Objectives(ttft=6100.0, percent=100.0), 8, 64)  # three prompts of 2 s
    assert (found.kept, found.replicas, len(found.run.replicas)) == (True, 3, 3)
    assert tried == [1, 2, 4, 3]
    assert [(trial.replicas, trial.kept) for trial in found.trials] == [(1, False), (2, False), (4, True), (3, True)]
    assert found.trials[-1].share == 1.0 and found.trials[0].share is None
    loose = fewest_replicas(run, Objectives(ttft=6100.0, percent=75.0), 8, 64)  # two may be late
    assert loose.replicas == 2 and loose.trials[-1].share == 0.75
    never = fewest_replicas(run, Objectives(ttft=100.0), 8, 4)
    assert (never.kept, never.replicas, never.run.complete) == (False, 4, True)


def test_time_is_divided_among_what_happened() -> None:
    run = simulate(trace(alone(0.0, 10, 11), alone(40.0, 10, 11, content=2)))
    told = timeline_of(run)
    width = told.at[1] - told.at[0]
    assert (told.output_tokens * width).sum() == pytest.approx(22)
    assert told.running.max() == 1.0 and told.running[60] == 0.0  # between the two
    assert 0 < told.kv_usage.max() <= figures_of(run).fleet.kv_peak
