"""A model with another vocabulary drafts: it reads the text in its own tokens and goes on, and what it says is encoded in the
tokens of the model it drafts for.

It is an engine of its own, in this process, with a cache of its own. All texts of a step are gone on with together. Every one
of its requests is a fork of the one before for the same text, whose pages are held: what it has read is not run again.
"""

import logging
from collections.abc import Mapping, Sequence

from quire.engine.core import EngineCore
from quire.sched.draft.drafters import Text
from quire.text.retokenize import Rewording
from quire.text.tokenizer import Tokenizer
from quire.types.errors import EngineDead
from quire.types.request import EngineRequest
from quire.types.sampling import SamplingParams

logger = logging.getLogger(__name__)


class Reader:
    """One text, as the other model reads it."""

    def __init__(self, rewording: Rewording) -> None:
        self.rewording = rewording
        self.turns = 0
        self.latest: str | None = None  # of its requests: its pages are held


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
        """`core`: of the model that drafts, for texts of up to `length` of its tokens, which `ends` end. `tokenizers` and
        `vocabularies`: of the model it drafts for, and its own. `end` is the draft that stands for the end."""
        self._core, self._length, self._ends = core, length, ends
        self._tokenizers, self._end = tokenizers, end
        self._vocabulary, self._rows = vocabularies
        self._readers: dict[str, Reader] = {}
        self._forgotten: list[str] = []  # held for requests that go on from them
        self._broken = False

    def propose_all(self, texts: Mapping[str, Text], most: int) -> Mapping[str, Sequence[int]]:
        """Up to `most` tokens behind each text. Whatever goes wrong is told once, and then there are no drafts any more."""
        if self._broken:
            return {}
        try:
            return self._propose_all(texts, most)
        except EngineDead:
            raise
        except Exception:
            logger.exception("the draft model failed; there are no drafts any more")
            self._broken = True
            return {}

    def leave(self, name: str) -> None:
        """The text is complete, or was given up."""
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
                reader = self._readers[name] = Reader(Rewording(*self._tokenizers, self._rows))
            ids = reader.rewording.read(text.tokens)
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
            tokens = self._readers[name].rewording.translate(texts[name].tokens, ids, said[:-1] if ended else said)
            if ended and self._end is not None:
                tokens.append(self._end)
            drafts[name] = [token for token in tokens if token < self._vocabulary][:most]
        return drafts

    def _ask(self, name: str, reader: Reader, ids: list[int], scope: tuple[str, ...], most: int) -> str:
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
