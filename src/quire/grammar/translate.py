"""The user's constraint in llguidance's own words: its JSON form, which names Lark grammars and JSON schemas."""

import json
from collections.abc import Iterable

from llguidance import LLMatcher

from quire.grammar.backend import GrammarError
from quire.grammar.ebnf import is_ebnf
from quire.grammar.forms import to_pattern, without_anchors
from quire.grammar.schema import Schema, prepare_schema
from quire.grammar.tags import tags_to_lark
from quire.grammar.terminals import ebnf_to_lark
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
