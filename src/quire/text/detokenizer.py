"""Token ids in, text out, as it comes.

The law: everything `feed` returned plus what `finish` returns is

    decode(output)                                   without a prompt
    decode(prompt + output) less decode(prompt)      with one: what remains after the longest prefix both have in common

with the same flags. So a continuation keeps the space it begins with, and a character whose first bytes end the prompt
appears whole in the output. Never is half a character told: at most the three bytes of an unfinished one are held back.
Each token costs the same, however long the text is.
"""

import codecs
from collections.abc import Iterable, Sequence

from quire.text.clean_up import CleanUpStream, clean_up
from quire.text.pieces import TokenBytes
from quire.text.tokenizer import Tokenizer

_UNREADABLE = "\ufffd"


class Detokenizer:
    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        pieces = tokenizer.pieces
        self._stream: _PieceStream | _WindowStream | _CleanedStream
        if pieces is not None:
            skip = tokenizer.special_ids if skip_special_tokens else frozenset()
            self._stream = _PieceStream(pieces, prompt, skip)
        else:
            stream = _CleanedStream if tokenizer.cleans_up else _WindowStream
            self._stream = stream(tokenizer, prompt, skip_special_tokens, spaces_between_special_tokens)

    def feed(self, ids: Iterable[int]) -> str:
        """The text that is new and certain."""
        return self._stream.feed(ids)

    def finish(self) -> str:
        """No more tokens come: the rest of the text."""
        return self._stream.finish()


class _PieceStream:
    """For tokenizers whose tokens are bytes: a text is their concatenation."""

    def __init__(self, pieces: TokenBytes, prompt: Sequence[int], skip: frozenset[int]) -> None:
        self._pieces = pieces
        self._skip = skip
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail, self._started = pieces.context(prompt, skip)
        self._decoder.decode(tail)
        self._shared = bool(self._decoder.getstate()[0])  # the character under way began in the prompt

    def feed(self, ids: Iterable[int]) -> str:
        kept = [i for i in ids if i not in self._skip] if self._skip else ids
        raw, self._started = self._pieces.join(kept, self._started)
        return self._take(self._decoder.decode(raw))

    def finish(self) -> str:
        return self._take(self._decoder.decode(b"", final=True))

    def _take(self, text: str) -> str:
        if not text or not self._shared:
            return text
        self._shared = False
        return text.removeprefix(_UNREADABLE)  # the prompt's own text ends with that one already


class _WindowStream:
    """For decoders that look at neighbouring tokens: decodes the last few tokens again and tells what came to their text.

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


class _CleanedStream:
    """A window's text, cleaned up. What is held back of the prompt's own text is told only if it came out otherwise."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], skip_special: bool, spaces_between: bool) -> None:
        near = prompt[-_WindowStream.CONTEXT :]
        self._window = _WindowStream(tokenizer, near, skip_special, spaces_between)
        self._cleaner = CleanUpStream()
        raw = tokenizer.decode(near, skip_special, spaces_between, clean_up_tokenization_spaces=False)
        told = self._cleaner.feed(raw)
        self._prompt = clean_up(raw)[len(told) :]

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
