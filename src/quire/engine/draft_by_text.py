"""Draft with a model that has another vocabulary: it reads the text in its own tokens, and its answer is encoded in the
target's.

It is an engine in this process, with its own KV cache. All texts of a step are drafted in one batch. Each of its requests is a
fork of the previous one for the same text, whose pages are held: nothing is run twice.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache

from quire.engine.core import EngineCore
from quire.sched.draft.drafters import Text
from quire.text.detokenizer import new_detokenizer
from quire.text.tokenizer import Tokenizer
from quire.types.errors import EngineDead
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

logger = logging.getLogger(__name__)


# ---- retokenization
#
#     tokens     "Once" " upon" " a"             the text's own
#     ids        "On" "ce" " up" "on" " a"       the same text as the draft model reads it
#     guesses    " ti" "me" ","                  of the draft model
#     drafts     " time" ","                     the guesses in the text's own tokens
#
# When the text grows, only its end is encoded again: the text is cut where a word begins, or at a punctuation mark. Without
# either for long (Chinese, say) it is cut anywhere; the draft model then reads the text at the cut a little differently.

KEPT = 128  # characters at the end of the text that are encoded again
PIECE = 1024  # characters that are encoded at once, where a word begins
LONGEST = 4  # tokens that one character may be spread over
MAX_EACH, MORE = 6, 64  # tokens of each character, and beyond: of text that another tokenizer writes out
FAR_TOO_MANY = 64  # tokens of each character: of that nothing more is encoded
TRIED = 64  # characters at most that are encoded for the first time
MAX_GUESSED = 64  # characters of each guess
ANCHOR = "\n"  # nothing is joined with it to one token but other white space
_UNREADABLE = "\ufffd"


class Retokenizer:
    def __init__(self, own: Tokenizer, other: Tokenizer, rows: int = 1 << 62) -> None:
        """`rows`: of the other model's embedding, which its tokenizer need not know."""
        self._own, self._other, self._rows = own, other, rows
        self._beyond = False  # has the text tokens that its model does not have, or far more than characters?
        self._detokenizer = new_detokenizer(own, skip_special_tokens=False)
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
        self._beyond |= len(ids) > MAX_EACH * len(text) + MORE
        return ids

    def translate(self, tokens: Sequence[int], ids: Sequence[int], guesses: Sequence[int]) -> list[int]:
        """Guesses behind the ids -> tokens behind the tokens, of all characters that are whole."""
        text = new_detokenizer(self._other, ids[-LONGEST:]).feed(guesses)[: MAX_GUESSED * len(guesses)]
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


# ---- drafting


class TextReader:
    """One text in the tokens of the draft model."""

    def __init__(self, retokenizer: Retokenizer) -> None:
        self.retokenizer = retokenizer
        self.turns = 0
        self.latest: str | None = None  # request, whose pages are held


class TextDrafter:
    def __init__(
        self,
        core: EngineCore,
        length: int,
        ends: frozenset[int],
        tokenizers: tuple[Tokenizer, Tokenizer],
        vocabularies: tuple[int, int],
        end: int | None,
    ) -> None:
        """core: engine of the draft model, for texts of up to `length` of its tokens.
        ends: its end-of-sequence ids.
        tokenizers, vocabularies: of the target model and of the draft model.
        end: the draft token that stands for the end.
        """
        self._core, self._length, self._ends = core, length, ends
        self._tokenizers, self._end = tokenizers, end
        self._vocabulary, self._rows = vocabularies
        self._readers: dict[str, TextReader] = {}
        self._forgotten: list[str] = []  # previous requests, held until their forks have started
        self._broken = False

    def propose_all(self, texts: Mapping[str, Text], most: int) -> Mapping[str, Sequence[int]]:
        """Return up to `most` draft tokens for each text. After an error, which is logged, there are no drafts any more."""
        if self._broken:
            return {}
        try:
            return self._propose_all(texts, most)
        except EngineDead:
            raise
        except Exception:
            logger.exception("the draft model failed; requests run without drafts from now on")
            self._broken = True
            return {}

    def leave(self, name: str) -> None:
        """Release a text that is complete or aborted."""
        reader = self._readers.pop(name, None)
        if reader is not None and reader.latest is not None:
            self._core.release([reader.latest])

    def idle(self) -> bool:
        return self._core.idle()

    def close(self) -> None:
        self._readers.clear()
        self._core.stop()

    def _propose_all(self, texts: Mapping[str, Text], most: int) -> dict[str, Sequence[int]]:
        asked: dict[str, tuple[str, list[int]]] = {}
        for name, text in texts.items():
            reader = self._readers.get(name)
            if reader is None:
                reader = self._readers[name] = TextReader(Retokenizer(*self._tokenizers, self._rows))
            ids = reader.retokenizer.read(text.tokens)
            if ids and len(ids) + most <= self._length:
                asked[self._ask(name, reader, ids, text.scope, most)] = name, ids
        guesses: dict[str, list[int]] = {request: [] for request in asked}
        while self._core.has_unfinished:
            for delta in self._core.step():
                guesses[delta.request_id] += delta.token_ids
        self._core.release(self._forgotten)
        self._forgotten = []
        drafts: dict[str, Sequence[int]] = {}
        for request, (name, ids) in asked.items():
            said, ended = guesses[request], bool(guesses[request]) and guesses[request][-1] in self._ends
            tokens = self._readers[name].retokenizer.translate(texts[name].tokens, ids, said[:-1] if ended else said)
            if ended and self._end is not None:
                tokens.append(self._end)
            drafts[name] = [token for token in tokens if token < self._vocabulary][:most]
        return drafts

    def _ask(self, name: str, reader: TextReader, ids: list[int], scope: tuple[str, ...], most: int) -> str:
        before, reader.turns = reader.latest, reader.turns + 1
        reader.latest = f"{name} {reader.turns}"
        params = SamplingParams(temperature=0, max_tokens=most)
        self._core.add(
            EngineRequest(
                reader.latest, tuple(ids), params, 0, self._ends, self._ends, 0.0, salt=scope, fork_of=before, hold=True
            )
        )
        if before is not None:
            self._forgotten.append(before)
        return reader.latest
