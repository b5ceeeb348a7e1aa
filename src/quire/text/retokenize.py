"""A text that grows, in the tokens of another vocabulary, and what should come next, back in its own.

    tokens     "Once" " upon" " a"             the text's own
    ids        "On" "ce" " up" "on" " a"       the same text as another model reads it
    guesses    " ti" "me" ","                  of that model
    drafts     " time" ","                     what the text's own tokens for it are

Of a long text only the end is encoded again when it has grown: what lies before is cut where a word begins. Where none
does for long (Chinese, say), it is cut behind a mark, or anywhere: the other model reads that place a little differently.
"""

from collections.abc import Sequence
from functools import lru_cache

from quire.text.detokenizer import Detokenizer
from quire.text.tokenizer import Tokenizer

KEPT = 128  # characters at the end of the text that are encoded again
PIECE = 1024  # characters that are encoded at once, where a word begins
LONGEST = 4  # tokens that one character may be spread over
MOST_EACH, MORE = 6, 64  # tokens of each character, and beyond: of text that another tokenizer writes out
FAR_TOO_MANY = 64  # tokens of each character: of that nothing more is encoded
TRIED = 64  # characters at most that are encoded for the first time
MOST_GUESSED = 64  # characters of each guess
ANCHOR = "\n"  # nothing is joined with it to one token but other white space
_UNREADABLE = "\ufffd"


class Rewording:
    def __init__(self, own: Tokenizer, other: Tokenizer, rows: int = 1 << 62) -> None:
        """`rows`: of the other model's embedding, which its tokenizer need not know."""
        self._own, self._other, self._rows = own, other, rows
        self._beyond = False  # has the text tokens that its model does not have, or far more than characters?
        self._detokenizer = Detokenizer(own, skip_special_tokens=False)
        self._fed = 0  # of its tokens
        self._settled: list[int] = []  # ids of what is not encoded again
        self._tail = ""  # the text behind that
        self._tried = 1  # characters that are tried next

    def read(self, tokens: Sequence[int]) -> list[int] | None:
        """The whole text, of which nothing changes but that it grows -> ids. None: it ends within a character, has a token that
        the other model does not have, or characters that its tokenizer makes a great many tokens of."""
        if self._beyond:
            return None
        fresh = tokens[self._fed :]
        if not self._fed and len(fresh) and fresh[0] == self._own.bos_token_id:
            fresh = fresh[1:]  # the other has its own
        text = self._detokenizer.feed(fresh)
        self._fed = len(tokens)
        self._beyond = self._explodes(text)
        if self._beyond:
            return None
        self._tail += text
        while (cut := _find_cut(self._tail)) > 0:
            passed = self._encode(self._tail[:cut])
            self._beyond |= max(passed, default=0) >= self._rows
            if self._beyond:
                return None
            self._settled += passed
            self._tail = self._tail[cut:]
        if self._own.decode(tokens[-LONGEST:], skip_special_tokens=False).endswith(_UNREADABLE):
            return None
        ids = self._encode(self._tail)
        return None if self._beyond or max(ids, default=0) >= self._rows else self._settled + ids

    def _explodes(self, text: str) -> bool:
        """Does its tokenizer write far more tokens than characters? Estimated from a few first, then by more, so that little is
        written if so."""
        at = 0
        while at < len(text):
            piece = text[at : at + self._tried]
            if len(self._other.encode(piece, add_special_tokens=False)) > FAR_TOO_MANY * len(piece) + MORE:
                return True
            at += len(piece)
            self._tried = min(2 * self._tried, TRIED)
        return False

    def _encode(self, text: str) -> list[int]:
        ids = encode_behind(self._other, text) if self._settled else self._other.encode(text)
        self._beyond |= len(ids) > MOST_EACH * len(text) + MORE
        return ids

    def translate(self, tokens: Sequence[int], ids: Sequence[int], guesses: Sequence[int]) -> list[int]:
        """Guesses behind the ids -> tokens behind the tokens, of all characters that are whole."""
        text = Detokenizer(self._other, ids[-LONGEST:]).feed(guesses)[: MOST_GUESSED * len(guesses)]
        if not text:
            return []
        last = self._own.decode(tokens[-1:], skip_special_tokens=False)
        together = self._own.encode(last + text, add_special_tokens=False)
        if last and together[:1] == [tokens[-1]]:
            return together[1:]
        return encode_behind(self._own, text)


def _find_cut(text: str) -> int:
    """How much of it need not be encoded again; 0 = all must be."""
    last = min(len(text) - KEPT, PIECE)
    if last <= KEPT:
        return 0
    if (blank := text.rfind(" ", 1, last)) > max(0, last - 3 * KEPT):
        return blank
    if last <= 3 * KEPT:
        return 0
    marks = (at for at in range(last, last - KEPT, -1) if text[at].isalnum() and not text[at - 1].isalnum())
    return next(marks, last)


@lru_cache(4)
def _anchor(tokenizer: Tokenizer) -> list[int]:
    return tokenizer.encode(ANCHOR, add_special_tokens=False)


def encode_behind(tokenizer: Tokenizer, text: str) -> list[int]:
    """As it is encoded within a text: some put a blank before the first word."""
    anchor = _anchor(tokenizer)
    ids = tokenizer.encode(ANCHOR + text, add_special_tokens=False)
    return ids[len(anchor) :] if ids[: len(anchor)] == anchor else tokenizer.encode(text, add_special_tokens=False)
