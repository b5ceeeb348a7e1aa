"""What a grammar asks of the scheduler: requests that wait, rows that are masked, tokens that are given instead of drawn."""

import random

import numpy as np
import pytest
from desk import Desk, Faults

from quire.features.structured.grammar.client import News
from quire.types.structured import StructuredOutputsParams

FORCED = {3: [7, 8, 9, 10], 4: [8, 9, 10], 5: [9, 10], 6: [10]}  # after so many tokens
GRAMMAR = StructuredOutputsParams(regex="never compiled here")


class Script:
    """In the place of a grammar process: says when grammars are ready, what is forced after so many tokens, and allows all."""

    words = 2
    losses = 0

    def __init__(self, forced=None, ready=True, tardy=None) -> None:
        """`tardy` says for how many turns a mask is late; then masks allow what is forced and nothing else."""
        self._strict = tardy is not None
        self._forced, self._ready, self._tardy = forced or {}, ready, tardy
        self._due: dict[str, int] = {}  # turns until a late mask is there
        self._asked: dict[str, int] = {}  # after how many tokens the latest mask was asked for: late is it only once
        self.tokens: dict[str, list[int]] = {}
        self.drafts: dict[str, list[int]] = {}
        self.to_tell = News()
        self.away: set[str] = set()  # their grammars are lost

    def __len__(self) -> int:
        return len(self.tokens)

    def open(self, request) -> None:
        self.tokens[request.id] = []
        if self._ready:
            self.to_tell.ready.append(request.id)

    def close(self, name) -> None:
        self.tokens.pop(name, None)

    def accept(self, name, tokens) -> None:
        if name in self.tokens:
            self.tokens[name] += tokens

    def news(self) -> News:
        self._due = {name: turns - 1 for name, turns in self._due.items() if name in self.tokens}
        self.to_tell.ready += [name for name, turns in self._due.items() if turns < 0]
        self._due = {name: turns for name, turns in self._due.items() if turns >= 0}
        news, self.to_tell = self.to_tell, News()
        return news

    def forced(self):
        found = [(name, self._forced.get(len(told), [])) for name, told in self.tokens.items() if name not in self.away]
        return [(name, tokens) for name, tokens in found if tokens]

    def masks(self, names, behind):
        masks = np.full((len(names), self.words), 0xFFFFFFFF, np.uint32)
        for mask, name, drafts in zip(masks, names, behind, strict=True):
            assert drafts == 0 or len(self.drafts[name]) >= drafts
            if self._strict and (forced := self._forced.get(len(self.tokens.get(name, [])) + drafts)):
                mask[:] = [1 << forced[0], 0]
        return masks

    def guess(self, name, drafts) -> None:
        self.drafts[name] = drafts

    def send(self) -> None: ...

    def wait_forced(self, seconds) -> None: ...

    def late(self, names, seconds) -> list[str]:
        assert seconds <= 0.02
        asked = [name for name in names if self._asked.get(name) != len(self.tokens[name])]
        self._asked |= {name: len(self.tokens[name]) for name in asked}
        late = {} if self._tardy is None else {name: self._tardy() for name in asked}
        self._due |= {name: turns for name, turns in late.items() if turns}
        return [name for name, turns in late.items() if turns]

    def wait(self, seconds) -> None: ...

    def stop(self) -> None: ...


def desk_with(script: Script, **options) -> Desk:
    desk = Desk(**options)
    desk.core.constraints.grammars = script
    return desk


def drawn_right(desk: Desk, name: str, given: dict[int, list[int]]) -> bool:
    """Every token is the model's own draw after all tokens before it, except those that were given."""
    spec, tokens = desk.specs[name], desk.tokens(name)
    places = {start + i: token for start, forced in given.items() for i, token in enumerate(forced)}
    return all(
        token == places[i]
        if i in places
        else [token] == desk.model.generate([*spec.prompt, *tokens[:i]], seed=spec.seed, max_tokens=1)
        for i, token in enumerate(tokens)
    )


@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_given_tokens_reach_the_device_and_cost_no_draw(windows):
    given = {2: [7, 8, 9, 10, 11], 9: [12]}
    desk = desk_with(Script(given), windows=windows, pages=60)
    desk.add("a", range(1, 7), 14, structured_outputs=GRAMMAR)
    desk.add("b", range(3, 9), 14, structured_outputs=GRAMMAR)
    desk.add("free", range(2, 5), 14)
    desk.finish()
    assert len(desk.tokens("a")) == 14 and drawn_right(desk, "a", given) and drawn_right(desk, "b", given)
    assert desk.right("free")
    assert len(desk.plans) == 14, "the free one needs as many"
    assert max(plan.count[plan.slot == 0].max(initial=0) for plan in desk.plans[1:]) == 6


def test_given_tokens_survive_preemption():
    given = {3: [7, 8, 9, 10, 11, 12]}
    desk = desk_with(Script(given), pages=9)
    for i in range(4):
        desk.add(f"r{i}", range(i, i + 6), 16, structured_outputs=GRAMMAR)
    desk.finish()
    assert desk.core.stats.preemptions
    assert all(drawn_right(desk, f"r{i}", given) and len(desk.tokens(f"r{i}")) == 16 for i in range(4))


def test_a_step_ahead_only_many_tokens_are_worth_a_pause():
    given = {2: [7, 8], 6: [9, 10, 11, 12, 13, 14], 7: [10, 11, 12, 13, 14]}  # the first of the six is in flight by then
    desk = desk_with(Script(given), depth=1)
    desk.add("a", range(1, 7), 16, structured_outputs=GRAMMAR)
    desk.add("free", range(2, 5), 16)
    desk.finish()
    assert desk.right("free") and len(desk.tokens("a")) == 16
    rows = [int(plan.count[plan.slot == 0][0]) for plan in desk.plans[1:] if 0 in plan.slot]
    assert max(rows) == 6 and rows.count(1) == len(rows) - 1


def test_who_wants_logprobs_draws_every_token():
    desk = desk_with(Script({1: [7, 8]}))
    desk.add("a", range(5), 6, structured_outputs=GRAMMAR, logprobs=0)
    desk.finish()
    assert desk.right("a") and all(len(delta.logprobs) == len(delta.token_ids) for delta in desk.heard["a"])


def test_given_tokens_end_a_request_as_drawn_ones_do():
    desk = desk_with(Script({1: [7, 1, 9]}))
    desk.add("stops", range(5), 9, structured_outputs=GRAMMAR, eos=[1])
    desk.add("full", range(5), 3, structured_outputs=GRAMMAR)
    desk.finish()
    assert desk.tokens("stops")[1:] == [7, 1] and desk.heard["stops"][-1].finish_reason == "stop"
    assert desk.tokens("full")[1:] == [7, 1] and desk.heard["full"][-1].finish_reason == "length"


def test_a_request_waits_for_its_grammar_and_nobody_waits_for_it():
    script = Script(ready=False)
    desk = desk_with(script)
    desk.add("bound", range(5), 4, structured_outputs=GRAMMAR)
    desk.add("gone", range(5), 4, structured_outputs=GRAMMAR)
    desk.add("bad", range(5), 4, structured_outputs=GRAMMAR)
    desk.add("free", range(5), 4)
    desk.step(6)
    assert desk.right("free") and not desk.tokens("bound") and desk.core.has_unfinished
    desk.core.abort(["gone"])
    script.to_tell = News(ready=["bound", "gone"], refused=[("bad", "no good")])
    desk.finish()
    assert desk.right("bound") and desk.heard["gone"][-1].finish_reason == "abort"
    assert desk.heard["bad"][-1].finish_reason == "error" and "no good" in desk.heard["bad"][-1].error
    assert not len(script)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_masked_step_is_drawn_when_the_one_before_has_landed(depth):
    desk = desk_with(Script(), depth=depth)
    desk.add("bound", range(5), 6, structured_outputs=GRAMMAR)
    desk.add("free", range(4), 6)
    desk.finish()
    assert desk.right("bound", "free")
    assert all(plan.slot[plan.masked].tolist() == [0] for plan in desk.plans if 0 in plan.slot)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failed_matcher_ends_its_request_alone(depth):
    script = Script()
    desk = desk_with(script, depth=depth)
    desk.add("bound", range(5), 9, structured_outputs=GRAMMAR)
    desk.add("other", range(4), 9, structured_outputs=GRAMMAR)
    desk.step(3)
    script.to_tell.failed.append(("bound", "left its grammar"))
    desk.finish()
    assert desk.heard["bound"][-1].error == "left its grammar" and desk.right("other")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("lost_at", [1, 2, 3, 4, 5, 7])
def test_whoever_lost_its_grammar_waits_and_draws_again_what_was_in_flight(depth, lost_at):
    given = {} if depth else {3: [7, 8, 9, 10, 11, 12, 13]}
    script = Script(given)
    desk = desk_with(script, depth=depth, pages=14)
    for name, fork in (("bound", None), ("child", "bound"), ("other", None)):
        desk.add(name, range(6), 14, structured_outputs=GRAMMAR, fork_of=fork)
    desk.add("free", range(2, 7), 24)
    desk.step(lost_at)
    script.to_tell.lost += ["bound", "child", "nobody"]
    script.away = {"bound", "child"}
    desk.step()
    before = desk.tokens("bound"), desk.tokens("child")
    desk.step(3)
    assert (desk.tokens("bound"), desk.tokens("child")) == before
    assert not {"bound", "child"} & desk.running()
    script.to_tell.ready += ["child", "bound"]
    script.away = set()
    desk.finish()
    assert all(drawn_right(desk, name, given) and len(desk.tokens(name)) == 14 for name in ("bound", "child", "other"))
    assert desk.right("free")


def test_given_tokens_of_a_lost_step_are_told_again():
    """The first takes the whole step for its given tokens; the second has some too, but no row in the step that is lost."""
    given = {2: [5, 6, 7]}
    desk = desk_with(Script(forced=given), budget=2, faults=Faults(submit=(2,)))
    desk.add("first", [1], 9, structured_outputs=GRAMMAR)
    desk.add("second", [2], 9, structured_outputs=GRAMMAR)
    desk.finish()
    assert desk.plans[2].given_slot.tolist() == [0, 0, 0, 1, 1, 1] and desk.plans[2].slot.tolist() == [0]
    assert desk.heard["first"][-1].finish_reason == "error"
    assert len(desk.tokens("second")) == 9 and drawn_right(desk, "second", given)


def test_given_tokens_do_not_end_a_request_whose_prompt_has_scores_to_come():
    desk = Desk(chunk_cap=4)
    desk.add("a", range(12), 1, prompt_logprobs=1)
    desk.step()
    assert desk.scheduler.extend("a", [5]) == []
    desk.finish()
    assert sum(len(scores.rank) for delta in desk.heard["a"] for scores in delta.prompt_logprobs) == 11


@pytest.mark.parametrize("seed", range(24))
def test_whose_mask_is_late_sits_the_step_out_and_nothing_else_changes(seed):
    """Whatever comes late, however scarce pages are: the tokens are the same, and the free one gets a row in every step."""
    chance = random.Random(seed)
    often = chance.random()
    script = Script({} if seed % 3 else FORCED, tardy=lambda: chance.randrange(1, 5) if chance.random() < often else 0)
    desk = desk_with(
        script,
        windows=chance.choice([(None,), (None, 6)]),
        depth=seed % 2,
        pages=chance.choice([22, 60]),
        max_seqs=chance.choice([4, 8]),
        prefix_caching=chance.random() < 0.7,
        chunk_cap=chance.choice([None, 3]),
    )
    desk.add("free", range(2, 7), 30)
    for i in range(5):
        options = {"logprobs": 1} if i == 1 else {"prompt_logprobs": 0} if i == 2 else {}
        fork = "r0" if i == 3 else None
        desk.add(f"r{i}", range(0 if fork else i, 6), 12, structured_outputs=GRAMMAR, fork_of=fork, **options)
    desk.finish()
    given = {start: tokens for start, tokens in script._forced.items() if start == 3}
    for i in range(5):
        assert len(desk.tokens(f"r{i}")) == 12 and drawn_right(desk, f"r{i}", given)
    assert desk.right("free")
    assert all(0 in plan.slot for plan in desk.plans[:30]), "the free one never waits"
    scores = [len(score.rank) for delta in desk.heard["r2"] for score in delta.prompt_logprobs]
    assert sum(scores) == len(desk.specs["r2"].prompt) - 1
    assert sum(len(delta.logprobs) for delta in desk.heard["r1"]) == 12
    assert not len(script)
