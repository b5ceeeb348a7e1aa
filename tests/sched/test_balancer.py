"""Who gets a request, of several engines: by tokens that wait and by what is cached, and nobody who is far behind."""

import random
from math import inf

import pytest
from desk import SIZE, Desk
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sched.balancer import AFFINITY_SLACK_TOKENS, AFFINITY_SPREAD, EXPECTED_OUTPUT_TOKENS, Balancer
from quire.types.media import MediaItem
from quire.types.prompts import Extras
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

PAGE, OUTPUT = 16, EXPECTED_OUTPUT_TOKENS


def request(name, prompt, most=OUTPUT, fork_of=None, hold=False, salt=(), media=(), **params):
    asked = SamplingParams(max_tokens=most, **params)
    ends = {"stop_ids": frozenset(), "eos_ids": frozenset()}
    extras = Extras(media=tuple(media))
    return EngineRequest(
        name, tuple(prompt), asked, 0, **ends, arrival=0.0, fork_of=fork_of, hold=hold, salt=salt, extras=extras
    )


def balancer(engines=2, pages=1000, slots=inf, caching=True, **bounds):
    made = Balancer(engines, **bounds)
    for engine in range(engines):
        made.begin(engine, pages, PAGE, slots, caching)
    return made


def text(seed, length):
    chance = random.Random(seed)
    return [chance.randrange(1000) for _ in range(length)]


BOTH = (0, 1)


def test_tokens_are_balanced_not_requests():
    balance = balancer()
    assert balance.place(request("long", text(0, 3000)), BOTH) == 0
    placed = [balance.place(request(f"short{i}", text(i + 1, 20)), BOTH) for i in range(20)]
    assert placed == [1] * 20, "all of them are less than the long one"
    assert balance.work == [3000 + OUTPUT, 20 * (20 + OUTPUT)]
    balance.add_tokens("long", 1)  # its prompt is done, and it only draws from now on
    assert balance.work[0] == OUTPUT - 1
    assert balance.place(request("next", text(99, 20)), BOTH) == 0


def test_equals_take_turns_one_after_the_other():
    balance = balancer(3)
    order = []
    for i in range(6):
        order.append(balance.place(request(str(i), text(i, 30)), (0, 1, 2)))
        balance.end(str(i))
    assert order == [0, 1, 2, 0, 1, 2] and balance.work == [0, 0, 0]


def test_a_conversation_goes_where_its_pictures_are():
    """Placeholders are the same tokens for all pictures."""
    balance = balancer()

    def ask(name, *digests):
        items = [MediaItem("image", 100 + 300 * i, 300, digest, ()) for i, digest in enumerate(digests)]
        return request(name, [1] * 100 + [2] * 300 * len(digests) + [3] * 40, media=items)

    first = balance.place(ask("first", "a"), BOTH)
    other = balance.place(ask("other", "b"), BOTH)
    assert first != other
    for name in ("first", "other"):
        balance.end(name)
    for name, digests, engine in (("a", "a", first), ("b", "b", other), ("ab", "ab", first), ("ba", "ba", other)):
        assert balance.place(ask(name, *digests), BOTH) == engine
        balance.end(name)


def test_a_beginning_is_found_again_where_it_was_computed():
    balance = balancer()
    system = text(7, 320)
    home = balance.place(request("a", system + text(1, 5)), BOTH)
    other = balance.place(request("b", text(2, 300)), BOTH)
    assert other != home
    for i in range(8):
        assert balance.place(request(f"c{i}", system + text(i, 5), most=1), BOTH) == home
    for more in ({"salt": ("tenant=x",)}, {"prompt_logprobs": 1}):
        other = balance.work.index(min(balance.work))
        named = request("d", system + text(1, 5), **more)
        assert balance.place(named, BOTH) == other, "of no use to another tenant, nor to who has to run them all"
        balance.end("d")


def test_what_many_share_is_computed_twice_before_one_engine_has_all():
    balance = balancer()
    system = text(7, 5000)
    balance.place(request("first", system), BOTH)
    balance.add_tokens("first", 1)
    placed = []
    for i in range(200):
        placed.append(balance.place(request(str(i), system + text(i, 8)), BOTH))
        balance.add_tokens(str(i), 1)
    alone = placed.index(1)
    assert alone == AFFINITY_SLACK_TOKENS // (OUTPUT - 1), "as long as the bound lets it"
    assert abs(placed[alone:].count(0) - placed[alone:].count(1)) <= alone + 1, "from then on both have it"


def test_a_running_request_counts_for_what_it_may_still_generate():
    balance = balancer()
    system = text(7, 2048)
    for i in range(40):  # answers without a limit, all of them long past the expected length
        balance.place(request(str(i), system + text(i, 8), most=None), BOTH)
        balance.add_tokens(str(i), 1000)
    assert sum(balance.engine(str(i)) for i in range(40)) >= 12, "each counts as 128 tokens, and 16 of them as the prefix"
    near_its_end = balancer()
    near_its_end.place(request("a", system, most=1000), BOTH)
    near_its_end.add_tokens("a", 990)
    assert near_its_end.work == [10, 0]


def test_nothing_queues_while_another_engine_has_a_free_slot():
    balance = balancer(slots=4)
    system = text(7, 2048)
    placed = []
    for i in range(8):
        placed.append(balance.place(request(str(i), system + text(i, 8), most=20), BOTH))
        balance.add_tokens(str(i), 1)
    assert placed == [0] * 4 + [1] * 4
    placed = [balance.place(request(f"queued{i}", system + text(i, 8), most=20), BOTH) for i in range(8)]
    assert placed == [0, 1] * 4, "queues of a small batch stay equally long"


def test_cache_that_is_full_makes_a_queue():
    balance = balancer(pages=100)  # 1,600 tokens
    shared = text(7, 800)
    placed = []
    for i in range(3):
        placed.append(balance.place(request(str(i), shared + text(i, 300), most=10), BOTH))
        balance.add_tokens(str(i), 9)  # prompts that have run still take their pages
    assert placed == [0, 0, 1], "800 + 310 + 310 tokens, and the third has no room left"
    for i in range(3):
        balance.end(str(i))
    assert balance.place(request("again", shared + text(0, 300), most=10), BOTH) == 0


def test_a_request_that_has_not_begun_moves_to_a_free_slot_only():
    balance = balancer(slots=2)
    asked = [request(str(i), text(i, 30)) for i in range(3)]
    for one in asked:
        balance.place(one, [0])
    assert balance.move(asked[2], [1]) == 1 and balance.engine("2") == 1 and balance.work == [2 * (30 + OUTPUT), 30 + OUTPUT]
    balance.place(request("other", text(8, 30)), [1])
    assert balance.move(asked[1], [1]) is None and balance.engine("1") == 0
    assert balance.move(asked[1], []) is None


def test_a_lost_engine_has_nothing_cached_and_begins_its_requests_again():
    balance = balancer()
    prompt = text(1, 640)
    home = balance.place(request("a", prompt), BOTH)
    balance.add_tokens("a", 3)
    assert balance.work[home] == OUTPUT - 3
    balance.begin(home, 1000, PAGE)
    assert balance.work[home] == 640 + OUTPUT - 3
    assert balance.place(request("b", prompt), BOTH) != home
    assert balance.place(request("c", prompt), [home]) == home, "if nobody else can"


def test_forks_and_those_that_are_held_stay_together():
    balance = balancer()
    prompt = text(1, 100)
    home = balance.place(request("a#0", prompt, hold=True), BOTH)
    balance.place(request("x", text(2, 30)), BOTH)
    assert [balance.place(request(f"a#{i}", prompt, fork_of="a#0"), BOTH) for i in (1, 2)] == [home] * 2
    balance.end("a#0")
    assert balance.place(request("b", text(3, 900), fork_of="a#0"), BOTH) == home
    balance.release(["a#0", "nobody"])
    assert balance.place(request("c", text(3, 900), fork_of="a#0"), BOTH) != home
    assert balance.place(request("d", prompt, fork_of="b"), [1 - home]) == 1 - home, "its parent's engine is not there"


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 60), st.integers(0, 300), st.data())
def test_work_is_what_is_open_and_nobody_is_far_behind(engines, pages, slack, data):
    balance = balancer(engines, pages, slack=slack)
    open_now, count = {}, 0
    for load in balance._loads:
        load.capacity = inf  # engines with queues have tests of their own
    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from("aaaaatteb"))
        if action == "a":
            among = data.draw(st.lists(st.integers(0, engines - 1), min_size=1, unique=True))
            parent = data.draw(st.sampled_from([None, None, *open_now]))
            prompt = text(data.draw(st.integers(0, 3)), data.draw(st.integers(1, 200)))
            before = list(balance.work)
            name = f"r{count}"
            engine = balance.place(request(name, prompt, data.draw(st.integers(1, 400)), fork_of=parent), among)
            count += 1
            assert engine in among and balance.engine(name) == engine
            least = min(before[each] for each in among)
            if parent is None or open_now[parent] not in among:
                assert before[engine] <= least + slack + AFFINITY_SPREAD * least
                assert before[engine] < balance.work[engine] <= before[engine] + len(prompt) + OUTPUT
            else:
                assert engine == open_now[parent]
            open_now[name] = engine
        elif action == "b":
            begun = data.draw(st.integers(0, engines - 1))
            balance.begin(begun, pages, PAGE)
            balance._loads[begun].capacity = inf
        elif open_now:
            name = data.draw(st.sampled_from(list(open_now)))
            if action == "t":
                balance.add_tokens(name, data.draw(st.integers(0, 50)))
            else:
                balance.end(name)
                del open_now[name]
        for engine in range(engines):
            mine = [balance._open[name] for name, at in open_now.items() if at == engine]
            assert balance.work[engine] == sum(each.prompt + each.output for each in mine)
            assert all(each.prompt >= 0 and each.output >= 1 for each in mine)
            assert len(balance._pages[engine]) <= pages
    for name in [*open_now, "never"]:
        balance.end(name)
    assert balance.work == [0] * engines


def serve_trace(choose, engines=4, groups=12, requests=240):
    """Requests that share one of some long beginnings, run by real schedulers; the share of prompt tokens that were cached."""
    desks = [Desk(pages=140, max_seqs=8, budget=128, max_model_len=200) for _ in range(engines)]
    chance, open_now = random.Random(5), {}
    begun = [[chance.randrange(50) for _ in range(96)] for _ in range(groups)]
    for i in range(requests):
        prompt = begun[chance.randrange(groups)] + [chance.randrange(50) for _ in range(6)]
        engine = choose(desks, i, prompt)
        desks[engine].add(str(i), prompt, 6)
        open_now[str(i)] = engine
        for number, desk in enumerate(desks):
            desk.step()
            for name in [name for name, at in open_now.items() if at == number]:
                heard = desk.heard[name]
                if heard and heard[-1].finish_reason is not None:
                    del open_now[name]
                    choose(desks, None, name)
    for desk in desks:
        desk.finish()
        assert desk.right(*desk.specs)
    stats = [desk.core.stats for desk in desks]
    return sum(each.hits for each in stats) / sum(each.queries for each in stats), [len(desk.specs) for desk in desks]


def test_affinity_finds_more_than_taking_turns_and_leaves_nobody_idle():
    balance = Balancer(4, slack=256)
    for engine in range(4):
        balance.begin(engine, 140, SIZE)

    def affine(_, number, prompt):
        if number is None:
            balance.end(prompt)
            return 0
        return balance.place(request(str(number), prompt, 6), range(4))

    turns, even = serve_trace(lambda desks, i, _: (i or 0) % len(desks))
    found, shares = serve_trace(affine)
    assert even == [60] * 4 and min(shares) >= 30
    assert found > 2 * turns and found > 0.8, "a tenth of the tokens is new to everybody"


def test_a_choice_among_nobody_is_a_mistake():
    with pytest.raises(ValueError, match="empty"):
        balancer().place(request("a", [1]), [])
