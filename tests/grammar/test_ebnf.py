"""EBNF means what it says: the texts a matcher accepts are those of an oracle that knows nothing of terminals.

QUIRE_EXAMPLES says how many random grammars are compared (150 unless told).
"""

import json
import os
import random
from functools import cache
from itertools import product

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from quire.features.structured.grammar.backend import GrammarError
from quire.features.structured.grammar.ebnf import is_ebnf
from quire.features.structured.grammar.llguidance import LIMITS
from quire.features.structured.grammar.terminals import ebnf_to_lark

COUNT = int(os.environ.get("QUIRE_EXAMPLES", "150"))
LETTERS = "abàá"  # the last two begin with the same byte
LONGEST = 4


class Characters:
    """A tokenizer of bytes, and of some texts that end within a rule or go beyond it."""

    tokens = (
        [bytes([i]) for i in range(256)] + [text.encode() for text in ("ab", "ba", "aab", "bà", "áb", '"}', '":')] + [b"<end>"]
    )
    eos_token_id, bos_token_id, special_token_ids = len(tokens) - 1, None, [len(tokens) - 1]

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


END = Characters.eos_token_id


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Characters()), eos_token=[END])


def matcher(grammar: str) -> LLMatcher:
    lark = ebnf_to_lark(grammar)
    made = LLMatcher(tokenizer(), json.dumps({"grammars": [{"lark_grammar": lark}]}), log_level=0, limits=LIMITS)
    assert not made.is_error(), (grammar, lark, made.get_error())
    return made


def allowed(made: LLMatcher) -> set[int]:
    found = np.flatnonzero(np.unpackbits(np.frombuffer(made.compute_bitmask(), np.uint8), bitorder="little"))
    assert not made.is_error(), made.get_error()
    return set(found.tolist())


def accepts(grammar: str, text: str) -> bool:
    made = matcher(grammar)
    for byte in text.encode():
        if byte not in allowed(made):
            return False
        assert made.consume_token(byte)
    return END in allowed(made)


# ---- the oracle: a rule is a nested tuple, and its language a set of texts up to some length


def texts(form, known, longest):
    kind, *rest = form
    if kind == "text":
        return {rest[0]} if len(rest[0]) <= longest else set()
    if kind == "class":
        return set(rest[0])
    if kind == "rule":
        return known[rest[0]]
    if kind == "or":
        return set().union(*(texts(part, known, longest) for part in rest))
    if kind == "then":
        out = {""}
        for part in rest:
            out = joined(out, texts(part, known, longest), longest)
        return out
    part, least, most = rest
    once, out, power = texts(part, known, longest), set(), {""}
    for times in range((longest + least if most is None else most) + 1):
        out |= power if times >= least else set()
        power = joined(power, once, longest)
    return out


def joined(some, others, longest):
    by_length = {length: [text for text in others if len(text) == length] for length in range(longest + 1)}
    return {a + b for a in some for length in range(longest + 1 - len(a)) for b in by_length[length]}


def language(rules, longest=LONGEST):
    known = {name: set() for name in rules}
    while True:
        more = {name: texts(form, known, longest) for name, form in rules.items()}
        if more == known:
            return known["root"]
        known = more


def written(form) -> str:
    kind, *rest = form
    if kind == "text":
        return json.dumps(rest[0])
    if kind == "class":
        return f"[{rest[0]}]" if len(rest[0]) < len(LETTERS) else "[^c-zA-Z]"
    if kind == "rule":
        return rest[0]
    if kind in ("or", "then"):
        return "(" + {"or": " | ", "then": " "}[kind].join(map(written, rest)) + ")"
    part, least, most = rest
    marks = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most), f"{{{least},{'' if most is None else most}}}")
    return f"{written(part)}{marks}"


class Maker:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._names = ["root", "b.c", "start", "d-e"][: self._random.randint(1, 4)]

    def rules(self):
        return {name: self.form(3) for name in self._names}

    def form(self, depth: int):
        choose = self._random
        if depth == 0 or choose.random() < 0.15:
            kind = choose.randrange(4)
            if kind == 0:
                return ("class", "".join(choose.sample(LETTERS, choose.randint(1, 3))))
            if kind == 1:
                return ("rule", choose.choice(self._names))
            return ("text", "".join(choose.choices(LETTERS, k=choose.choice((0, 1, 1, 2, 3)))))
        kind = choose.choice(("or", "then", "then", "times"))
        if kind == "times":
            bounds = choose.choice(((0, None), (1, None), (0, 1), (2, 3), (0, 2), (2, None)))
            return ("times", self.form(depth - 1), *bounds)
        return (kind, *(self.form(depth - 1) for _ in range(choose.randint(2, 3))))


def accepted(grammar: str) -> set[str]:
    """All texts up to a length, letter by letter along what the masks allow."""
    made, out = matcher(grammar), set()

    def go(text: str) -> None:
        mask = allowed(made)
        if END in mask:
            out.add(text)
        for letter in LETTERS if len(text) < LONGEST else "":
            path = list(letter.encode())
            if path[0] in mask and made.try_consume_tokens(path) == len(path):
                go(text + letter)
                made.rollback(len(path))
            elif path[0] in mask and len(path) > 1:
                made.rollback(1)  # the first byte of some other letter

    go("")
    return out


@pytest.mark.parametrize("part", range(5))
def test_random_grammars_accept_what_the_oracle_does(part):
    compared = longer = 0
    for seed in range(part, COUNT, 5):
        rules = Maker(seed).rules()
        grammar = "\n".join(f"{name} ::= {written(form)}" for name, form in rules.items())
        expected = language(rules)
        if not expected:
            continue  # no text of this length, or none at all
        assert accepted(grammar) == expected, (seed, grammar, ebnf_to_lark(grammar))
        compared, longer = compared + 1, longer + (len(ebnf_to_lark(grammar).splitlines()) > 3)
    assert compared > COUNT // 15 and longer > COUNT // 50, "some of them need rules"


def spellings(text: bytes) -> list[list[int]]:
    """All ways to write a text with tokens."""
    if not text:
        return [[]]
    heads = [i for i, token in enumerate(Characters.tokens[:END]) if text.startswith(token)]
    return [[i, *rest] for i in heads for rest in spellings(text[len(Characters.tokens[i]) :])]


OVERLAPPING = [
    ('root ::= word "x"\nword ::= [a-z]+', ["abx", "xx", "xxx"], ["x", "ab", "", "xa"]),
    ('root ::= [ab]* "ab"', ["ab", "abab", "bab"], ["", "a", "aba"]),
    ('root ::= "a" "ab" | "aa" "b" "c"?', ["aab", "aabc"], ["aa", "abc"]),
    ('root ::= s\ns ::= "(" s ")" | word "ab"\nword ::= [a-z]+', ["aab", "(abab)", "((aab))"], ["(ab)", "(aab"]),
    ('root ::= (name | "ab" s)\ns ::= "[" root "]"\nname ::= [ab]+', ["ab", "ab[ab]", "ab[aab]"], ["aab[a]", "ab[]"]),
    ('root ::= list\nlist ::= item | list item\nitem ::= "a"+ | "a" "b" list "b"', ["aaa", "aabab", "abab"], ["b", "ab"]),
    ("root ::= x{2,3}\nx ::= [ab] x? [ab]", ["abab", "aabbab"], ["ab", "aba"]),
    ('root ::= x x\nx ::= ws "a" ws | "(" x ")"\nws ::= [ ]*', ["aa", " a  a", "( a )a "], ["a", "( )"]),
    ('root ::= "à" s | [à-ü]+ "á"\ns ::= "(" s ")" | "á" s | "!"', ["àá", "àüá", "àá(!)"], ["à", "à("]),
    (f'root ::= "{"z" * 190}" "x"* "x" "y"', ["z" * 190 + "xxxy"], ["z" * 190 + "xxx", "z" * 189 + "xy"]),
]


@pytest.mark.parametrize(("grammar", "good", "bad"), OVERLAPPING)
def test_what_overlaps_is_told_apart(grammar, good, bad):
    for text in good:
        assert accepts(grammar, text), text
        for tokens in spellings(text.encode()) if len(text) < 9 else ():
            made = matcher(grammar)
            for token in tokens:
                if made.compute_ff_tokens()[:1] not in ([], [token]):
                    break  # what must come is written in one way only
                assert token in allowed(made), (text, tokens)
                made.consume_token(token)
            else:
                assert END in allowed(made), (text, tokens)
    assert not any(accepts(grammar, text) for text in bad)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (r'root ::= "\u0041\x42" "\U0001F642\ud83d\ude42" "\n\t\"\\"', ['AB🙂🙂\n\t"\\'], ["AB"]),
        (r"root ::= [^] . [\]\-^] [a\-c] [-x]", ["é\n]-x", "x🙂^a-"], ["xx-bx", "x"]),
        (r"root ::= [^a-y\n] [^\x00-\x1f]", ["z ", "ZZ"], ["az", "z\n"]),
        (
            'root ::= start a.b-c_D  # a comment, "with" ::= things\n\nstart ::=\n  "s"\n  | "t"\na.b-c_D ::= ("x" #\n) ',
            ["sx", "tx"],
            ["x"],
        ),
        ('root ::= ("a" s){2} s{1,} s{,2}\ns ::= "(" s ")" | ""', ["aa", "a()a(())()()"], ["a", "a()"]),
        ('root ::= "a" {2} "b" *', ["aa", "aab"], ["a"]),
        ('root ::= ""', [""], ["a"]),
        ('Root ::= "x"\nroot ::= Root | ROOT\nROOT ::= "y"', ["x", "y"], ["xy"]),
    ],
)
def test_how_it_is_written(grammar, good, bad):
    assert is_ebnf(grammar)
    assert [accepts(grammar, text) for text in (*good, *bad)] == [True] * len(good) + [False] * len(bad)


LLAMA_JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
XGRAMMAR_JSON = r"""
root ::= any_array | any_object
any_value ::= any_number | any_string | "true" | "false" | "null" | any_array | any_object
any_number ::= ("0" | "-"? [1-9] [0-9]*) ("." [0-9]+)? ([eE] [+-]? [0-9]+)?
any_string ::= (([\"] characters [\"]))
characters ::= "" | [^"\\\r\n] characters | "\\" escape characters
escape ::= ["\\/bfnrt] | "u" [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9] [A-Fa-f0-9]
any_array ::= "[" ("" | ws any_value (ws "," ws any_value)*) ws "]"
any_object ::= "{" ("" | ws any_string ws ":" ws any_value ( ws "," ws any_string ws ":" ws any_value)*) ws "}"
ws ::= [ \n\t]*
"""


@pytest.mark.parametrize("grammar", [LLAMA_JSON, XGRAMMAR_JSON])
def test_json_in_ebnf(grammar):
    whole = ['{"a": [1, -2.5e3, {"b": "c\\n\\u00e9é🙂"}, true, null]}', "{}", '{"":""}', '{"a":"\\""}', '{"a":[]}']
    wrong = ['{"a":}', "1", '{"a":01}', '{"a" 1}', '{"a":1,}', '{"a":"}', '{"a":[1}']
    assert [accepts(grammar, text) for text in (*whole, *wrong)] == [True] * len(whole) + [False] * len(wrong)
    strings = max(ebnf_to_lark(grammar).splitlines(), key=len)
    assert strings.startswith("T"), "a string is a terminal, which masks are fast for"


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ('root ::= "a', "line 1, column 12 of the EBNF: expected '\"'"),
        ('root ::= ("a"', "expected ')'"),
        ('a ::= "x"', "no rule 'root'"),
        ("root ::= other", "names a rule 'other' that there is not"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 6 of the EBNF: there already is a rule 'root'"),
        ("root ::= [z-a]", "goes backwards"),
        ("root ::= []", "no character"),
        (r'root ::= "\q"', r"unknown escape \q"),
        (r'root ::= "\ud800"', "0xd800 is no character"),
        ('root ::= "a"{3,2}', "is no range"),
        ('root ::= "a"{x}', "expected a number of times"),
        ('root ::= "a"{99999999999}', "more than 100000 times"),
        ('root ::= "a"{100001}', "more than 100000 times"),
        ('root ::= "a"{1,' + "9" * 5000 + "}", "more than 100000 times"),
        ('root ::= "a" (= "b")', "look-ahead"),
        ('root ::= root "a"', "no text fits"),
        ("root ::= " + "(" * 5000 + '"a"', "groups in each other"),
        ("root ::= <think>", "found '<'"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(grammar, words):
    with pytest.raises(GrammarError) as caught:
        ebnf_to_lark(grammar)
    assert words in str(caught.value)


def test_large_grammars_are_translated():
    """By rules where writing them out would never end, letter by letter where comparing them would take too long."""
    doubling = "\n".join(["root ::= r0", *(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(60)), 'r60 ::= "a"'])
    chain = "\n".join(["root ::= r0", *(f'r{i} ::= "a" r{i + 1} "b" | "c"' for i in range(800)), 'r800 ::= "d"'])
    names = "\n".join(f'n{i} ::= [a-z]{{1,{1 + i % 9}}} "{i}" s [a-z]+' for i in range(60))
    many = f'root ::= s\ns ::= {" | ".join(f"n{i}" for i in range(60))} | "!"\n{names}'
    assert len(ebnf_to_lark(doubling)) < 100_000 and accepts(chain, "aacbb")
    assert accepts(many, "ab7!z") and not accepts(many, "7!")


def test_lark_is_left_alone():
    assert not is_ebnf('?start: "a" b\nb: "::="') and not is_ebnf("start: /x ::= y/") and is_ebnf('\n start ::= "a"')


def test_every_pair_of_letters_keeps_its_meaning_behind_a_class():
    """Whatever follows `[ab]+`, letters or not, the language is that of the oracle."""
    for letters, tail in product(("a", "ab", "à", "bà"), ("a", "ab", "á", "bb")):
        form = ("then", ("times", ("class", letters), 1, None), ("text", tail))
        nested = {"root": ("or", form, ("then", ("text", "b"), ("rule", "root"), ("text", "a")))}
        grammar = f"root ::= {written(nested['root'])}"
        assert accepted(grammar) == language(nested), grammar
