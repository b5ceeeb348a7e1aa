"""The grammar process, as the engine talks to it."""

import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from patience import PATIENCE
from quire.features.structured.constraints import GrammarLanes
from quire.features.structured.grammar import client, vetting, wire
from quire.features.structured.grammar.client import Grammars
from quire.text.tokenizer_files import read_tokenizer
from quire.types.errors import InvalidParameter
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from tiny_model import make_model

FAULTY = (sys.executable, str(Path(__file__).parent / "faulty_grammar.py"))
GENEROUS = 60.0  # seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("grammar"))


@pytest.fixture(scope="module")
def tokenizer(model):
    return read_tokenizer(model)


def start(model, rows: int = 64) -> wire.StartWorker:
    return wire.StartWorker(str(model), None, None, 330, [1], rows)


@pytest.fixture(scope="module")
def grammars(model):
    made = Grammars(start(model))
    yield made
    made.stop()


def spec(name: str, resumed=(), **params) -> EngineRequest:
    constraint = params.pop("constraint", None) or {"regex": "ab*c"}
    given = SamplingParams(structured_outputs=constraint, **params)
    return EngineRequest(name, (5, 6), given, 0, frozenset({1}), frozenset({1}), 0.0, resumed=tuple(resumed))


def wait_ready(grammars: Grammars, count: int = 1):
    ready, refused, deadline = [], [], time.monotonic() + PATIENCE
    while len(ready) + len(refused) < count:
        assert time.monotonic() < deadline
        grammars.wait(0.05)
        news = grammars.news()
        ready, refused = ready + news.ready, refused + news.refused
    return ready, refused


def allowed(grammars: Grammars, name: str) -> set[int]:
    assert not grammars.late([name], GENEROUS)
    return set(np.flatnonzero(np.unpackbits(grammars.masks([name]).view(np.uint8), bitorder="little")).tolist())


def test_a_request_is_followed_token_by_token(grammars, tokenizer):
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    grammars.open(spec("one"))
    assert wait_ready(grammars) == (["one"], [])
    assert allowed(grammars, "one") == {a}
    for token, following in ((a, {b, c}), (b, {b, c}), (c, {1})):
        grammars.accept("one", [token])
        grammars.send()
        assert allowed(grammars, "one") == following
    assert grammars.forced() == [("one", [1])], "a complete text has to end"
    grammars.close("one")
    assert "one" not in grammars and grammars.forced() == []
    assert allowed(grammars, "one") == set(range(32 * grammars.words)), "whoever is gone may do anything"


def test_a_resumed_request_and_one_that_starts_later(grammars, tokenizer):
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    later = {"regex": "ab*c", "starts_after": [c, c]}
    grammars.open(spec("resumed", resumed=[a, b]))
    grammars.open(spec("later", constraint=later, min_tokens=3))
    wait_ready(grammars, 2)
    assert allowed(grammars, "resumed") == {b, c}
    free = allowed(grammars, "later")
    assert {a, b, c} <= free and 1 not in free, "not before min_tokens"
    grammars.accept("later", [c, a, c])
    grammars.send()
    assert 1 in allowed(grammars, "later")
    grammars.accept("later", [c])
    grammars.send()
    assert allowed(grammars, "later") == {a}
    grammars.close("resumed")
    grammars.close("later")


def test_a_token_outside_the_grammar_ends_its_request_alone(grammars, tokenizer):
    a, z = (tokenizer.encode(letter)[0] for letter in "az")
    for name in ("good", "bad"):
        grammars.open(spec(name))
    wait_ready(grammars, 2)
    grammars.accept("good", [a])
    grammars.accept("bad", [z])
    grammars.send()
    assert not grammars.late(["good", "bad"], GENEROUS)
    [(name, why)] = grammars.news().refused
    assert name == "bad" and why
    assert a not in allowed(grammars, "good")
    grammars.close("good")
    grammars.close("bad")


def test_one_that_died_before_it_was_needed_is_replaced(model):
    made = Grammars(start(model))
    try:
        made.prepare()
        first = made._process
        made.prepare()
        assert made._process is first, "one is enough"
        os.kill(first.pid, signal.SIGKILL)
        made.open(spec("one"))
        assert wait_ready(made) == (["one"], []) and made.losses == 1
        assert made._process.pid != first.pid
    finally:
        made.stop()


def test_equal_grammars_are_compiled_once(grammars):
    hard = {"json": {"type": "array", "items": {"type": "integer", "multipleOf": 4999}, "minItems": 1, "maxItems": 9}}
    trials = []
    for name, constraint in ("other", None), ("first", hard), ("second", hard), ("third", hard):
        grammars.open(spec(name, constraint=constraint))
        wait_ready(grammars)
        grammars.close(name)
        pid = grammars._process.pid
        [vetting] = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        fields = Path(f"/proc/{vetting}/stat").read_text().rpartition(")")[2].split()
        trials.append(int(fields[8]))  # page faults of its children that have ended: each has some
    assert trials[0] < trials[1] == trials[2] == trials[3]


def test_bad_grammars_are_refused_and_remembered(grammars):
    for _ in range(2):
        grammars.open(spec("bad", constraint={"regex": "a("}))
        ready, [(name, why)] = wait_ready(grammars)
        assert not ready and name == "bad" and "unclosed group" in why
        grammars.close("bad")
    with pytest.raises(InvalidParameter, match="unclosed group"):
        grammars.check(spec("bad", constraint={"regex": "a("}).params.structured_outputs)


def test_a_crash_in_a_trial_is_a_refusal_and_others_go_on_meanwhile(grammars, tokenizer):
    a, b = (tokenizer.encode(letter)[0] for letter in "ab")
    grammars.open(spec("steady"))
    wait_ready(grammars)
    chain = "\n".join(["start: r0", *(f"r{i}: r{i + 1}" for i in range(9000)), 'r9000: "a"'])
    grammars.open(spec("deep", constraint={"grammar": chain}))
    grammars.open(spec("slow", constraint={"json": {"type": "integer", "multipleOf": 99_999_989}}))
    begun, answers, steps = time.monotonic(), {}, 0
    grammars.accept("steady", [a])
    while len(answers) < 2:
        assert time.monotonic() - begun < PATIENCE
        grammars.accept("steady", [b])
        grammars.send()
        assert not grammars.late(["steady"], GENEROUS)
        steps += 1
        answers |= dict(grammars.news().refused)
        time.sleep(0.005)
    assert answers == {"deep": vetting.TOO_DEEP, "slow": vetting.TOO_SLOW}
    assert steps > 20  # some hundred if it has the machine for itself; a handful if it tried grammars between two of them
    for name in ("steady", "deep", "slow"):
        grammars.close(name)


def test_requests_wait_for_a_row_of_masks(model):
    few = Grammars(start(model, rows=2))
    for name in "pqrs":
        few.open(spec(name))
    assert sorted(wait_ready(few, 2)[0]) == ["p", "q"]
    few.close("r")  # it never had one
    few.close("p")
    assert wait_ready(few)[0] == ["s"]
    few.stop()


def test_a_late_mask_is_told_when_it_is_there(model, tokenizer, monkeypatch):
    """Nobody waits for a process that is stopped, neither to ask it nor to tell it anything."""
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    monkeypatch.setattr(client, "STEP_TIMEOUT_S", PATIENCE)
    grammars = Grammars(start(model))
    grammars.open(spec("one"))
    wait_ready(grammars)
    os.kill(grammars._process.pid, signal.SIGSTOP)
    begun = time.monotonic()
    grammars.accept("one", [a])
    grammars.send()
    assert grammars.late(["one", "nobody"], 0.01) == ["one"]
    grammars.wait_forced(PATIENCE)  # it is late anyway
    for i in range(8):
        grammars.open(spec(f"more{i}", constraint={"regex": "a" * 100_000}))
    assert time.monotonic() - begun < PATIENCE / 2
    assert not grammars.news().ready
    os.kill(grammars._process.pid, signal.SIGCONT)
    assert wait_ready(grammars)[0] == ["one"] and not grammars.losses
    assert allowed(grammars, "one") == {b, c}
    grammars.stop()


def test_a_process_that_stays_silent_is_replaced(model, tokenizer, monkeypatch):
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    monkeypatch.setattr(client, "STEP_TIMEOUT_S", 0.5)
    grammars = Grammars(start(model))
    grammars.open(spec("one"))
    wait_ready(grammars)
    os.kill(grammars._process.pid, signal.SIGSTOP)
    grammars.accept("one", [a])
    grammars.send()
    assert grammars.late(["one"], 0.01) == ["one"]
    assert wait_ready(grammars)[0] == ["one"] and grammars.losses == 1
    assert allowed(grammars, "one") == {b, c}
    grammars.stop()


def test_whoever_is_slow_goes_on_in_a_lane_of_its_own_and_is_given_up_there(model, tokenizer, monkeypatch):
    monkeypatch.setattr(wire, "COMMAND", FAULTY)
    monkeypatch.setattr(client, "MAX_MASK_CPU_S", 1.0)
    lanes = GrammarLanes(str(model), None, None, vocab_size=330, eos_ids=[1])
    texts = {"slow": tokenizer.encode("slow" + "a" * 80), "quick": tokenizer.encode("ab" * 900)}
    for name, pattern in (("slow", "slow[a]{90}"), ("quick", "[ab]{2000}")):
        lanes.open(spec(name, constraint={"regex": pattern}))
    told, places, refused = dict.fromkeys(texts, 0), [], {}
    waiting, deadline = set(texts), time.monotonic() + GENEROUS
    while not refused:
        assert time.monotonic() < deadline
        lanes.wait(0.01)
        news = lanes.news()
        waiting = (waiting | set(news.lost)) - set(news.ready)
        refused = dict(news.refused)
        going = [name for name in texts if name not in waiting and told[name] < len(texts[name])]
        for name in going:
            lanes.accept(name, [texts[name][told[name]]])
            told[name] += 1
        lanes.send()
        waiting |= set(lanes.late(going, 0.01))
        places.append("slow" in lanes.second)
        assert "quick" in lanes.first
    assert list(refused) == ["slow"] and "take too long" in refused["slow"]
    assert not places[0] and places[-1] and places == sorted(places)
    assert 4 < told["slow"] < len(texts["slow"]) and told["quick"] > 2 * told["slow"]
    lanes.close("slow")
    assert lanes.second._process is None
    lanes.open(spec("again", constraint={"regex": "slow[a]{90}"}))
    assert "again" in lanes.second, "what it did is remembered"
    lanes.stop()


def test_whoever_was_slow_waits_for_the_others(model, tokenizer, monkeypatch):
    """The commands that have arrived are answered before a slow matcher has its turn, which is shown by their order."""
    monkeypatch.setattr(wire, "COMMAND", FAULTY)
    grammars, order, handle = Grammars(start(model)), [], Grammars._handle
    monkeypatch.setattr(
        Grammars, "_handle", lambda self, answer, process: (order.append(answer), handle(self, answer, process))[1]
    )
    slow, (a, b) = [f"slow{i}" for i in range(3)], (tokenizer.encode(letter)[0] for letter in "ab")
    for name in slow:
        grammars.open(spec(name, constraint={"regex": "slow[ab]{9}"}))
    grammars.open(spec("quick", constraint={"regex": "[ab]{9}"}))
    wait_ready(grammars, 4)
    numbers = {name: grammars._open[name].number for name in (*slow, "quick")}
    order.clear()
    os.kill(grammars._process.pid, signal.SIGSTOP)  # both messages are there when it goes on
    begin = tokenizer.encode("slow")[:1]
    for name in slow:
        grammars.accept(name, begin)
    grammars.send()
    for token in (a, b):
        grammars.accept("quick", [token])
        grammars.send()
    os.kill(grammars._process.pid, signal.SIGCONT)
    assert grammars.late(["quick"], GENEROUS) == []
    assert not grammars.late([*slow, "quick"], GENEROUS)
    kinds = [type(answer).__name__ for answer in order if not isinstance(answer, wire.Slow)]
    assert kinds == ["Accepted", "Masked"] * 3 + ["CaughtUp"] * 3
    assert [answer.deferred for answer in order if isinstance(answer, wire.Masked)] == [
        [numbers[name] for name in slow],
        [],
        [],
    ]
    following = allowed(grammars, slow[0])
    assert following == allowed(grammars, slow[1]) and following != allowed(grammars, "quick")
    grammars.stop()


def test_choices_and_requests_with_a_slow_grammar_change_lanes_together(model, monkeypatch):
    """Their budget in the first lane is one for all, in processor time."""
    monkeypatch.setattr(wire, "COMMAND", FAULTY)
    lanes = GrammarLanes(str(model), None, None, vocab_size=330, eos_ids=[1])
    slow = [f"{name}#{i}" for name in "ab" for i in range(4)]
    for name in slow:
        lanes.open(
            replace(spec(name, constraint={"regex": "slow[ab]{9}"}), fork_of=None if name[-1] == "0" else name[:2] + "0")
        )
    lanes.open(spec("quick", constraint={"regex": "[ab]{9}"}))
    assert {lanes.first._open[name].request for name in slow} == {"a#0", "b#0"}
    deadline = time.monotonic() + GENEROUS
    while not all(name in lanes.second for name in slow):  # opening makes one mask each
        assert time.monotonic() < deadline
        lanes.wait(0.01)
        assert all(entry.slow < 0.2 for entry in lanes.first._open.values()), "none of them has used up the budget alone"
        lanes.news()
    assert "quick" in lanes.first
    lanes.stop()


@pytest.mark.parametrize(("worked", "goes_on"), [(0.9, True), (1.1, False), (None, False)])
def test_a_trial_has_its_processor_time_on_a_busy_machine(monkeypatch, worked, goes_on):
    monkeypatch.setattr(vetting, "processor_time", lambda _: worked)
    trial = vetting._Trial(1, 1, time.monotonic() - 2.0)
    assert trial.goes_on() is goes_on
    assert not vetting._Trial(1, 1, time.monotonic() - 11.0).goes_on()


def test_masks_along_drafts_are_those_of_one_who_went_there(model, tokenizer):
    """And whoever did not go there is where it was: drafts may be wrong, forbidden, or begin the grammar."""
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    made = Grammars(wire.StartWorker(str(model), None, None, 330, [1], 4, 3))
    later = {"regex": "ab*c", "starts_after": [c, c]}

    def along(name: str) -> list[set[int]]:
        assert not made.late([name], GENEROUS)
        bits = np.unpackbits(made.masks([name] * 4, range(4)).view(np.uint8), axis=1, bitorder="little")
        return [set(np.flatnonzero(row).tolist()) for row in bits]

    try:
        for name, constraint in (("draft", None), ("later", later), ("other", None)):
            made.open(spec(name, constraint=constraint, min_tokens=4))
        wait_ready(made, 3)
        everything = set(range(32 * made.words))
        for name in ("draft", "later", "other"):
            made.guess(name, [a])  # nothing was told yet
        made.accept("draft", [a])
        made.guess("draft", [b, c, 1])
        made.accept("later", [b])
        made.guess("later", [c, c, a])
        made.send()
        assert along("draft") == [{b, c}, {b, c}, {1}, everything], "min_tokens give way where nothing else may follow"
        assert along("later") == [everything - {1}, everything - {1}, {a}, {b, c}]
        made.accept("draft", [b])
        made.guess("draft", [a, b, c])
        made.send()
        assert along("draft") == [{b, c}, everything, everything, everything], "nobody gets behind a forbidden draft"
        made.accept("draft", [b, c])
        made.accept("other", [a])
        made.send()
        assert (along("draft")[0], along("other")[0]) == ({1}, {b, c})
    finally:
        made.stop()
