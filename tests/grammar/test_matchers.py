"""What a grammar means, token by token, on tokenizers of every kind; and the translation of what users write."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLParserLimits

from quire.features.structured.grammar import llguidance
from quire.features.structured.grammar.backend import GrammarError
from quire.features.structured.grammar.ebnf import without_anchors
from quire.features.structured.grammar.llguidance import LLGuidance
from quire.features.structured.grammar.schema import disjoint, prepare_schema
from quire.text.tokenizer_files import read_tokenizer
from quire.types.structured import StructuredOutputsParams

sys.path.append(str(Path(__file__).parent.parent / "text"))
import tiny_tokenizers

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
END = 0


def save(directory: Path, tokenizer) -> Path:
    tokenizer.save(str(directory / "tokenizer.json"))
    names = ("<|end|>", "</s>", "<unk>")
    eos = next(name for name in names if tokenizer.token_to_id(name) is not None)
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return directory


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def backend(request, tmp_path_factory):
    made = save(tmp_path_factory.mktemp(request.param), getattr(tiny_tokenizers, request.param)())
    tokenizer = read_tokenizer(made)
    grammar = LLGuidance(tokenizer, len(tokenizer) + 37, [tokenizer.eos_token_id])  # models pad their vocabulary
    return tokenizer, grammar


def load(grammar, params):
    return grammar.load(grammar.translate(params))


def allowed(grammar, matcher) -> set[int]:
    mask = np.zeros((3, grammar.words), np.uint32)
    grammar.fill([(matcher, 1)], mask.ctypes.data, 3)
    assert not mask[0].any() and not mask[2].any()
    return set(np.flatnonzero(np.unpackbits(mask[1].view(np.uint8), bitorder="little")).tolist())


def spelled(tokenizer, tokens) -> str:
    return tokenizer.token_bytes.join(tokens, started=True)[0].decode()


def accepts(backend, text: str, **constraint) -> bool:
    """Is the text, as this tokenizer writes it, a whole answer?"""
    tokenizer, grammar = backend
    matcher = load(grammar, StructuredOutputsParams(**constraint))
    tokens = tokenizer.encode("\n" + text, add_special_tokens=False)
    for token in tokens[tokens.index(tokenizer.encode("\n", add_special_tokens=False)[-1]) + 1 :]:
        if token not in allowed(grammar, matcher):
            return False
        matcher.accept([token])
        assert matcher.error is None
    return bool(allowed(grammar, matcher) & set(grammar.eos_ids))


def walk(backend, seed: int, limit: int = 300, **constraint) -> tuple[str, bool]:
    """Tokens at random among those allowed; -> what they spell, and whether the end was reached."""
    tokenizer, grammar = backend
    matcher, tokens = load(grammar, StructuredOutputsParams(**constraint)), []
    choose = np.random.default_rng(seed)
    while len(tokens) < limit:
        options = sorted(allowed(grammar, matcher))
        forced = matcher.forced()
        assert not forced or options == forced[:1], "what is forced is the only thing allowed"
        token = int(choose.choice(options))
        if token in grammar.eos_ids:
            return spelled(tokenizer, tokens), True
        tokens.append(token)
        matcher.accept([token])
        assert matcher.error is None
    return spelled(tokenizer, tokens), False


@pytest.mark.parametrize("seed", range(6))
def test_random_walks_stay_within_the_grammar(backend, seed):
    text, whole = walk(backend, seed, json=SCHEMA)
    assert not whole or isinstance(json.loads(text)["a"], int)
    text, whole = walk(backend, seed, regex=r"[a-f]{2,5}(ü|好)!")
    assert whole and re.fullmatch("[a-f]{2,5}(ü|好)!", text)
    text, whole = walk(backend, seed, choice=["the capital", "the pages", "你好世界 🙂"])
    assert whole and text in ("the capital", "the pages", "你好世界 🙂")


def test_no_token_beyond_the_vocabulary_and_no_special_one_is_allowed(backend):
    tokenizer, grammar = backend
    matcher = load(grammar, StructuredOutputsParams(regex=r"(.|\n)+"))
    free = allowed(grammar, matcher)
    assert max(free) < len(tokenizer) and not free & set(tokenizer.all_special_ids)
    matcher.accept([min(free)])
    assert allowed(grammar, matcher) & set(tokenizer.all_special_ids) == set(grammar.eos_ids)


def test_done_means_nothing_may_follow(backend):
    tokenizer, grammar = backend
    matcher = load(grammar, StructuredOutputsParams(regex="a?"))
    other = matcher.copy()
    assert not matcher.done and matcher.forced() == []
    matcher.accept([next(t for t in allowed(grammar, matcher) if spelled(tokenizer, [t]) == "a")])
    assert matcher.done and not other.done and allowed(grammar, matcher) == set(grammar.eos_ids)
    other.accept([tokenizer.encode("b")[-1]])
    assert other.error is not None


def test_whitespace_between_the_parts_of_json(backend):
    assert accepts(backend, '{"a":1}', json=SCHEMA) and accepts(backend, '{"a": 1}', json=SCHEMA)
    assert accepts(backend, '{"a":1}', json=SCHEMA, disable_any_whitespace=True)
    assert not accepts(backend, '{"a":\n1}', json=SCHEMA, whitespace_pattern="[ ]?")
    assert not accepts(backend, '{"a":' + " " * 50 + "1}", json=SCHEMA), "no endless blanks"


def test_structural_tags(backend):
    structures = [{"begin": f"<f={name}>", "schema": SCHEMA, "end": "</f>"} for name in ("x", "y")]
    tag = {"type": "structural_tag", "structures": structures, "triggers": ["<f="]}
    assert accepts(backend, "the pages", structural_tag=tag)
    assert accepts(backend, 'the <f=x>{"a":1}</f> of <f=y>{"a":2}</f>', structural_tag=tag)
    assert not accepts(backend, 'the <f=x>{"b":1}</f>', structural_tag=tag)
    assert not accepts(backend, "the <f=z>", structural_tag=json.dumps(tag))
    parts = [
        {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
        {"type": "or", "elements": [{"type": "const_string", "value": "no"}, {"type": "regex", "pattern": "[0-9]+"}]},
    ]
    sequence = {"format": {"type": "sequence", "elements": parts}}
    assert accepts(backend, "<t>a b c</t>no", structural_tag=sequence)
    assert accepts(backend, "<t></t>42", structural_tag=sequence)
    assert not accepts(backend, "no", structural_tag=sequence) and not accepts(backend, "<t></t>x", structural_tag=sequence)
    listed = {
        "type": "tags_with_separator",
        "tags": [{**parts[0], "content": parts[1]}],
        "separator": ",",
        "at_least_one": True,
    }
    assert accepts(backend, "<t>1</t>,<t>no</t>", structural_tag={"format": listed})
    assert not accepts(backend, "<t>1</t>,<t>no</t>,", structural_tag={"format": listed})
    assert not accepts(backend, "", structural_tag={"format": listed})


@pytest.mark.parametrize(
    ("tag", "words"),
    [
        ({}, "structures and triggers, or a format"),
        ({"format": {"type": "html"}}, "format must be an object whose type is one of"),
        ({"format": {"type": "sequence", "elements": [{"type": "const_string"}]}}, "format.elements.0.value must be a string"),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<b"]}, "none of the triggers"),
    ],
)
def test_a_wrong_tag_says_where(backend, tag, words):
    with pytest.raises(GrammarError, match=re.escape(words)):
        load(backend[1], StructuredOutputsParams(structural_tag=tag))


@pytest.mark.parametrize(
    "content",
    [
        {"type": "regex", "pattern": "^[a-z]+$"},
        {"type": "grammar", "grammar": "root ::= [a-z]+"},
        {"type": "grammar", "grammar": 'root ::= [a-z] root | "c" [a-z]*'},
        {"type": "sequence", "elements": [{"type": "regex", "pattern": "[a-z]*"}, {"type": "const_string", "value": "c"}]},
    ],
)
def test_the_end_of_a_tag_may_look_like_its_content(backend, content):
    tag = {"format": {"type": "tag", "begin": "<", "content": content, "end": ["end", "!"]}}
    assert accepts(backend, "<cend", structural_tag=tag) and accepts(backend, "<cec!", structural_tag=tag)
    assert accepts(backend, "<endcend", structural_tag=tag) and not accepts(backend, "<c", structural_tag=tag)
    assert not accepts(backend, "<cen", structural_tag=tag) and not accepts(backend, "<", structural_tag=tag)


def test_ten_thousand_choices(backend):
    texts = [f"the {i:x} of pages" for i in range(10_000)]
    assert accepts(backend, "the 270f of pages", choice=texts) and not accepts(backend, "the 270f of page", choice=texts)
    assert (
        accepts(backend, "", choice=["", "a"]) and accepts(backend, "a", choice=["a", ""]) and accepts(backend, "", choice=[""])
    )
    assert accepts(backend, "a/b\\n|*", choice=["a/b\\n|*"]) and not accepts(backend, "b", choice=["a", "a"])


@pytest.mark.parametrize("lark", ['?start: "a" b\nb: "b"+', '!start: "a" b -> x\nb: ("b")~1..3', 'start: A\nA: /a/ "b"'])
def test_lark_as_it_is(backend, lark):
    assert accepts(backend, "ab", grammar=lark) and not accepts(backend, "a", grammar=lark)


def test_patterns_match_whole_texts():
    assert [without_anchors(p) for p in ("^a$", "a", r"^a\$", r"a\\$")] == ["a", "a", r"a\$", r"a\\"]


def test_one_of_is_taken_where_it_is_any_of():
    def tagged(name):
        return {"type": "object", "properties": {"type": {"const": name}}, "required": ["type"]}

    root = {"$defs": {"a": tagged("a"), "b": tagged("b")}, "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]}
    assert "oneOf" not in prepare_schema(root) and prepare_schema(root)["anyOf"] == root["oneOf"]
    assert disjoint({"type": "string"}, {"type": ["null", "integer"]}, {})
    assert not disjoint({"type": "integer"}, {"type": "number"}, {})
    assert not disjoint({"type": "object"}, tagged("a"), {})
    assert root["oneOf"], "the user's schema is left alone"


@pytest.mark.parametrize("constraint", [{"choice": ["<|end|>"]}, {"regex": r"a <\|end\|> b"}, {"json": {"const": "</s>"}}])
def test_text_that_spells_a_special_token_is_text(backend, constraint):
    """What is forced is written with ordinary tokens: an end of text in the middle of it would end the answer."""
    tokenizer, grammar = backend
    matcher = load(grammar, StructuredOutputsParams(**constraint))
    tokens = []
    while not matcher.done:
        forced = matcher.forced() or [next(iter(allowed(grammar, matcher) - {tokenizer.eos_token_id}))]
        assert not set(forced) & set(tokenizer.special_ids)
        tokens += forced
        matcher.accept(forced)
        assert matcher.error is None
    assert spelled(tokenizer, tokens) in ("<|end|>", "a <|end|> b", '"</s>"')


def test_what_one_text_uses_up_is_not_missing_for_another(backend, monkeypatch):
    """Copies share a lexer, which has a limit: whoever reaches it has one for itself, and so has who comes later."""
    tokenizer, grammar = backend
    monkeypatch.setattr(llguidance, "LIMITS", LLParserLimits(max_lexer_states=500, verbose_errors=False))
    a, b = (next(i for i, text in enumerate(spelled_alone(tokenizer)) if text == letter) for letter in "ab")
    kept = load(grammar, StructuredOutputsParams(regex="z{40}[ab]*a[ab]{12}c"))
    z = next(i for i, text in enumerate(spelled_alone(tokenizer)) if text == "z")
    neighbour = kept.copy()
    neighbour.accept([z] * 40)
    greedy, choose = kept.copy(), np.random.default_rng(0)
    greedy.accept([z] * 40)
    for _ in range(3000):
        if greedy.error is not None:
            break
        greedy.accept([int(choose.choice([a, b]))])
        if greedy.error is None:
            allowed(grammar, greedy)
    assert "too many states" in greedy.error, "its own limit holds"
    later = kept.copy()
    later.accept([z] * 40)
    for text in (neighbour, later):
        for i in range(30):
            assert {a, b} <= allowed(grammar, text)
            text.accept([b if i % 5 else a])
            assert text.error is None


def spelled_alone(tokenizer):
    return [tokenizer.token_bytes.join([i], started=True)[0].decode(errors="replace") for i in range(len(tokenizer))]


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ({"type": "number", "maximum": 10**30}, "maximum 1e30 of a number is more than a grammar takes"),
        ({"type": "integer", "minimum": -(10**30)}, r"minimum -\d+ of a number is more than a grammar takes"),
        ({"type": "array", "maxItems": 10**30}, "maxItems is too large: 1e30"),
    ],
)
def test_numbers_that_are_too_large_are_told_as_such(backend, schema, why):
    with pytest.raises(GrammarError, match=why):
        backend[1].load(backend[1].translate(StructuredOutputsParams(json=schema)))


@pytest.mark.parametrize(
    "constraint",
    [{"json": SCHEMA}, {"regex": "(ab|a)*c{2,4}"}, {"choice": ["one", "only", "two"]}, {"json_object": True}],
    ids=lambda constraint: next(iter(constraint)),
)
@pytest.mark.parametrize("seed", range(4))
def test_what_is_rolled_back_leaves_no_trace(backend, constraint, seed):
    """Drafts, allowed or not, are followed and taken back; masks are those of a matcher fed from the start."""
    _, grammar = backend
    params, choose = StructuredOutputsParams(**constraint), np.random.default_rng(seed)
    matcher, tokens = load(grammar, params), []
    while not matcher.done and len(tokens) < 24:
        drafts, follower = [], load(grammar, params)
        follower.accept(tokens)
        assert allowed(grammar, matcher) == allowed(grammar, follower)
        for _ in range(choose.integers(0, 4)):
            options = sorted(allowed(grammar, follower))
            drafts.append(int(choose.choice(options)))
            assert matcher.valid(drafts) == len(drafts)
            follower.accept(drafts[-1:])
            if follower.done:
                break
        matcher.accept(drafts)
        assert allowed(grammar, matcher) == allowed(grammar, follower) and matcher.done == follower.done
        if not matcher.done and choose.random() < 0.5:
            wrong = next(i for i in range(grammar.words * 32) if i not in allowed(grammar, matcher))
            assert matcher.valid([wrong]) == 0
            matcher.accept([wrong])
            assert matcher.error is not None
            drafts.append(wrong)
        kept = int(choose.integers(0, len(drafts) + 1)) if matcher.error is None else 0
        matcher.rollback(len(drafts) - kept)
        tokens += drafts[:kept]
        if not kept and not matcher.done:
            tokens.append(int(choose.choice(sorted(allowed(grammar, matcher)))))
            matcher.accept(tokens[-1:])
        assert matcher.error is None
