"""Events as a sequence of items, for Anthropic's and OpenAI's newer protocol: pieces of text, of reasoning, and tool calls.

One item is open at a time. The changes, in order, are what a stream sends; the items are the whole answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from quire.paced import Pace
from quire.serve.logprobs import TokenNames, token_logprobs
from quire.serve.protocol import ChatToken
from quire.text.parse.events import Event, Reasoning, Text, ToolArguments, ToolEnd, ToolStart
from quire.types.outputs import CompletionOutput, TokenLogprobs

Kind = Literal["text", "reasoning", "call"]


@dataclass
class Item:
    kind: Kind
    text: str = ""  # of a call: its arguments, JSON
    name: str = ""  # of a call
    id: str = ""  # of a call
    complete: bool = True


@dataclass(frozen=True)
class ItemOpened:
    index: int
    item: Item


@dataclass(frozen=True)
class ItemGrown:
    index: int
    item: Item
    piece: str


@dataclass(frozen=True)
class ItemClosed:
    index: int
    item: Item


Change = ItemOpened | ItemGrown | ItemClosed


@dataclass
class Items:
    items: list[Item] = field(default_factory=list)
    _open: bool = False

    def add(self, events: Iterable[Event]) -> list[Change]:
        changes: list[Change] = []
        for event in events:
            match event:
                case Text(text):
                    self._prose("text", text, changes)
                case Reasoning(text):
                    self._prose("reasoning", text, changes)
                case ToolStart(_, name, call_id):
                    self._start(Item("call", name=name, id=call_id or ""), changes)
                case ToolArguments(_, piece):
                    self._grow(piece, changes)
                case ToolEnd(_, complete):
                    self.items[-1].complete = complete
                    changes += self.close()
        return changes

    def cut(self) -> list[Change]:
        """The length ended the answer: the item it was in is incomplete, and where there is no item, so is an empty text."""
        changes: list[Change] = []
        if not self.items:
            self._start(Item("text"), changes)
        self.items[-1].complete &= not self._open
        return changes + self.close()

    def close(self) -> list[Change]:
        """Nothing more comes, or something else."""
        if not self._open:
            return []
        self._open = False
        return [ItemClosed(len(self.items) - 1, self.items[-1])]

    @property
    def calls(self) -> bool:
        """Are there calls, all of them whole?"""
        calls = [item for item in self.items if item.kind == "call"]
        return bool(calls) and all(item.complete for item in calls)

    @property
    def reasoning(self) -> str:
        return "".join(item.text for item in self.items if item.kind == "reasoning")

    def _prose(self, kind: Kind, text: str, changes: list[Change]) -> None:
        if not self._open or self.items[-1].kind != kind:
            # the line end that parts it from earlier text means nothing where that is another item
            text = text.removeprefix("\n") if any(item.kind == kind for item in self.items) else text
            self._start(Item(kind), changes)
        self._grow(text, changes)

    def _start(self, item: Item, changes: list[Change]) -> None:
        changes += self.close()
        self.items.append(item)
        self._open = True
        changes.append(ItemOpened(len(self.items) - 1, item))

    def _grow(self, piece: str, changes: list[Change]) -> None:
        item = self.items[-1]
        item.text += piece
        if piece:
            changes.append(ItemGrown(len(self.items) - 1, item, piece))


class TextLogprobs:
    """The tokens of one answer that no piece of text has claimed yet.

    The parser reports pieces of text, reasoning and tool calls, but not the tokens they came from. The tokens of a piece are
    found by their bytes: pieces appear in the answer in order, so each is searched for after the one before it.
    """

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
