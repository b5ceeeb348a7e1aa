"""How many characters a token can stand for: a text that is too long for a context by that needs no tokenizing."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import models

COMPOSED = 4  # characters that may become one when they are composed

# stages that leave nothing out, and make as many characters of a text as it has, or more
_NORMALIZERS = {"ByteLevel", "Lowercase", "NFD", "NFKD", "Prepend"}
_PRE_TOKENIZERS = {"ByteLevel", "Digits", "FixedLength", "Metaspace", "UnicodeScripts"}


def most_characters(tokenizer: tokenizers.Tokenizer) -> int | None:
    """Of one token. None: there may be tokens for any number of them, or text without tokens."""
    before = list(_stages(tokenizer.pre_tokenizer, "pretokenizers"))
    first = list(_stages(tokenizer.normalizer, "normalizers"))
    if not _spells_all(tokenizer, {stage["type"] for stage in (*first, *before)}):
        return None
    if any(token.lstrip or token.rstrip for token in tokenizer.get_added_tokens_decoder().values()):
        return None  # spaces around such a token are part of it, however many they are
    if not all(_keeps_parts(stage) for stage in before) or not all(_keeps_characters(stage) for stage in first):
        return None
    composes = any(stage["type"] in ("NFC", "NFKC") for stage in first)
    longest = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
    return longest * (COMPOSED if composes else 1)


def _spells_all(tokenizer: tokenizers.Tokenizer, stages: set[str]) -> bool:
    """Has every character tokens of its own? Unknown ones may be left out, or be one token together."""
    model = tokenizer.model
    if isinstance(model, models.BPE):
        unknown = model.unk_token is not None and not model.fuse_unk
        return unknown or bool(model.byte_fallback) or "ByteLevel" in stages
    return isinstance(model, models.Unigram) and bool(getattr(model, "byte_fallback", False))


def _keeps_parts(stage: Mapping[str, Any]) -> bool:
    if stage["type"] in ("Split", "Punctuation"):
        return bool(stage.get("behavior") != "Removed")
    return stage["type"] in _PRE_TOKENIZERS


def _keeps_characters(stage: Mapping[str, Any]) -> bool:
    if stage["type"] == "Replace":
        old = stage["pattern"].get("String")
        return old is not None and len(stage["content"]) >= len(old)
    return stage["type"] in _NORMALIZERS or stage["type"] in ("NFC", "NFKC")


def _stages(part: Any, within: str) -> Iterable[Mapping[str, Any]]:
    if part is None:
        return
    told = [json.loads(part.__getstate__())]
    while told:
        stage = told.pop(0)
        if stage["type"] == "Sequence":
            told = [*stage[within], *told]
        else:
            yield stage
