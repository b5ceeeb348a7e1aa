"""Logprobs of the tokens that make up the text of an answer, for protocols that split an answer into items.

The parser reports pieces of text, reasoning and tool calls, but not which tokens they came from. The tokens of a piece are
found by their bytes: pieces appear in the answer in order, so each is searched for after the one before it.
"""

from collections.abc import Sequence

from quire.paced import Pace
from quire.serve.items import ItemGrown
from quire.serve.logprobs import TokenNames, token_logprobs
from quire.serve.protocol.chat import ChatToken
from quire.types.outputs import CompletionOutput, TokenLogprobs


class TextLogprobs:
    """The tokens of one answer that no piece of text has claimed yet."""

    def __init__(self, names: TokenNames, top: int) -> None:
        """`top`: alternatives per token."""
        self._names, self._top = names, top
        self._bytes = bytearray()
        self._tokens: list[tuple[int, int, TokenLogprobs | None]] = []  # where its bytes end, token id, logprobs

    async def take(self, part: CompletionOutput, pieces: Sequence[ItemGrown], pace: Pace) -> list[list[ChatToken]]:
        """Return the tokens of every piece, given the output that completed these pieces. Only pieces of text have any.

        A token that spans two pieces belongs to the first.
        """
        for token, chances in zip(part.token_ids, part.logprobs or (), strict=False):
            await pace()
            self._bytes += bytes(self._names.spelling(token) or ())
            self._tokens.append((len(self._bytes), token, chances))
        found: list[list[ChatToken]] = []
        done = 0
        for piece, (start, end) in zip(pieces, self._spans(pieces), strict=True):
            claimed: list[ChatToken] = []
            while done < len(self._tokens) and self._begin(done) < end:
                stop, token, chances = self._tokens[done]
                if stop > start and piece.item.kind == "text":
                    await pace()
                    claimed.append(token_logprobs(token, chances, self._names, self._top))
                done += 1
            found.append(claimed)
        self._drop(done)
        return found

    def _spans(self, pieces: Sequence[ItemGrown]) -> list[tuple[int, int]]:
        """Return the bytes of every piece. The search begins at the end, where the parser is, so that markers between pieces
        (`</think>`) are not taken for text.
        """
        spans: list[tuple[int, int]] = []
        end = len(self._bytes)
        for piece in reversed(pieces):
            text = piece.piece.encode(errors="replace")
            start = self._bytes.rfind(text, 0, end)
            if start >= 0:
                spans.append((start, start + len(text)))
                end = start
            elif piece.item.kind == "text":  # invalid UTF-8 is shown as U+FFFD, which the tokens' bytes do not contain
                spans.append((0, end))
                end = 0
            else:  # arguments of tool calls may be written anew
                spans.append((end, end))
        return spans[::-1]

    def _begin(self, i: int) -> int:
        return self._tokens[i - 1][0] if i else 0

    def _drop(self, count: int) -> None:
        cut = self._begin(count)
        del self._bytes[:cut]
        self._tokens = [(end - cut, token, chances) for end, token, chances in self._tokens[count:]]
