"""Structural tags: free text in which certain strings begin a part that is constrained. They become a Lark grammar.

Two spellings are known, as in vLLM: `structures` with `triggers`, and a `format` built of nested pieces.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import regex_to_lark

from quire.features.structured.grammar.backend import GrammarError
from quire.features.structured.grammar.ebnf import is_ebnf, to_pattern, without_anchors
from quire.features.structured.grammar.terminals import ebnf_to_lark

TEXT = r"/(.|\n)*/"
PATTERNS = ("const_string", "regex")
MOST_NESTED = 80  # names in a place


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
        if place.count(".") > MOST_NESTED:
            raise GrammarError(f"structural_tag: {place} is nested too deeply")
        pattern = self._pattern(piece, place)
        if pattern is not None:
            return f"/{pattern}/" if pattern else '""'
        return self._kinds[piece["type"]](piece, place)

    def _pattern(self, piece: Any, place: str) -> str | None:
        """Texts and patterns side by side are one pattern: of each of several the library would take as much as it can."""
        kind = piece.get("type") if isinstance(piece, dict) and place.count(".") <= MOST_NESTED else None
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
