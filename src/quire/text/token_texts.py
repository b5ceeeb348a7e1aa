"""Single tokens as text, for logprobs. A character may be spread over tokens: it is told by the one that completes it.

    "☃" as <e2> <98> <83>   ->   ""  ""  "☃"

Bytes that no character is made of are told as nothing, too, as vLLM does.
"""

import codecs
from collections.abc import Sequence

from quire.text.tokenizer import Tokenizer

CONTEXT = 4  # tokens: no character has more bytes
_UNREADABLE = "\ufffd"


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
        pieces = self._tokenizer.pieces
        if pieces is not None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            decoder.decode(pieces.context(before, frozenset())[0])
            return decoder.decode(pieces.join([token], started=True)[0]).rstrip(_UNREADABLE)
        known = self._decode(before).rstrip(_UNREADABLE)
        return self._decode([*before, token]).removeprefix(known).rstrip(_UNREADABLE)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)
