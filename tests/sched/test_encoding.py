"""Which images and videos a step encodes, and what stays in the encoder cache. Pages have four tokens."""

import pytest
from desk import Desk, Faults

from quire.sched.budget import StepBudget
from quire.types.errors import PromptTooLong, RequestError
from quire.types.media import MediaItem

MARK = 40  # the token of an image
TEXT = tuple(range(10, 30))


def prompt(*parts):
    """Tokens and images: an integer is as many tokens of text, (digest, embeddings) an image."""
    tokens, items = [], []
    for part in parts:
        if isinstance(part, int):
            tokens += TEXT[:part]
        else:
            digest, count = part
            items.append(MediaItem("image", len(tokens), count, digest, ()))
            tokens += [MARK] * count
    return {"prompt": tokens, "media": items}


def forgotten(desk):
    return [digest for plan in desk.plans for digest in plan.forget]


def encoded(desk):
    return [len(plan.encode) for plan in desk.plans]


# ---- when it is encoded ---------------------------------------------------------------------------------------------------


def test_an_item_is_encoded_when_a_row_reaches_it_and_not_again():
    desk = Desk(budget=64, chunk_cap=4, encoder=(20, 20))
    desk.add("a", **prompt(5, ("x", 6), 5))
    desk.finish()
    assert [plan.end.tolist() for plan in desk.plans[:4]] == [[4], [8], [12], [16]]
    assert [plan.encode for plan in desk.plans[:4]] == [(), ((0, 0),), (), ()]
    assert desk.right("a") and desk.core.stats.encoder.encoded == 1


def test_a_repeated_picture_is_encoded_once():
    desk = Desk(encoder=(20, 20))
    desk.add("a", **prompt(2, ("x", 6), 3, ("x", 6), 1))
    desk.add("b", **prompt(3, ("x", 6), 1))
    desk.finish()
    desk.add("c", **prompt(1, ("x", 6), 1))
    desk.finish()
    counts = desk.core.stats.encoder
    assert (counts.queries, counts.hits, counts.encoded, counts.embeddings) == (4, 3, 1, 6)
    assert desk.executor.encoder.encoded == ["x"] and desk.right("a", "b", "c")


def test_what_the_prefix_cache_has_is_not_encoded():
    desk = Desk(encoder=(6, 20))
    desk.add("a", **prompt(2, ("x", 6), 4))
    desk.finish()
    desk.add("b", **prompt(2, ("x", 6), 4, ("y", 6), 1))
    desk.finish()
    assert desk.executor.encoder.encoded == ["x", "y"] and forgotten(desk) == ["x"]
    desk.add("c", **prompt(2, ("x", 6), 4, ("z", 1)))
    desk.finish()
    assert desk.cached("b") == desk.cached("c") == 12 and desk.executor.encoder.encoded == ["x", "y", "z"]
    assert desk.right("a", "b", "c")


def test_a_hit_that_ends_inside_an_item_encodes_it():
    desk = Desk(encoder=(8, 20))
    desk.add("a", **prompt(2, ("x", 8), 3))
    desk.add("b", **prompt(2, ("y", 8), 3))
    desk.finish()
    desk.add("c", [*TEXT[:2], *[MARK] * 8], media=[MediaItem("image", 2, 8, "x", ())])
    desk.finish()
    assert desk.cached("c") == 8 and desk.executor.encoder.encoded == ["x", "y", "x"]
    assert desk.right("a", "b", "c")


def test_the_same_tokens_with_another_picture_share_only_what_is_before_it():
    desk = Desk(encoder=(20, 20))
    for name in "xyx":
        desk.add(name + str(len(desk.specs)), **prompt(5, (name, 6), 4))
        desk.finish()
    assert [desk.cached(name) for name in ("x0", "y1", "x2")] == [0, 4, 12]
    assert desk.right("x0", "y1", "x2")


# ---- the cache ------------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_item_is_forgotten():
    desk = Desk(encoder=(8, 20), prefix_caching=False)
    for name in ("a", "b", "a", "c", "a", "b"):
        desk.add(f"{name}{len(desk.specs)}", **prompt(1, (name, 4), 1), max_tokens=1)
        desk.finish()
    assert desk.executor.encoder.encoded == ["a", "b", "c", "b"] and forgotten(desk) == ["b", "c"]
    assert desk.right(*desk.specs)


def test_a_row_ends_before_an_item_that_does_not_fit():
    desk = Desk(encoder=(9, 40))
    desk.add("a", **prompt(2, ("x", 6), 3, ("y", 5), 2))
    desk.finish()
    assert [plan.count.tolist() for plan in desk.plans[:2]] == [[11], [7]]
    assert desk.plans[1].forget == ("x",) and desk.right("a")


def test_an_item_stays_while_a_request_is_inside_it_and_others_wait():
    desk = Desk(encoder=(6, 40), budget=64, chunk_cap=4, pages=40)
    desk.add("a", **prompt(2, ("x", 6), 3))
    desk.add("b", **prompt(1, ("y", 6), 3))
    desk.add("c", TEXT[:9])
    desk.finish()
    # a: 4, 8, 11; b waits after its first token until a has left its item
    rows = [dict(zip(plan.slot.tolist(), plan.count.tolist(), strict=True)) for plan in desk.plans[:4]]
    assert rows == [{0: 4, 1: 1, 2: 4}, {0: 4, 2: 4}, {0: 3, 1: 4, 2: 1}, {0: 1, 1: 4, 2: 1}]
    assert [plan.encode for plan in desk.plans[:4]] == [((0, 0),), (), ((1, 0),), ()]
    assert desk.right("a", "b", "c")


def test_a_large_item_is_not_overtaken_forever():
    """While a request waits for space, later ones begin no item."""
    desk = Desk(encoder=(8, 40), budget=64, chunk_cap=2, pages=60, max_seqs=3, prefix_caching=False)
    desk.add("a", **prompt(("x", 4), 1), max_tokens=1)
    desk.step()
    desk.add("large", **prompt(1, ("y", 8), 1), max_tokens=1)
    for number in range(30):
        desk.add(f"s{number}", **prompt(("x", 4), 1), max_tokens=1)
        desk.step()
        if desk.tokens("large"):
            break
    assert number < 10
    desk.finish()
    assert desk.right(*desk.specs)


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_a_request_that_loses_its_slot_leaves_its_item(how):
    desk = Desk(encoder=(6, 40), chunk_cap=4, policy="priority", max_seqs=1 if how == "preempt" else 2)
    desk.add("a", **prompt(2, ("x", 6), 3))
    desk.step()
    desk.add("b", **prompt(("y", 6), 1), priority=-1)
    if how == "abort":
        desk.core.abort(["a"])
    assert desk.step().encode == ((desk.plans[-1].slot[0], 0),) and forgotten(desk) == ["x"]
    desk.finish()
    assert desk.right("b") and (how == "abort" or desk.right("a"))


# ---- the budget -----------------------------------------------------------------------------------------------------------


def test_embeddings_take_from_the_budget_as_tokens_do():
    desk = Desk(budget=16, encoder=(40, 40))
    desk.add("d", TEXT[:3], 9)
    desk.step()
    desk.add("a", **prompt(2, ("x", 6), 8))
    assert desk.step().count.tolist() == [1, 9]  # 1 + 9 + 6 embeddings
    assert desk.step().count.tolist() == [1, 7]
    desk.finish()
    assert desk.right("a", "d")


def test_an_item_that_would_exceed_the_budget_waits_for_the_next_step():
    desk = Desk(budget=16, encoder=(40, 40))
    desk.add("a", **prompt(3, ("x", 4), 2))
    desk.add("b", **prompt(1, ("y", 4), 2))
    assert desk.step().count.tolist() == [9, 1]
    plan = desk.step()
    assert (plan.count.tolist(), plan.encode) == ([1, 6], ((1, 0),))
    desk.finish()
    assert desk.right("a", "b")


def test_an_item_larger_than_the_budget_goes_alone():
    desk = Desk(budget=12, encoder=(60, 12), pages=40)
    desk.add("d", TEXT[:3], 12)
    desk.step()
    desk.add("a", **prompt(2, ("x", 20), ("y", 20), 1))
    desk.finish()
    with_items = [plan for plan in desk.plans if plan.encode]
    assert [plan.encode for plan in with_items] == [((1, 0),), ((1, 1),)]
    assert all(len(plan.slot) == 2 and plan.count.tolist() == [1, 1] for plan in with_items), "its first token goes with it"
    assert max(plan.tokens for plan in desk.plans) <= 12
    assert desk.right("a", "d")


def test_a_step_encodes_no_more_than_its_limit():
    desk = Desk(budget=64, encoder=(60, 10), pages=40, max_model_len=80)
    desk.add("a", **prompt(*[(name, 4) for name in "uvwxyz"], 1))
    desk.finish()
    assert encoded(desk)[:3] == [2, 2, 2] and desk.right("a")


def test_the_time_of_a_step_is_divided_by_its_embeddings_too():
    seen = []

    class Recorder:
        def tokens(self, pages, running, waiting, decoding):
            return 64

        def record_step_time(self, rows, tokens, seconds):
            seen.append((rows, tokens))

    now = [0.0]

    def clock():
        now[0] += 1.0
        return now[0]

    desk = Desk(encoder=(60, 60), budget_rule=Recorder(), clock=clock)
    desk.add("a", **prompt(2, ("x", 6), 3))
    desk.finish()
    assert seen[:2] == [(1, 17), (1, 1)]


# ---- refusals -------------------------------------------------------------------------------------------------------------


def refused(desk, error=RequestError, **more):
    with pytest.raises(error) as found:
        desk.add("r", **more)
    assert not desk.core.has_unfinished
    return str(found.value)


def test_what_can_never_be_encoded_is_refused():
    assert "raise mm_encoder_cache_size" in refused(Desk(encoder=(5, 20)), **prompt(("x", 6), 1))
    assert "reads no" not in refused(Desk(), **prompt(("x", 6), 1)) and "does not read" in refused(
        Desk(), **prompt(("x", 6), 1)
    )
    two = prompt(("x", 4), ("y", 4), 1)
    desk = Desk(encoder=(5, 20))
    desk.add("a", **two)
    desk.finish()
    assert desk.right("a")
    assert "in one step" in refused(Desk(encoder=(5, 20), undivided="prompt"), **two)
    assert "in one step" in refused(Desk(encoder=(5, 20), chunked=False), **two)
    same = Desk(encoder=(5, 20), undivided="prompt")
    same.add("a", **prompt(("x", 4), ("x", 4), 1))
    same.finish()
    assert same.right("a")


def test_what_does_not_fit_one_step_is_refused():
    assert "Raise max_num_batched_tokens" in refused(
        Desk(budget=5, encoder=(9, 9), undivided="item"), PromptTooLong, **prompt(3, ("x", 6), 1)
    )
    assert "Raise max_num_batched_tokens, or shorten" in refused(
        Desk(budget=9, encoder=(9, 9), undivided="prompt"), PromptTooLong, **prompt(3, ("x", 6), 1)
    )


def test_rotary_positions_stay_below_the_longest_context():
    video = [MediaItem("video", 1, 4, "v", (), (), (4, 1, 1), 10.0)]  # positions 1, 11, 21, 31; then 2
    tokens = [1, *[MARK] * 4, 2, 3]
    desk = Desk(max_model_len=32, encoder=(9, 9))
    desk.add("a", tokens, 9, media=video)
    desk.finish()
    assert len(desk.tokens("a")) == 9
    said = refused(Desk(max_model_len=31, encoder=(9, 9)), PromptTooLong, prompt=tokens, media=video)
    assert "positions up to 31; the longest context is 31" in said


# ---- rows that are not divided --------------------------------------------------------------------------------------------


def test_an_image_is_one_row_whatever_the_chunks():
    desk = Desk(budget=16, chunk_cap=3, encoder=(40, 40), undivided="item")
    desk.add("a", **prompt(5, ("x", 6), ("y", 5), 3))
    desk.finish()
    assert [plan.end.tolist() for plan in desk.plans[:5]] == [[3], [5], [11], [16], [19]]
    assert desk.right("a")


def test_an_image_may_exceed_the_usual_step_but_not_the_largest():
    rule = StepBudget(16, 4, 4, 1, 0.0)
    desk = Desk(budget=16, budget_rule=rule, encoder=(40, 40), undivided="item", pages=40)
    desk.add("a", **prompt(2, ("x", 12), 3))
    desk.finish()
    assert [plan.count.tolist() for plan in desk.plans[:2]] == [[2], [12]] and desk.right("a")
    desk = Desk(budget=16, encoder=(40, 40), undivided="item", pages=40, max_seqs=6)
    for number in range(5):
        desk.add(f"d{number}", [number], 4)
    desk.add("a", **prompt(("x", 13), 3), max_tokens=2)
    desk.finish()
    assert max(plan.tokens for plan in desk.plans) <= 16 and desk.right(*desk.specs)


def test_a_hit_inside_an_image_begins_before_it():
    desk = Desk(encoder=(40, 40), undivided="item")
    desk.add("a", **prompt(6, ("x", 7), 3))
    desk.finish()
    desk.add("b", **prompt(6, ("x", 7)))
    desk.finish()
    assert desk.cached("b") == 4 and desk.right("a", "b")
    desk.add("c", **prompt(6, ("x", 7), 4, 1))
    desk.finish()
    assert desk.cached("c") == 16 and desk.right("c")


def test_a_snapshot_inside_an_image_is_taken_before_it():
    desk = Desk(encoder=(40, 40), undivided="item", snapshots=4)
    desk.add("a", **prompt(6, ("x", 7)))
    desk.finish()
    assert [plan.end.tolist() for plan in desk.plans[:2]] == [[4], [13]], "not at 12"
    desk.add("b", **prompt(6, ("x", 7)))
    desk.finish()
    assert desk.cached("b") == 4 and desk.right("a", "b")


def test_a_prompt_with_an_image_is_one_row_and_shares_nothing():
    desk = Desk(budget=20, chunk_cap=4, encoder=(40, 40), undivided="prompt")
    for name in "ab":
        desk.add(name, **prompt(("x", 6), 7))
        desk.finish()
    assert [plan.count.tolist() for plan in desk.plans if plan.tokens > 1] == [[13], [13]]
    assert desk.cached("b") == 0 and desk.scheduler.pool.cached == 0
    desk.add("t", [*[MARK] * 6, *TEXT[:7]])
    desk.finish()
    assert desk.plans[-4 - 3].count.tolist() == [4], "text is divided"
    assert desk.cached("t") == 0 and desk.right("a", "b", "t")
    assert desk.executor.encoder.encoded == ["x"]


def test_forks_of_a_prompt_with_an_image_share_it_when_it_is_computed():
    desk = Desk(budget=40, encoder=(40, 40), undivided="prompt")
    desk.add("a", **prompt(("x", 6), 7))
    desk.add("b", **prompt(("x", 6), 7), fork_of="a")
    desk.add("other", **prompt(("x", 6), 8), fork_of="a")
    desk.finish()
    assert desk.cached("b") == 12 and desk.cached("other") == 0
    assert desk.right("a", "b", "other")


def test_a_preempted_prompt_with_an_image_is_computed_whole_again():
    desk = Desk(pages=7, budget=40, encoder=(40, 40), undivided="prompt")
    desk.add("a", **prompt(("x", 6), 2), max_tokens=9)
    desk.add("b", **prompt(("x", 6), 2), max_tokens=9)
    desk.finish()
    assert desk.core.stats.preemptions and desk.right("a", "b")


def test_prompt_logprobs_and_drafts_go_with_images():
    for undivided in ("", "item", "prompt"):
        desk = Desk(budget=20, encoder=(40, 40), undivided=undivided, drafts=2)
        desk.add("a", **prompt(2, ("x", 6), 7), prompt_logprobs=1, max_tokens=6)
        desk.add("b", **prompt(3, ("x", 6), 2), max_tokens=6)
        desk.finish()
        scores = [int(token) for delta in desk.heard["a"] for top in delta.prompt_logprobs for token in top.ids[:, 0]]
        assert tuple(scores) == desk.specs["a"].prompt[1:] and desk.right("a", "b")


# ---- the answer to a video ------------------------------------------------------------------------------------------------


def test_the_answer_to_a_video_is_found_as_part_of_a_prompt():
    """Its rotary positions are the same, however late the last frame of the video is."""
    for grid in ((1, 2, 2), (4, 1, 1)):
        video = [MediaItem("video", 1, 4, "v", (), (), grid)]
        desk = Desk(encoder=(9, 9))
        desk.add("a", [1, *[MARK] * 4, 2], 12, media=video)
        desk.finish()
        desk.add("b", [*desk.specs["a"].prompt, *desk.tokens("a")], media=video)
        desk.finish()
        assert desk.cached("b") == 16 and desk.right("a", "b")


# ---- failures -------------------------------------------------------------------------------------------------------------


def test_a_failed_row_encodes_its_items_again():
    desk = Desk(encoder=(40, 40), faults=Faults(rows=[(0, 0)]))
    desk.add("a", **prompt(2, ("x", 6), 3))
    desk.finish()
    assert desk.heard["a"][-1].finish_reason == "error"
    desk.add("b", **prompt(2, ("x", 6), 3))
    desk.finish()
    assert desk.executor.encoder.encoded == ["x", "x"] and forgotten(desk) == ["x"] and desk.right("b")


@pytest.mark.parametrize("where", ["submit", "result"])
def test_after_a_lost_step_nothing_is_assumed_to_be_encoded(where):
    desk = Desk(encoder=(12, 40), faults=Faults(**{where: [5]}), depth=1)
    desk.add("a", **prompt(2, ("x", 6), 3))
    desk.finish()
    desk.add("b", **prompt(3, ("y", 6), 3))
    desk.add("c", **prompt(1, ("x", 6), 3))
    desk.finish()
    desk.add("d", **prompt(1, ("x", 6), 3))
    desk.finish()
    assert "error" in {desk.heard[name][-1].finish_reason for name in "bc"}
    assert desk.right("a", "d") and "x" in forgotten(desk)


def test_resetting_the_prefix_cache_forgets_embeddings():
    desk = Desk(encoder=(40, 40))
    for name in "ab":
        desk.add(name, **prompt(2, ("x", 6), 3))
        desk.finish()
        assert desk.core.reset_prefix_cache()
    assert desk.executor.encoder.encoded == ["x", "x"] and desk.right("a", "b")
