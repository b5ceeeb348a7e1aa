"""How long a step is: by those who wait, those who run, and what they read."""

import pytest
from desk import SIZE, Desk

from quire.sched.budget import MIN_TOKENS, USUAL_TOKENS, StepBudget, TimedBudget

# Llama-8B's numbers: a page of 16 tokens has 2 MiB
LLAMA = StepBudget.following(8192, 16 * 131072, 8_030_000_000)


def pages(context: int) -> int:
    return context // 16


def test_a_quiet_server_takes_short_steps():
    assert LLAMA.tokens(pages=0, running=0, waiting=0) == MIN_TOKENS
    assert LLAMA.tokens(pages(24_000), running=40, waiting=512) == MIN_TOKENS


def test_many_who_wait_get_the_usual_step():
    assert LLAMA.tokens(pages(24_000), running=40, waiting=6000) == 1540
    assert LLAMA.tokens(pages(24_000), running=40, waiting=100_000) == USUAL_TOKENS


def test_a_step_that_reads_much_is_worth_it():
    assert LLAMA.tokens(pages(150_000), running=250, waiting=512) == USUAL_TOKENS  # never a little longer than recorded steps
    assert USUAL_TOKENS * 1.5 < LLAMA.tokens(pages(300_000), running=75, waiting=4000) < 5000
    assert LLAMA.tokens(pages(700_000), running=170, waiting=0) == 8192


def test_there_is_always_room_for_prompts():
    assert LLAMA.tokens(pages(0), running=3000, waiting=1) == 3512
    assert LLAMA.tokens(pages(0), running=9000, waiting=1) == 8192
    assert StepBudget.constant(100).tokens(pages=5, running=99, waiting=7) == 100


def test_small_models_read_more_than_they_multiply():
    small = StepBudget.following(8192, 16 * 114688, 600_000_000)
    assert small.tokens(pages(60_000), running=80, waiting=0) == 8192


def test_steps_of_the_scheduler_follow():
    """Least 4, usual 8 tokens, and 2 for every page in use once that is more than 12."""
    desk = Desk(pages=40, budget=32, max_model_len=100, budget_rule=StepBudget(32, 4, 8, 1, 2.0), prefix_caching=False)
    desk.add("a", range(8))
    assert desk.step().tokens == 4  # 8 wait: 2 steps of 4 are as good as one
    assert desk.step().tokens == 4
    desk.add("b", [9] * 60)
    assert desk.step().tokens == 8
    for _ in range(20):
        plan = desk.step()
        if plan is None:
            break
        used = 40 - desk.scheduler.stats.free_pages
        assert plan.tokens <= max(8, 2 * used)
    assert max(plan.tokens for plan in desk.plans) > 8
    assert SIZE == 4


def timed_desk(seconds_per_token: float, seconds_per_step: float = 0.02) -> tuple[Desk, list[float]]:
    """A device whose steps take as long as their tokens make them, and how long each took."""
    desk = Desk(pages=600, budget=1088, max_model_len=2100, budget_rule=TimedBudget(1088), prefix_caching=False)
    now, times, submit = [0.0], list[float](), desk.executor.submit

    def run(plan):
        times.append(seconds_per_step + seconds_per_token * plan.tokens)
        now[0] += times[-1]
        return submit(plan)

    desk.executor.submit, desk.core._clock = run, lambda: now[0]
    return desk, times


@pytest.mark.parametrize("speed", [1e-2, 1e-3, 1e-4])
def test_on_a_cpu_nobody_waits_long_for_a_neighbours_prompt(speed):
    desk, times = timed_desk(speed)
    desk.add("talks", range(20), max_tokens=300)
    desk.step(2)
    times.clear()
    desk.add("long", [7] * 1900, max_tokens=2)
    while not desk.heard["long"]:
        desk.step()
    assert len(desk.heard["talks"]) >= len(times), "it got a token in every step"
    assert max(times[2:]) <= 0.4 and max(times) < 1.5 * 128 * speed + 0.3  # the second step knows the first one's time
    if speed == 1e-4:
        assert len(times) <= 3, "what is quick is not cut"
    desk.finish()
    assert desk.right("talks", "long")


def test_on_a_cpu_a_prompt_alone_runs_in_large_pieces():
    desk, _ = timed_desk(1e-3)
    desk.add("long", [7] * 1900, max_tokens=2)
    desk.finish()
    assert [plan.tokens for plan in desk.plans][:3] == [256, 913, 731] and desk.right("long")


def test_whoever_prompts_has_half_of_a_cpu_that_decodes_slowly():
    budget = TimedBudget(1088)
    budget.record_step_time(64, 64, 1.0)
    budget.record_step_time(64, 164, 2.0)
    assert budget.tokens(pages=0, running=64, waiting=5000, decoding=True) == 64 + 96
