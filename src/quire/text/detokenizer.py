"""Incremental detokenization, stop strings, and the texts of single tokens for logprobs.

Detokenizer: everything `feed` returned plus what `finish` returns is

    decode(output)                                   without a prompt
    decode(prompt + output) less decode(prompt)      with one: what remains after the longest prefix both have in common

with the same flags. So a continuation keeps the space it begins with, and a character whose first bytes end the prompt appears
whole in the output. Incomplete UTF-8 is never returned: at most three bytes of an unfinished character are held back. The cost
per token does not depend on the length of the text.

Stop strings: the text ends as soon as some stop string is complete, read character by character. The match that *ends* first
wins, and of two that end together the longer; how the text was cut into chunks does not matter. Text is held back only while it
may still become a stop string.

A character may be spread over tokens; the token that completes it has its text ("☃" as <e2> <98> <83> -> "" "" "☃").
Bytes that are not part of a character have no text, as in vLLM.
"""

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from quire.text.backends import TokenBytes
from quire.text.tokenizer import CleanUpStream, Tokenizer, clean_up

_UNREADABLE = "\ufffd"


class Detokenizer(Protocol):
    def feed(self, ids: Iterable[int]) -> str:
        """Return the text that is new and certain."""
        ...

    def finish(self) -> str:
        """Return the rest of the text: no more tokens come."""
        ...


def new_detokenizer(
    tokenizer: Tokenizer,
    prompt: Sequence[int] = (),
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
) -> Detokenizer:
    """Return the detokenizer of an output that follows `prompt`."""
    token_bytes = tokenizer.token_bytes
    if token_bytes is not None:
        return ByteDetokenizer(token_bytes, prompt, tokenizer.special_ids if skip_special_tokens else frozenset())
    stream = CleanedDetokenizer if tokenizer.cleans_up else WindowDetokenizer
    return stream(tokenizer, prompt, skip_special_tokens, spaces_between_special_tokens)


class ByteDetokenizer:
    """For tokenizers whose tokens are bytes: a text is their concatenation."""

    def __init__(self, token_bytes: TokenBytes, prompt: Sequence[int], skip: frozenset[int]) -> None:
        self._token_bytes = token_bytes
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail, self._started = token_bytes.context(prompt, skip)
        self._decoder.decode(tail)
        self._shared = bool(self._decoder.getstate()[0])  # the character under way began in the prompt

    def feed(self, ids: Iterable[int]) -> str:
        shown = [i for i in ids if i not in self._skip] if self._skip else ids
        raw, self._started = self._token_bytes.join(shown, self._started)
        return self._take(self._decoder.decode(raw))

    def finish(self) -> str:
        return self._take(self._decoder.decode(b"", final=True))

    def _take(self, text: str) -> str:
        if not text or not self._shared:
            return text
        self._shared = False
        return text.removeprefix(_UNREADABLE)  # the prompt's own text ends with that one already


class WindowDetokenizer:
    """For decoders that look at neighbouring tokens: decodes the last few tokens again and returns the growth of their text.

    Exact for decoders that look back less than `CONTEXT` tokens. Ids that decode leaves out are not among them.
    """

    CONTEXT = 8  # tokens
    PATIENCE = 4  # tokens that may end in an unreadable character before it is taken to be meant

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool, spaces_between: bool) -> None:
        self._tokenizer = tokenizer
        self._flags = (skip_special, spaces_between)
        self._ids = self._spoken(prompt[-self.CONTEXT :])
        self._text = self._decode(self._ids)  # of the window
        self._told = len(self._text)
        self._waited = 0

    def feed(self, ids: Iterable[int]) -> str:
        return "".join([self._push(token_id) for token_id in self._spoken(ids)])

    def finish(self) -> str:
        rest = self._text[self._told :]
        self._told = len(self._text)
        return rest

    def _spoken(self, ids: Iterable[int]) -> list[int]:
        """Those that have a part in the text."""
        skip = self._tokenizer.special_ids if self._flags[0] else frozenset()
        return [i for i in ids if i not in skip and self._tokenizer.token(i)]

    def _push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if not text.startswith(self._text[: self._told]):
            self._told = _common_length(text, self._text[: self._told])
        self._text = text
        certain = max(self._told, self._certain(text))
        new = text[self._told : certain]
        self._told = certain
        if len(self._ids) > 2 * self.CONTEXT:
            self._shrink()
        return new

    def _certain(self, text: str) -> int:
        """How much of the window's text cannot change any more."""
        if text.endswith(_UNREADABLE) and self._waited < self.PATIENCE:
            self._waited += 1
            return len(text.rstrip(_UNREADABLE))
        self._waited = 0
        return len(text)

    def _shrink(self) -> None:
        untold = len(self._text) - self._told
        self._ids = self._ids[-self.CONTEXT :]
        self._text = self._decode(self._ids)
        self._told = max(0, len(self._text) - untold)

    def _decode(self, ids: list[int]) -> str:
        skip_special, spaces_between = self._flags
        return self._tokenizer.decode(ids, skip_special, spaces_between, clean_up_tokenization_spaces=False)


class CleanedDetokenizer:
    """A window's text, cleaned up. What is held back of the prompt's own text is returned only if it came out otherwise."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool, spaces_between: bool) -> None:
        near = prompt[-WindowDetokenizer.CONTEXT :]
        self._window = WindowDetokenizer(tokenizer, near, skip_special, spaces_between)
        self._cleaner = CleanUpStream()
        raw = tokenizer.decode(near, skip_special, spaces_between, clean_up_tokenization_spaces=False)
        cleaned = self._cleaner.feed(raw)
        self._prompt = clean_up(raw)[len(cleaned) :]

    def feed(self, ids: Iterable[int]) -> str:
        return self._take(self._cleaner.feed(self._window.feed(ids)))

    def finish(self) -> str:
        return self._take(self._cleaner.feed(self._window.finish()) + self._cleaner.finish())

    def _take(self, text: str) -> str:
        common = _common_length(text, self._prompt)
        self._prompt = self._prompt[common:] if common == len(text) else ""
        return text[common:]


def _common_length(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class StopStrings:
    """`include`: the stop string itself is part of the output."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include
        self._held = ""
        self._stopped_on: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that ended it, if one did. Text after the end is dropped."""
        if self._stopped_on is not None:
            return "", self._stopped_on
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            # every matcher must see the character, and the longest stop string comes first
            complete = [matcher.stop for matcher in self._matchers if matcher.advance(character)]
            if complete:
                self._held, self._stopped_on = "", complete[0]
                return pending[: end if self._include else end - len(complete[0])], complete[0]
        safe = len(pending) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = pending[safe:]
        return pending[:safe], None

    def finish(self) -> str:
        """The text is over: what was held back is text after all."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth-Morris-Pratt: `matched` is the length of the longest prefix of the stop string that the text ends with."""

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        self.stop = stop
        self.matched = 0
        self._borders = _borders(stop)

    def advance(self, character: str) -> bool:
        """Is the stop string complete with this character?"""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self.stop[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.stop)


def _borders(text: str) -> list[int]:
    """For every prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return borders


CONTEXT = 4  # tokens: no character has more bytes


class TokenTexts:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._whole: dict[int, str] = {}  # tokens that are text by themselves

    def of(self, token: int, before: Sequence[int]) -> str:
        """`before` are the tokens in front of it."""
        text = self._whole.get(token)
        if text is None:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
            if _UNREADABLE in text:
                return self._completed(token, before[-CONTEXT:]) if before else text.rstrip(_UNREADABLE)
            self._whole[token] = text
        return text

    def _completed(self, token: int, before: Sequence[int]) -> str:
        token_bytes = self._tokenizer.token_bytes
        if token_bytes is not None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            decoder.decode(token_bytes.context(before, frozenset())[0])
            return decoder.decode(token_bytes.join([token], started=True)[0]).rstrip(_UNREADABLE)
        known = self._decode(before).rstrip(_UNREADABLE)
        return self._decode([*before, token]).removeprefix(known).rstrip(_UNREADABLE)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
