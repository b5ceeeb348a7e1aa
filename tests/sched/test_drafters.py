"""Who guesses from the text: what is drafted, what is remembered for whom, and that it stays bounded."""

from array import array

import pytest

from quire.config.speculative import SpeculativeConfig
from quire.sched.draft import drafters
from quire.sched.draft.drafters import NgramDrafter, SuffixDrafter, SyntheticDrafter, Text
from quire.types.errors import ConfigError


def text(tokens, prompt=0, scope=("",)):
    return Text(array("i", tokens), prompt, scope)


@pytest.mark.parametrize(
    ("least", "most", "tokens", "drafts"),
    [
        (1, 3, [1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6]),
        (5, 5, [1, 2, 3, 4, 5, 6, 1, 2, 3], []),  # too short
        (2, 2, [1, 2, 9, 9, 1, 2, 8, 8, 8, 1, 2], [8, 8, 8]),  # the latest
        (1, 2, [7, 5, 1, 1, 8, 5, 2, 2, 7, 5], [1, 1, 8]),  # the longest match wins over the latest
        (1, 5, [4, 4, 4, 4], [4, 4, 4]),  # a loop goes on
        (1, 5, [9, 1, 2, 1, 2], [1, 2, 1]),
        (1, 5, [3], []),
        (1, 5, [], []),
    ],
)
def test_the_prompt_is_looked_up(least, most, tokens, drafts):
    assert list(NgramDrafter(least, most).propose(text(tokens), 3)) == drafts[:3]


def test_a_text_that_was_looked_at_can_grow():
    looked_at = text([1, 2, 1, 2])
    for drafter in (NgramDrafter(1, 2), SuffixDrafter(8, 10, 1.0, 0.1)):
        assert drafter.propose(looked_at, 4)
        looked_at.tokens.append(1)


def test_suffixes_follow_what_is_likely():
    drafter = SuffixDrafter(24, 10, 2.0, 0.5)
    assert list(drafter.propose(text([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]), 9)) == [3, 1, 2]  # two of three, and one of three
    assert list(drafter.propose(text([1, 2, 3, 1, 2, 4, 1, 2]), 9)) == [3, 1, 2, 4]  # 3 and 4 are as likely
    assert not drafter.propose(text([1, 5, 1, 6, 1, 7, 1]), 9)
    assert len(drafter.propose(text([1, 2, 3, 4, 5, 6, 7, 8, 1, 2]), 9)) == 4  # two for each token that is equal
    assert len(drafter.propose(text([1, 2, 3, 4, 5, 6, 7, 8, 1, 2]), 3)) == 3


def test_earlier_outputs_are_known_to_their_own_scope():
    drafter = SuffixDrafter(24, 10, 2.0, 0.1)
    secret = [50, 51, 52, 53, 54, 55]
    drafter.finished(text([1, 2, 3, *secret], 3, ("key a", "salt")))
    assert list(drafter.propose(text([9, 50, 51], 1, ("key a", "salt")), 9)) == [52, 53, 54, 55]
    for other in (("key b", "salt"), ("key a", "other"), ("key a",), ()):
        assert not drafter.propose(text([9, 50, 51], 1, other), 9)
    assert not drafter.propose(text([1, 2], 2, ("key a", "salt")), 9)  # prompts are not kept
    drafter.finished(text([50, 51, 99], 0, ("key a", "salt")))
    assert 54 not in drafter.propose(text([9, 7, 51], 1, ("key a", "salt")), 9)  # a pair at least


def test_what_is_kept_is_bounded(monkeypatch):
    drafter = SuffixDrafter(24, 8, 1.0, 0.1, most_tokens=1000)
    for i in range(100):
        drafter.finished(text([i, i + 1, i + 2], 0))
    scope = drafter._scopes[("",)]
    assert scope.young.texts + scope.old.texts <= 8
    assert drafter.propose(text([99, 100]), 4) and not drafter.propose(text([1, 2]), 4)
    for i in range(100):
        drafter.finished(text(range(40 * i, 40 * i + 40), 0))
    assert scope.size <= 1100
    drafter.finished(text(range(100_000), 0))
    assert scope.size <= 1100
    monkeypatch.setattr(drafters, "MAX_SCOPES", 5)
    for i in range(30):
        drafter.finished(text([1, 2, 3], 0, (f"key {i}",)))
    assert len(drafter._scopes) <= 5 and ("key 29",) in drafter._scopes
    nothing = SuffixDrafter(24, 0, 1.0, 0.1)
    nothing.finished(text([1, 2, 3]))
    assert not nothing._scopes


def test_synthetic_drafts_are_right_as_often_as_asked():
    answer = list(range(100, 1100))
    for rate in (0.0, 0.3, 0.7, 1.0):
        drafter = SyntheticDrafter([rate] * 2, 2000)
        assert not drafter.propose(text(answer[:5], 5), 2)
        drafter.finished(text(answer, 5))
        guesses = [list(drafter.propose(text(answer[:at], 5), 2)) for at in range(5, 998)]
        first = sum(guess[0] == answer[at] for at, guess in enumerate(guesses, 5)) / len(guesses)
        both = sum(guess == answer[at : at + 2] for at, guess in enumerate(guesses, 5)) / len(guesses)
        assert first == pytest.approx(rate, abs=0.04) and both == pytest.approx(rate**2, abs=0.04)
    assert not drafter.propose(text(answer[:9], 5, ("another",)), 2)
    assert not drafter.propose(text([*answer[:8], 0], 5), 2)  # it went another way


class Echo:
    def propose(self, text, most):
        text.tokens.append(7)  # it gets a copy
        return [text.tokens[-2]] * (most + 3)

    def finished(self, text):
        raise RuntimeError("on order")


class Bad:
    def propose(self, text, most):
        return [5, -1]


def made(where):
    return drafters.make_drafter(SpeculativeConfig("custom_class", 3, model=where), 100)


def test_drafters_of_others(caplog):
    drafter, known = made("test_drafters:Echo"), text([1, 2])
    assert drafter.propose(known, 3) == [2, 2, 2] and len(known.tokens) == 2
    drafter.finished(known)
    assert "test_drafters:Echo failed" in caplog.text
    assert not drafter.propose(known, 3)
    bad = made("test_drafters.Bad")
    assert not bad.propose(known, 3) and "from 0 to 99" in caplog.text


@pytest.mark.parametrize("where", ["nosuch.module:X", "test_drafters:Nobody", "test_drafters:text", "x", "array:array"])
def test_a_drafter_that_cannot_be_had_is_named(where):
    with pytest.raises(ConfigError, match=rf"'{where}' of method 'custom_class' cannot be used"):
        made(where)


def test_loops_go_on():
    drafter = SuffixDrafter(24, 10, 1.0, 0.1)
    assert list(drafter.propose(text([1, 2, 3] * 5), 9)) == [1, 2, 3] * 3
    assert list(drafter.propose(text([7] * 9), 6)) == [7] * 6
    drafter.finished(text([5, 6, 7], 0))
    assert list(drafter.propose(text([9, 5, 6], 1), 9)) == [7]  # an output that has ended goes on nowhere
