"""How long a step is: by those who wait, those who run, and what they read."""

from desk import SIZE, Desk

from quire.sched.budget import LEAST, USUAL, StepBudget

# Llama-8B's numbers: a page of 16 tokens has 2 MiB
LLAMA = StepBudget.following(8192, 16 * 131072, 8_030_000_000)


def pages(context: int) -> int:
    return context // 16


def test_a_quiet_server_takes_short_steps():
    assert LLAMA.tokens(pages=0, running=0, waiting=0) == LEAST
    assert LLAMA.tokens(pages(24_000), running=40, waiting=512) == LEAST


def test_many_who_wait_get_the_usual_step():
    assert LLAMA.tokens(pages(24_000), running=40, waiting=6000) == 1540
    assert LLAMA.tokens(pages(24_000), running=40, waiting=100_000) == USUAL


def test_a_step_that_reads_much_is_worth_it():
    assert LLAMA.tokens(pages(150_000), running=250, waiting=512) == USUAL  # no step is a little longer than those recorded
    assert USUAL * 1.5 < LLAMA.tokens(pages(300_000), running=75, waiting=4000) < 5000
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
