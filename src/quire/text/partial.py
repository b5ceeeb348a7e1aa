"""Tokens of one end of a long text without tokenizing all of it, and the special tokens around texts and pairs of texts.

A text is cut at a space between two letters or digits. If the tokenizer treats words apart, the tokens on one side of such a
space do not depend on the other side, so the tokens that are kept equal those of the whole text. Any other tokenizer, and a
text without such spaces near the cut, is tokenized whole.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import tokenizers
from tokenizers import models

from quire.text.workers.wire import Cut

LONG_CHARACTERS = 1 << 13  # texts up to this length are tokenized whole
CHARACTERS_PER_TOKEN = 8  # that the first part of a text has for each token that is kept
GROWTH = 4  # of the next part, where one did not have enough tokens
SEARCHED_CHARACTERS = 1 << 12  # in which a space between two words must be found
_SPACE_IN_WORDS = re.compile(r"(?<=[^\W_]) (?=[^\W_])")


# ---- special tokens


class PairEncoder(Protocol):
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...
    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]: ...


@dataclass(frozen=True)
class SpecialTokens:
    """What a tokenizer adds: `before` and `after` a text, and around and between the texts of a pair."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    pair_before: tuple[int, ...] = ()
    pair_between: tuple[int, ...] = ()
    pair_after: tuple[int, ...] = ()
    segment: int | None = None  # tokens of `pair_between` with segment id 0; None: the pair has one segment

    @classmethod
    def of(cls, encoder: PairEncoder) -> "SpecialTokens":
        """Read them off the tokens of two probes."""
        first, second = (encoder.encode(probe, False) for probe in ("a", "b"))
        before, after = _around(encoder.encode("a", True), first)
        ids, segments = encoder.encode_pair("a", "b")
        pair_before, rest = _around(ids, first)
        between, pair_after = _around(rest, second)
        begin = len(pair_before) + len(first)
        segment = segments.index(1) - begin if 1 in segments else None
        return cls(tuple(before), tuple(after), tuple(pair_before), tuple(between), tuple(pair_after), segment)

    @property
    def pair_count(self) -> int:
        return len(self.pair_before) + len(self.pair_between) + len(self.pair_after)

    def join(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], int]:
        """Return the tokens of a pair, and the position of the first one with segment id 1 (0: there is none)."""
        ids = [*self.pair_before, *first, *self.pair_between, *second, *self.pair_after]
        return ids, 0 if self.segment is None else len(self.pair_before) + len(first) + self.segment

    def fit(self, first: int, second: int, most: int) -> tuple[int, int]:
        """Return how many tokens of each text a pair of at most `most` tokens keeps: the longer text loses tokens first."""
        room = max(0, most - self.pair_count)
        if first + second <= room:
            return first, second
        short, long = sorted((first, second))
        long = max(short, room - short)
        if short + long > room:
            short, long = room // 2, room - room // 2
        return (short, long) if first <= second else (long, short)


def _around(whole: Sequence[int], part: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    for i in range(len(whole) - len(part) + 1):
        if list(whole[i : i + len(part)]) == list(part):
            return whole[:i], whole[i + len(part) :]
    return (), ()  # the tokens of a text depend on what follows it: nothing is known of the special ones


# ---- parts of a text


class TextEncoder(Protocol):
    @property
    def words_apart(self) -> bool: ...
    @property
    def template(self) -> SpecialTokens: ...
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...


def encode_end(tokenizer: TextEncoder, text: str, add_special_tokens: bool, keep: int, right: bool) -> list[int] | None:
    """Return the `keep` tokens of a long text that are left when it is cut, special tokens among them.

    None: the whole text must be tokenized.
    """
    if len(text) <= LONG_CHARACTERS or not tokenizer.words_apart:
        return None
    template = tokenizer.template if add_special_tokens else SpecialTokens()
    cut = Cut(keep, keep, right, len(template.before), len(template.after))
    for part in parts(text, cut) if cut.room else ():
        lead = len(tokenizer.encode(part.lead, False)) if part.lead else 0
        ids = tokenizer.encode(part.text, add_special_tokens)
        if len(ids) >= keep + lead:
            return cut.of(ids)[1]
    return None


@dataclass(frozen=True)
class TextEnd:
    """One end of a text. Its tokens, special ones included, are enough if there are more than `cut.keep` of them.

    lead: the words at its beginning whose tokens may differ from those within the whole text; "": none
    """

    text: str
    lead: str = ""


def parts(text: str, cut: Cut) -> Iterator[TextEnd]:
    """Yield ever longer ends of a text, of which the kept tokens may be taken. None: the whole text must be tokenized."""
    length = CHARACTERS_PER_TOKEN * cut.room + LONG_CHARACTERS // 2
    while 2 * length < len(text):
        part = _first(text, length) if cut.right else _last(text, length)
        if part is None:
            return
        yield part
        length *= GROWTH


def _first(text: str, length: int) -> TextEnd | None:
    spaces = [*_SPACE_IN_WORDS.finditer(text, max(0, length - SEARCHED_CHARACTERS), length)]
    return TextEnd(text[: spaces[-1].start()]) if spaces else None


def _last(text: str, length: int) -> TextEnd | None:
    """The part begins with a word. How the tokenizer spells the beginning of a text matters to this word only."""
    begin = _SPACE_IN_WORDS.search(text, len(text) - length, len(text) - length + SEARCHED_CHARACTERS)
    if begin is None:
        return None
    end = _SPACE_IN_WORDS.search(text, begin.end(), begin.end() + SEARCHED_CHARACTERS)
    return None if end is None else TextEnd(text[begin.end() :], text[begin.end() : end.start()])


# ---- tokenizers that treat words apart

_NORMALIZERS = {
    "BertNormalizer", "ByteLevel", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "Prepend", "Replace",
    "Strip", "StripAccents",
}  # fmt: skip
_PRE_TOKENIZERS = {
    "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts",
    "Whitespace", "WhitespaceSplit",
}  # fmt: skip
_MANY_SPACES = " {2,}"
_LOOKAROUND = re.compile(r"\(\?(?:=|!|<[=!])")
_NO_MORE_SPACES = r"(?!\S)"
_PROBES = ("a b", "ab Cd", "1 a", "a 1", "12 34", "é ü", "中 文", "a 中", "ж щ", "ア イ", "a١ ٢")
_SPACES = "▁Ġ "
_BESIDE_WORDS = _SPACES + "\nĊĉč!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
_ACROSS_WORDS = re.compile(f"[^{re.escape(_BESIDE_WORDS)}][{_SPACES}]")


def tokenizes_words_apart(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether the tokens on one side of a space between two letters or digits never depend on the other side."""
    first = list(stages(tokenizer.normalizer, "normalizers"))
    before = list(stages(tokenizer.pre_tokenizer, "pretokenizers"))
    if not all(map(_is_local_normalizer, first)) or not all(map(_is_local_split, before)):
        return False
    for token in tokenizer.get_added_tokens_decoder().values():
        content = token.content
        if re.search(r"[^\W_] | [^\W_]", content) or (token.lstrip and content[:1].isalnum()):
            return False
        if token.rstrip and content[-1:].isalnum():
            return False
    return all(_splits_at_space(tokenizer, probe) for probe in _PROBES) or _has_no_token_across_words(tokenizer)


def stages(part: Any, within: str) -> Iterable[Mapping[str, Any]]:
    """Yield the descriptions of the stages of a normalizer or pre-tokenizer, which may be nested lists."""
    if part is None:
        return
    pending = [json.loads(part.__getstate__())]
    while pending:
        stage = pending.pop(0)
        if stage["type"] == "Sequence":
            pending = [*stage[within], *pending]
        else:
            yield stage


def _is_local_normalizer(stage: Mapping[str, Any]) -> bool:
    if stage["type"] == "Replace":
        pattern = stage["pattern"]
        return pattern.get("Regex") == _MANY_SPACES or len(pattern.get("String", _MANY_SPACES)) <= 2
    return stage["type"] in _NORMALIZERS


def _is_local_split(stage: Mapping[str, Any]) -> bool:
    if stage["type"] == "Split" and "Regex" in stage["pattern"]:
        return not _LOOKAROUND.search(stage["pattern"]["Regex"].replace(_NO_MORE_SPACES, ""))
    return stage["type"] in _PRE_TOKENIZERS


def _splits_at_space(tokenizer: tokenizers.Tokenizer, probe: str) -> bool:
    """Whether no piece of the probe has both the space and the character in front of it."""
    if tokenizer.pre_tokenizer is None:
        return False
    text = probe if tokenizer.normalizer is None else tokenizer.normalizer.normalize_str(probe)
    marks = [i for i, character in enumerate(text) if character in _SPACES]
    pieces = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return bool(marks) and not any(start < marks[-1] < end for _, (start, end) in pieces)


def _has_no_token_across_words(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether no token has a letter or digit with a space after it: then none spans the space between two words."""
    if not isinstance(tokenizer.model, models.BPE | models.Unigram):
        return False
    return _ACROSS_WORDS.search("\n".join(tokenizer.get_vocab(with_added_tokens=False))) is None
