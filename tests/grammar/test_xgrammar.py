"""The second backend: EBNF by xgrammar, in process and in the grammar process."""

import importlib
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("xgrammar")

import test_ebnf
import test_matchers

from patience import PATIENCE
from quire.features.structured.grammar import wire
from quire.features.structured.grammar.backend import GrammarError
from quire.features.structured.grammar.client import Grammars
from quire.features.structured.grammar.xgrammar import XGrammar, XGrammarMatcher
from quire.text.tokenizer_files import read_tokenizer
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams
from quire.types.structured import StructuredOutputsParams
from tiny_model import make_model

sys.path.append(str(Path(__file__).parent.parent / "text"))
tiny_tokenizers = importlib.import_module("tiny_tokenizers")


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def backend(request, tmp_path_factory):
    made = test_matchers.save(tmp_path_factory.mktemp(request.param), getattr(tiny_tokenizers, request.param)())
    tokenizer = read_tokenizer(made)
    return tokenizer, XGrammar(tokenizer, len(tokenizer) + 37, [tokenizer.eos_token_id])


def loaded(backend, **constraint) -> XGrammarMatcher:
    matcher = test_matchers.load(backend[1], StructuredOutputsParams(**constraint))
    assert isinstance(matcher, XGrammarMatcher)
    return matcher


def test_random_grammars_accept_what_the_oracle_does(backend):
    compared = 0
    for seed in range(60):
        rules = test_ebnf.Maker(seed).rules()
        grammar = "\n".join(f"{name} ::= {test_ebnf.written(form)}" for name, form in rules.items())
        expected = test_ebnf.language(rules, 3)
        if not expected or re.search(r"[*+?}][*+?{]", grammar):
            continue  # xgrammar refuses two operators in a row
        compared += 1
        matcher = loaded(backend, grammar=grammar)
        assert {text for text in spellable(3) if fits(backend, matcher, text)} == expected, grammar
    assert compared > 10


def spellable(longest: int, text: str = ""):
    yield text
    for letter in test_ebnf.LETTERS if len(text) < longest else "":
        yield from spellable(longest, text + letter)


def fits(backend, matcher: XGrammarMatcher, text: str) -> bool:
    tokenizer, grammar = backend
    tokens = tokenizer.encode("\n" + text, add_special_tokens=False)
    tokens = tokens[tokens.index(tokenizer.encode("\n", add_special_tokens=False)[-1]) + 1 :]
    matcher = matcher.copy()
    matcher.accept(tokens)
    return matcher.error is None and bool(test_matchers.allowed(grammar, matcher) & set(grammar.eos_ids))


@pytest.mark.parametrize("seed", range(3))
def test_walks_ends_and_rollbacks(backend, seed):
    text, whole = test_matchers.walk(backend, seed, grammar='root ::= [a-f]{2,5} ("ü" | "好") "!"')
    assert whole and re.fullmatch("[a-f]{2,5}(ü|好)!", text)
    for grammar in ('root ::= "a" root? "b"', 'root ::= ("ab" | "a")* "c"{2,4}'):
        test_matchers.test_what_is_rolled_back_leaves_no_trace(backend, {"grammar": grammar}, seed)


def test_masks_hold_known_tokens_only_and_done_is_reported(backend):
    tokenizer, grammar = backend
    matcher = loaded(backend, grammar="root ::= [^x]+")
    free = test_matchers.allowed(grammar, matcher)
    assert max(free) < len(tokenizer) and not free & set(tokenizer.all_special_ids)
    one, other = loaded(backend, grammar='root ::= "a"?'), loaded(backend, grammar='root ::= "a"?')
    assert not one.done and one.forced() == []
    one.accept([tokenizer.encode("\na")[-1]])
    assert one.done and test_matchers.allowed(grammar, one) == set(grammar.eos_ids)
    other.accept([tokenizer.encode("b")[-1]])
    assert other.error is not None and other.copy().error == other.error and not other.done


def test_the_rest_stays_with_guidance(backend):
    test_matchers.test_ten_thousand_choices(backend)
    test_matchers.test_whitespace_between_the_parts_of_json(backend)
    test_matchers.test_lark_as_it_is(backend, '?start: "a" b\nb: "b"+')
    test_matchers.test_structural_tags(backend)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('root ::= "a', "line 1, column 12"),
        ("root ::= other", 'Rule "other" is not defined'),
        ('root ::= root "a"', "no text fits"),
        ("root ::= []", "no text fits"),
        ("root ::= " + "(" * 5000 + '"a"', "Nest layer"),
    ],
)
def test_what_is_wrong_is_reported(backend, grammar, words):
    with pytest.raises(GrammarError, match=re.escape(words)):
        test_matchers.load(backend[1], StructuredOutputsParams(grammar=grammar))


def test_the_grammar_process_follows_it(tmp_path):
    model = make_model(tmp_path)
    tokenizer = read_tokenizer(model)
    a, b, c = (tokenizer.encode(letter)[0] for letter in "abc")
    grammars = Grammars(wire.StartWorker(str(model), None, None, 330, [1], 8, backend="xgrammar"))
    constraints = {
        "good": {"grammar": 'root ::= "a" "b"* "c"'},
        "json": {"json": {"type": "integer"}},
        "wrong": {"grammar": "root ::= other"},
    }
    try:
        for name, constraint in constraints.items():
            params = SamplingParams(structured_outputs=constraint)
            grammars.open(EngineRequest(name, (5, 6), params, 0, frozenset({1}), frozenset({1}), 0.0))
        ready, refused, deadline = set(), {}, time.monotonic() + PATIENCE
        while len(ready) + len(refused) < len(constraints):
            assert time.monotonic() < deadline
            grammars.wait(0.05)
            news = grammars.news()
            ready |= set(news.ready)
            refused |= dict(news.refused)
        assert ready == {"good", "json"} and 'Rule "other"' in refused["wrong"]
        for token, following in ((a, {b, c}), (b, {b, c}), (c, {1})):
            grammars.accept("good", [token])
            grammars.send()
            assert not grammars.late(["good"], PATIENCE)
            masks = grammars.masks(["good"]).view(np.uint8)
            assert set(np.flatnonzero(np.unpackbits(masks, bitorder="little")).tolist()) == following
        assert grammars.forced() == [("good", [1])]
        assert grammars.losses == 0
    finally:
        grammars.stop()
