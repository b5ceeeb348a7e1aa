"""How much longer a tokenizer's stages can make a text, found out from tokenizer.json before any stage runs.

A chain of 40 normalizers that each double an "a" makes a terabyte of one character. The `tokenizers` library has no bound: it
would not end, or abort the process.
"""

import base64
import binascii
import math
import re
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from quire.files.reading import shown, told
from quire.text.regex_cost import is_cheap
from quire.types.errors import ModelError

MAX_GROWTH = 1 << 20  # of a text, before it cannot be tokenized at all
MAX_ADDED_TOKENS = 4096  # that a post-processor puts around a text
UNICODE_REPLACEMENT_BYTES = 64  # of the longest replacement in Unicode's own tables of equivalents
_CHILDREN = ("normalizers", "pretokenizers", "processors", "decoders")
_PROPERTY = re.compile(r"\\[pP](\{\^?\w+\}|\w)")  # a class of characters that Python's parser does not know


class _Stages(msgspec.Struct):
    """What tokenizer.json says of its stages. The vocabulary, which may have megabytes, is skipped."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


def check_stages(path: Path, content: bytes) -> None:
    """Raise ModelError if the stages in a tokenizer.json can make a text longer by more than MAX_GROWTH."""
    try:
        stages = msgspec.json.decode(content, type=_Stages)
    except RecursionError as error:
        raise ModelError(f"{path}: cannot be read as JSON ({told(error)})") from error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return  # the library reports what is wrong
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        stage = getattr(stages, name)
        if growth_of(stage) > MAX_GROWTH:
            raise ModelError(f"{path}: {name} must not make a text more than {MAX_GROWTH:,} times as long; its stages can")
    for expression in patterns_of(stages.decoder):  # answers are decoded on the event loop
        if not is_cheap(expression):
            raise ModelError(f"{path}: decoder must have no regular expression that may backtrack; got {shown(expression)}")
    added = added_tokens(stages.post_processor)
    if added > MAX_ADDED_TOKENS:
        raise ModelError(f"{path}: post_processor must add at most {MAX_ADDED_TOKENS:,} tokens to a text; got {added:,}")


def flat_stages(stage: Any) -> Iterable[Mapping[str, Any]]:
    """Yield the stages of a section of tokenizer.json, those of sequences one by one."""
    left = [stage]
    while left:
        stage = left.pop()
        if not isinstance(stage, Mapping):
            continue
        children = [child for name in _CHILDREN if isinstance(stage.get(name), list) for child in stage[name]]
        left += reversed(children)
        if not children:
            yield stage


def growth_of(stage: Any) -> float:
    """Return how many times as long a text can become, at most."""
    growth = 1.0
    for each in flat_stages(stage):
        growth *= _growth(each)
    return growth


def patterns_of(stage: Any) -> Iterable[str]:
    """Yield the regular expressions of a section's stages."""
    for each in flat_stages(stage):
        expression = _table(each.get("pattern")).get("Regex")
        if isinstance(expression, str):
            yield expression


def added_tokens(stage: Any) -> int:
    """Return how many tokens a post-processor adds to a text."""
    added = 0
    for each in flat_stages(stage):
        tokens = _table(each.get("special_tokens"))
        names = [_table(piece.get("SpecialToken")).get("id") for piece in _template(each)]
        ids = [_table(tokens.get(name)).get("ids") for name in names if isinstance(name, str)]
        added = added * _growth(each) + sum(len(some) for some in ids if isinstance(some, list))
        if added > MAX_ADDED_TOKENS:
            break
    return added


def _growth(stage: Mapping[str, Any]) -> int:
    """By the stage's fields: the library recognizes a stage without a type by them."""
    if "content" in stage and "pattern" in stage:
        return _replacement_growth(stage["pattern"], stage["content"])
    if "precompiled_charsmap" in stage:
        return max(1, math.ceil(_longest_replacement(stage["precompiled_charsmap"]) / UNICODE_REPLACEMENT_BYTES))
    if stage.get("type") == "ByteLevel" or "trim_offsets" in stage:
        return 2  # every byte becomes a character, and the next such stage makes two of it
    return max(1, sum("Sequence" in piece for piece in _template(stage)))


def _replacement_growth(pattern: Any, content: Any) -> int:
    if not isinstance(pattern, Mapping) or not isinstance(content, str):
        return 1
    text, expression = pattern.get("String"), pattern.get("Regex")
    shortest = len(text) if isinstance(text, str) else _shortest_match(expression) if isinstance(expression, str) else 1
    return max(1, math.ceil(len(content) / shortest)) if shortest else 1 + len(content)


def _shortest_match(expression: str) -> int:
    """Characters; 0 if the expression cannot be understood."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return int(re._parser.parse(_PROPERTY.sub(r"\\w", expression)).getwidth()[0])  # type: ignore[attr-defined]
    except (re.error, RecursionError, OverflowError, ValueError):
        return 0


def _longest_replacement(table: Any) -> int:
    """Bytes of the longest text in SentencePiece's table: the length of an index, the index, texts that end with zeros."""
    try:
        data = base64.b64decode(table) if isinstance(table, str) else b""
    except (binascii.Error, ValueError):
        return 0
    return max(map(len, data[4 + int.from_bytes(data[:4], "little") :].split(b"\0")))


def _template(stage: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    pieces = stage.get("single")
    return [piece for piece in pieces if isinstance(piece, Mapping)] if isinstance(pieces, list) else []


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
