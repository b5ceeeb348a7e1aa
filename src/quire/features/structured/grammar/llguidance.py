"""Grammars followed by llguidance: Earley parsing over lazily built lexers, tens of microseconds per mask.

What a token spells is taken from our own tokenizer, so that a mask means exactly the text the detokenizer will give. The
library stops by itself when a step exceeds its limits; it does not guard against slow or deep grammars while it compiles
(`vetting.py` does).
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from quire.features.structured.grammar.backend import GrammarError, Matcher
from quire.features.structured.grammar.ebnf import is_ebnf, to_pattern, without_anchors
from quire.features.structured.grammar.schema import Schema, prepare_schema
from quire.features.structured.grammar.terminals import ebnf_to_lark
from quire.text.tokenizer import Tokenizer
from quire.types.errors import InvalidParameter
from quire.types.structured import StructuredOutputsParams, read_object


def to_source(params: StructuredOutputsParams) -> str:
    if params.json is not None or params.json_object:
        schema = {"type": "object"} if params.json is None else _read("json", params.json)
        return json.dumps({"grammars": [{"json_schema": prepare_schema(schema, params)}]})
    if params.regex is not None:
        return LLMatcher.grammar_from_regex(without_anchors(params.regex))
    if params.choice is not None:
        return _lark(choice_to_lark(params.choice))
    if params.structural_tag is not None:
        return tags_to_lark(_read("structural_tag", params.structural_tag), prepare_schema)
    assert params.grammar is not None
    return _lark(ebnf_to_lark(params.grammar) if is_ebnf(params.grammar) else params.grammar)


def choice_to_lark(texts: Iterable[str]) -> str:
    """One terminal: rules with thousands of alternatives are more than the library takes."""
    written = [to_pattern(text) for text in dict.fromkeys(texts)]
    several = "|".join(text for text in written if text)
    if not several:
        return 'start: ""'
    return f"start: CHOICE{'' if all(written) else '?'}\nCHOICE: /{several}/"


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _read(name: str, value: str | Schema) -> Schema:
    try:
        return read_object(name, value)
    except InvalidParameter as error:
        raise GrammarError(str(error)) from None


LIMITS = LLParserLimits(
    step_lexer_fuel=100_000,  # about 7 ms
    step_max_items=50_000,  # about 3 ms
    max_lexer_states=50_000,  # about 100 MB
    verbose_errors=False,
)
MAX_THREADS = 8
MAX_ENCODINGS = 1 << 14
SILENT = 0
_RANGE = re.compile(r"Failed to generate regex for \w+ range: min=(?:None|Some\(([^)]*)\)), max=(?:None|Some\(([^)]*)\))")
_COUNT = re.compile(r"Expected positive integer for '(\w+)', got (\d[\d.]*e\d+)$")


class TokenSpelling:
    """Our tokenizer as llguidance wants to see it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        token_bytes = tokenizer.token_bytes
        if token_bytes is None:
            raise GrammarError("structured outputs need a tokenizer whose tokens can be spelled one by one; this one's cannot")
        size = min(len(tokenizer), vocab_size)
        self.tokens = token_bytes.spell_all(size) + [b""] * (vocab_size - size)  # [V]
        self.special_token_ids = sorted({i for i in (*tokenizer.special_ids, *eos_ids) if i < size})
        self._special = frozenset(self.special_token_ids)
        self.eos_token_id, self.bos_token_id = eos_ids[0], tokenizer.bos_token_id
        self._encode = tokenizer.encode
        self._known = lru_cache(MAX_ENCODINGS)(self._spell)

    def __call__(self, text: bytes) -> list[int]:
        return self._known(text)

    def _spell(self, text: bytes) -> list[int]:
        """As ordinary tokens: the text of a special token is split after its first character."""
        decoded = text.decode(errors="ignore")
        if decoded.encode() != text:
            return []  # none: what is forced is left to the mask
        if self._special.isdisjoint(self._encode(decoded, add_special_tokens=False)):
            return self._spell_inner(decoded)
        names = (self.tokens[i].decode(errors="ignore") for i in self._special)
        pattern = "|".join(re.escape(name) for name in names if len(name) > 1)
        cuts = [place.start() + 1 for place in re.finditer(pattern, decoded)]
        parts = [self._spell_inner(decoded[begin:end]) for begin, end in pairwise([0, *cuts, len(decoded)])]
        return [i for part in parts for i in part] if all(parts) else []

    def _spell_inner(self, text: str) -> list[int]:
        """How the tokenizer writes `text` in the middle of a text: some put a space before a text's first word."""
        ids = self._encode(text, add_special_tokens=False)
        if self._spells(ids, text):
            return ids
        mark, ids = self._encode("\x02", add_special_tokens=False), self._encode("\x02" + text, add_special_tokens=False)
        rest = ids[len(mark) :]
        return rest if ids[: len(mark)] == mark and self._spells(rest, text) else []

    def _spells(self, ids: Sequence[int], text: str) -> bool:
        return b"".join(self.tokens[i] for i in ids) == text.encode()


class _Compiled:
    """A grammar whose matchers share a lexer. It grows with the texts that are followed, up to a limit for all of them."""

    def __init__(self, make: Callable[[], LLMatcher]) -> None:
        self.make = make  # with a lexer of its own
        self._fresh = make()
        self.spent = False  # its lexer may have grown to the limit

    def begin(self) -> LLMatcher:
        if self.spent:
            self._fresh, self.spent = self.make(), False
        return self._fresh.deep_copy()


class LLGuidanceMatcher:
    """One that fails is tried once more, with a lexer for itself: the limit may have been reached by others."""

    def __init__(self, matcher: LLMatcher, compiled: _Compiled, tokens: Sequence[int] = (), again: bool = False) -> None:
        self.matcher = matcher
        self._compiled = compiled
        self._tokens = list(tokens)
        self._again = again  # it was tried once more

    def copy(self) -> "LLGuidanceMatcher":
        begins = not self._again and not self._tokens
        matcher = self._compiled.begin() if begins else self.matcher.deep_copy()
        return LLGuidanceMatcher(matcher, self._compiled, self._tokens, self._again)

    def accept(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        self.matcher.consume_tokens(list(tokens))
        self.recovers()

    def valid(self, tokens: Sequence[int]) -> int:
        return self.matcher.validate_tokens(list(tokens))

    def rollback(self, count: int) -> None:
        if count:
            del self._tokens[-count:]
            if self.matcher.is_error() or not self.matcher.rollback(count):
                self._start_over()

    def recovers(self) -> bool:
        """Was it tried once more? It may have failed again."""
        if self._again or not self.matcher.is_error():
            return False
        self._compiled.spent = self._again = True
        self._start_over()
        return True

    def _start_over(self) -> None:
        self.matcher = self._compiled.make()
        self.matcher.consume_tokens(self._tokens)

    def forced(self) -> list[int]:
        forced = self.matcher.compute_ff_tokens()
        return self.matcher.compute_ff_tokens() if self.recovers() else forced

    @property
    def done(self) -> bool:
        return self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def error(self) -> str | None:
        return first_line(self.matcher.get_error()) if self.matcher.is_error() else None


class LLGuidance:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        if not eos_ids:
            raise GrammarError("structured outputs need an end-of-text token, and this model names none")
        self.eos_ids = tuple(eos_ids)
        self.words = -(-vocab_size // 32)
        spelling = TokenizerWrapper(TokenSpelling(tokenizer, vocab_size, eos_ids))
        self._tokenizer = LLTokenizer(spelling, eos_token=list(eos_ids))
        self._threads: LLExecutor | None = None  # made late: a process that forks must have none

    def translate(self, params: StructuredOutputsParams) -> str:
        return to_source(params)

    def load(self, source: str) -> LLGuidanceMatcher:
        compiled = _Compiled(lambda: self._make(source))
        matcher = compiled.begin()
        if matcher.is_error():
            raise GrammarError(plain(matcher.get_error().strip()))
        matcher.compute_bitmask()
        if matcher.is_error():
            raise GrammarError(f"the grammar leads nowhere or is too complex: {first_line(matcher.get_error())}")
        return LLGuidanceMatcher(matcher, compiled)

    def _make(self, source: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, source, log_level=SILENT, limits=LIMITS)
        if not matcher.is_error():
            matcher.deep_copy().compute_bitmask()  # the first is the most expensive one; what it builds is shared by all copies
        return matcher

    def fill(self, rows: Sequence[tuple[Matcher, int]], address: int, room: int) -> None:
        """One mask alone is made by the caller's own thread, so that its time can be measured."""
        mine = [(matcher, row) for matcher, row in rows if isinstance(matcher, LLGuidanceMatcher)]
        if len(mine) == 1:
            self._fill_one(*mine[0], address)
        else:
            if self._threads is None:
                self._threads = LLExecutor(max(1, min(MAX_THREADS, (os.cpu_count() or 1) // 2)))
            pairs = [(matcher.matcher, row) for matcher, row in mine]
            self._threads.unsafe_compute_mask_ptr(pairs, address, 4 * self.words, room)
        for matcher, row in mine:
            if matcher.recovers():
                self._fill_one(matcher, row, address)

    def _fill_one(self, matcher: LLGuidanceMatcher, row: int, address: int) -> None:
        matcher.matcher.unsafe_compute_mask_ptr(address + 4 * self.words * row, 4 * self.words)


def plain(error: str) -> str:
    """Report numbers that are too large for the library as such."""
    if (found := _RANGE.search(error)) is not None:
        bounds = " and ".join(
            f"{word} {value}" for word, value in zip(("minimum", "maximum"), found.groups(), strict=True) if value
        )
        return f"{bounds or 'a bound'} of a number is more than a grammar takes, which is from -2**63 to 2**63: leave it out"
    if (found := _COUNT.search(error)) is not None:
        return f"{found[1]} is too large: {found[2]}"
    return error


def first_line(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "no reason given")


# ---- structural tags
#
# Free text in which certain strings begin a constrained part becomes a Lark grammar. As in vLLM there are two spellings:
# `structures` with `triggers`, and a `format` of nested elements.

TEXT = r"/(.|\n)*/"
PATTERNS = ("const_string", "regex")
MAX_NESTED = 80  # names in a place


def tags_to_lark(tag: dict[str, Any], prepare: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """`prepare` makes a JSON schema ready for the library."""
    if "structures" in tag:
        content = [
            {**structure, "content": {"type": "json_schema", "json_schema": structure.get("schema", {})}}
            for structure in _list(tag, "structures", "structural_tag")
        ]
        tag = {"format": {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": content}}
    if not isinstance(tag.get("format"), dict):
        raise GrammarError("structural_tag: it must have structures and triggers, or a format")
    writer = _Writer(prepare)
    start = writer.write(tag["format"], "format")
    writer.rules.insert(0, f"start: {start}")
    lark = "\n".join(["%llguidance {}", *writer.rules])
    return json.dumps({"grammars": [{"name": "tags", "lark_grammar": lark}, *writer.grammars]})


class _Writer:
    """`write` gives the Lark expression of a piece; what needs a name of its own goes to `rules`."""

    def __init__(self, prepare: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        self.rules: list[str] = [f"TEXT: {TEXT}"]
        self.grammars: list[dict[str, str]] = []
        self._prepare = prepare
        self._kinds: dict[str, Callable[[dict[str, Any], str], str]] = {
            "json_schema": self._json,
            "grammar": self._grammar,
            "any_text": lambda *_: "TEXT",
            "sequence": self._sequence,
            "or": self._alternatives,
            "tag": self._tag,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def write(self, piece: Any, place: str) -> str:
        kinds = (*PATTERNS, *self._kinds)
        if not isinstance(piece, dict) or piece.get("type") not in kinds:
            raise GrammarError(f"structural_tag: {place} must be an object whose type is one of {', '.join(kinds)}")
        if place.count(".") > MAX_NESTED:
            raise GrammarError(f"structural_tag: {place} is nested too deeply")
        pattern = self._pattern(piece, place)
        if pattern is not None:
            return f"/{pattern}/" if pattern else '""'
        return self._kinds[piece["type"]](piece, place)

    def _pattern(self, piece: Any, place: str) -> str | None:
        """Texts and patterns side by side are one pattern: of each of several the library would take as much as it can."""
        kind = piece.get("type") if isinstance(piece, dict) and place.count(".") <= MAX_NESTED else None
        if kind == "const_string":
            return to_pattern(_text(piece, "value", place))
        if kind == "regex":
            return f"(?:{regex_to_lark(without_anchors(_text(piece, 'pattern', place)))})"
        if kind in ("sequence", "or"):
            inner = [self._pattern(p, f"{place}.elements.{i}") for i, p in enumerate(_list(piece, "elements", place))]
            patterns = [pattern for pattern in inner if pattern is not None]
            if len(patterns) == len(inner):
                return "".join(patterns) if kind == "sequence" else f"(?:{'|'.join(patterns)})"
        return None

    def _json(self, piece: dict[str, Any], place: str) -> str:
        schema = piece.get("json_schema")
        if not isinstance(schema, dict):
            raise GrammarError(f"structural_tag: {place}.json_schema must be an object")
        return f"%json {json.dumps(self._prepare(schema))}"

    def _grammar(self, piece: dict[str, Any], place: str) -> str:
        grammar = _text(piece, "grammar", place)
        return self._embed(ebnf_to_lark(grammar) if is_ebnf(grammar) else grammar)

    def _embed(self, lark: str) -> str:
        name = f"grammar_{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": lark})
        return f"@{name}"

    def _sequence(self, piece: dict[str, Any], place: str) -> str:
        parts = _list(piece, "elements", place)
        return " ".join(self.write(part, f"{place}.elements.{i}") for i, part in enumerate(parts))

    def _alternatives(self, piece: dict[str, Any], place: str) -> str:
        parts = _list(piece, "elements", place)
        return self._name("(" + " | ".join(self.write(part, f"{place}.elements.{i}") for i, part in enumerate(parts)) + ")")

    def _tag(self, piece: dict[str, Any], place: str) -> str:
        return f"{_quoted(_text(piece, 'begin', place))} {self._inside(piece, place)}"

    def _inside(self, piece: dict[str, Any], place: str) -> str:
        """What follows the beginning of a tag. Free text ends where the tag's end is first met."""
        ends = piece.get("end") if isinstance(piece.get("end"), list) else [_text(piece, "end", place)]
        if not ends or not all(isinstance(end, str) for end in ends):
            raise GrammarError(f"structural_tag: {place}.end must be a string or a list of strings")
        end = " | ".join(map(_quoted, ends))
        content = piece.get("content")
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            return self._name(f"TEXT ({end})", lazy=True)
        pattern = self._pattern(content, f"{place}.content")
        if pattern is not None:
            return f"/{pattern}(?:{'|'.join(map(to_pattern, ends))})/" if pattern or all(ends) else f"({end})"
        if isinstance(content, dict) and content.get("type") == "grammar" and is_ebnf(content.get("grammar", "")):
            return self._embed(ebnf_to_lark(content["grammar"], ends))
        return f"{self.write(content, f'{place}.content')} ({end})"

    def _triggered(self, piece: dict[str, Any], place: str) -> str:
        """Text up to a trigger, then one of the tags that begin with it; and so on."""
        triggers, tags = _list(piece, "triggers", place), _list(piece, "tags", place)
        segments = []
        for trigger in triggers:
            if not isinstance(trigger, str) or not trigger:
                raise GrammarError(f"structural_tag: {place}.triggers must be non-empty strings")
            rest = []
            for i, tag in enumerate(tags):
                begin = _text(tag, "begin", f"{place}.tags.{i}")
                if begin.startswith(trigger):
                    rest.append(f"{_quoted(begin[len(trigger) :])} {self._inside(tag, f'{place}.tags.{i}')}")
            if rest:
                head = self._name(f"TEXT {_quoted(trigger)}", lazy=True)
                segments.append(f"{head} ({' | '.join(rest)})")
        begins = [tag["begin"] for tag in tags]
        for i, begin in enumerate(begins):
            if not any(begin.startswith(trigger) for trigger in triggers):
                raise GrammarError(f"structural_tag: {place}.tags.{i}.begin {begin!r} begins with none of the triggers")
        segment = self._name(f"({' | '.join(segments)})")
        if piece.get("stop_after_first"):
            return segment if piece.get("at_least_one") else self._name(f"({segment} | TEXT)")
        return f"{segment}{'+' if piece.get('at_least_one') else '*'} TEXT"

    def _separated(self, piece: dict[str, Any], place: str) -> str:
        tags = _list(piece, "tags", place)
        one = self._name("(" + " | ".join(self._tag(tag, f"{place}.tags.{i}") for i, tag in enumerate(tags)) + ")")
        separator = _quoted(_text(piece, "separator", place))
        several = one if piece.get("stop_after_first") else f"{one} ({separator} {one})*"
        return several if piece.get("at_least_one") else f"({several})?"

    def _name(self, expression: str, lazy: bool = False) -> str:
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {expression}")
        return name


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _text(piece: Any, name: str, place: str) -> str:
    value = piece.get(name) if isinstance(piece, dict) else None
    if not isinstance(value, str):
        raise GrammarError(f"structural_tag: {place}.{name} must be a string")
    return value


def _list(piece: dict[str, Any], name: str, place: str) -> Sequence[Any]:
    value = piece.get(name)
    if not isinstance(value, list) or not value:
        raise GrammarError(f"structural_tag: {place}.{name} must be a list of at least one")
    return value
