"""Follow EBNF grammars with xgrammar (`structured_outputs_config.backend = "xgrammar"`).

All other constraints stay with llguidance. xgrammar ignores JSON schema keywords that it does not know without reporting them,
and `schema.py` promises to report every keyword that is not enforced. It compiles ten thousand choices in seconds.
"""

import ctypes
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xgrammar

from quire.features.structured.grammar.backend import GrammarError, Matcher
from quire.features.structured.grammar.ebnf import is_ebnf
from quire.features.structured.grammar.llguidance import LLGuidance, TokenSpelling
from quire.text.tokenizer import Tokenizer
from quire.types.structured import StructuredOutputsParams

EBNF = "ebnf:"  # prefix of a source that xgrammar loads; every other source is llguidance's
Mask = npt.NDArray[np.int32]


class XGrammarMatcher:
    """The state of one text.

    known: mask of the tokens that have a text or end one, [words]
    ends: mask of the end-of-text tokens, [words]
    """

    def __init__(self, matcher: xgrammar.GrammarMatcher, known: Mask, ends: Mask) -> None:
        self.matcher, self._known, self._ends = matcher, known, ends
        self._rejected = 0  # tokens from the first one that the grammar does not allow
        self.error: str | None = None

    def copy(self) -> "XGrammarMatcher":
        made = XGrammarMatcher(self.matcher.fork(), self._known, self._ends)
        made._rejected, made.error = self._rejected, self.error
        return made

    def accept(self, tokens: Sequence[int]) -> None:
        for i, token in enumerate(tokens):
            if self.error is not None or not self.matcher.accept_token(token):
                self.error = self.error or f"token {token} is not allowed by the grammar"
                self._rejected += len(tokens) - i
                return

    def valid(self, tokens: Sequence[int]) -> int:
        count = 0
        while count < len(tokens) and self.error is None and self.matcher.accept_token(tokens[count]):
            count += 1
        if count:
            self.matcher.rollback(count)
        return count

    def rollback(self, count: int) -> None:
        rejected = min(count, self._rejected)
        self._rejected -= rejected
        if not self._rejected:
            self.error = None
        if count > rejected:
            self.matcher.rollback(count - rejected)

    def forced(self) -> list[int]:
        return []  # xgrammar reports forced text, which several tokens may spell

    @property
    def done(self) -> bool:
        if self.error is not None or not self.matcher.is_completed():
            return self.error is None and self.matcher.is_terminated()
        mask = np.zeros((1, len(self._ends)), np.int32)
        self.fill(mask, 0)
        return bool((mask[0] == self._ends).all())

    def fill(self, masks: Mask, row: int) -> None:
        """Write the mask of the next token to row `row` of masks [rows, words]."""
        if self.matcher.is_terminated():
            masks[row] = self._ends
        elif self.error is None:
            self.matcher.fill_next_token_bitmask(masks, row)
            masks[row] &= self._known  # xgrammar sets the bits beyond the vocabulary


class XGrammar:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._guidance = LLGuidance(tokenizer, vocab_size, eos_ids)
        self.words, self.eos_ids = self._guidance.words, self._guidance.eos_ids
        spelling = TokenSpelling(tokenizer, vocab_size, eos_ids)
        special = frozenset(spelling.special_token_ids)
        vocabulary = [b"" if i in special else piece for i, piece in enumerate(spelling.tokens)]  # xgrammar never allows b""
        info = xgrammar.TokenizerInfo(vocabulary, vocab_size=vocab_size, stop_token_ids=list(self.eos_ids))
        # one thread: the process forks a child for every new grammar; the worker keeps compiled grammars itself
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        known = np.array([bool(piece) for piece in vocabulary] + [False] * (-vocab_size % 32))
        ends = np.zeros_like(known)
        ends[list(self.eos_ids)] = True
        self._known, self._ends = (np.packbits(bits, bitorder="little").view(np.int32) for bits in (known | ends, ends))

    def translate(self, params: StructuredOutputsParams) -> str:
        if params.grammar is not None and is_ebnf(params.grammar):
            return EBNF + params.grammar
        return self._guidance.translate(params)

    def load(self, source: str) -> Matcher:
        if not source.startswith(EBNF):
            return self._guidance.load(source)
        try:
            compiled = self._compiler.compile_grammar(source[len(EBNF) :])
        except RuntimeError as error:
            raise GrammarError(_message(str(error))) from None
        matcher = XGrammarMatcher(xgrammar.GrammarMatcher(compiled), self._known, self._ends)
        mask = np.zeros((1, self.words), np.int32)
        matcher.fill(mask, 0)
        if not mask.any():
            raise GrammarError("the grammar leads nowhere: no text fits it")
        return matcher

    def fill(self, rows: Sequence[tuple[Matcher, int]], address: int, room: int) -> None:
        masks: Mask = np.ctypeslib.as_array((ctypes.c_int32 * (room * self.words)).from_address(address)).reshape(
            room, self.words
        )
        for matcher, row in rows:
            if isinstance(matcher, XGrammarMatcher):
                matcher.fill(masks, row)
        others = [(matcher, row) for matcher, row in rows if not isinstance(matcher, XGrammarMatcher)]
        if others:
            self._guidance.fill(others, address, room)


def _message(error: str) -> str:
    """Return xgrammar's message without its time stamp and source file."""
    return error.strip().split(": ", 1)[-1]
