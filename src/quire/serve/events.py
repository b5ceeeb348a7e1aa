"""The engine's outputs as events, the same for all protocols: text, reasoning and tool calls.

A stream sends the events one by one. Other answers combine them: to a `Message` in a chat, and to `Items` for
/v1/responses and /v1/messages. One item is open at a time; a stream sends the changes of items in order.
"""

import re
import secrets
import string
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from quire.serve.logprobs import TokenNames, token_logprobs
from quire.serve.protocol import ChatToken
from quire.text.pacing import Pace
from quire.text.parse.events import Event, Reasoning, Text, ToolArguments, ToolEnd, Tools, ToolStart
from quire.text.parse.format import Format
from quire.text.parse.machine import AnswerParser, joined
from quire.text.parse.values import escape
from quire.types.outputs import CompletionOutput, TokenLogprobs


class RepeatFilter:
    """Withhold a call while it equals the beginning of the call before it.

    A call that differs is passed on as soon as it does. A call with the same name and the same arguments is dropped, and
    `repeated` is set: nothing after it is worth generating. So is a call that the text breaks off before it differs.
    """

    def __init__(self) -> None:
        self.repeated = False
        self._previous: tuple[str, str] | None = None
        self._name = self._arguments = ""
        self._withheld: list[Event] = []

    def feed(self, event: Event) -> list[Event]:
        """Return the events that may be passed on now."""
        if isinstance(event, ToolStart):
            self._name, self._arguments = event.name, ""
        elif isinstance(event, ToolArguments):
            self._arguments += event.json
        elif not isinstance(event, ToolEnd):
            return [event]
        if not self._withheld and not isinstance(event, ToolStart):
            return self._passed(event)
        self._withheld.append(event)
        if not self._same_so_far(isinstance(event, ToolEnd) and event.complete):
            events, self._withheld = self._withheld, []
            return [*events[:-1], *self._passed(events[-1])]
        if isinstance(event, ToolEnd):
            self.repeated |= event.complete
            self._withheld = []
        return []

    def _same_so_far(self, complete: bool) -> bool:
        if self._previous is None or self._name != self._previous[0]:
            return False
        before = self._previous[1]
        return self._arguments == before if complete else before.startswith(self._arguments)

    def _passed(self, event: Event) -> list[Event]:
        if isinstance(event, ToolEnd):
            self._previous = (self._name, self._arguments)
        return [event]


_SHORT_ID = 9  # characters; templates of some families accept no other ids
_ALPHABET = string.ascii_letters + string.digits
_NAME_SO_FAR = re.compile(r'\[\s*\{\s*"name"\s*:\s*"([^"]*)("?)')  # of a call that a grammar writes


# of a call: its arguments are whole, the length cut it off, its arguments went wrong, or it was never more than a marker
Outcome = Literal["complete", "cut", "broken", "text"]


@dataclass(frozen=True)
class Reading:
    """How the answers to one request are to be read."""

    form: Format | None = None  # None: all of it is text
    tools: Tools | None = None
    inside: bool | None = None  # do they begin in the reasoning? None: the format says
    noise: frozenset[str] = frozenset()
    parallel: bool = True  # false: only the first call is reported
    with_reasoning: bool = True
    calls_finish: bool = True  # an answer with calls ends for that reason
    only_calls: bool = False  # the grammar allows nothing else, so anything else is a call that was cut off
    one_of_a_kind: bool = False  # a call that repeats the one before it is dropped, and ends the answer
    id_prefix: str = "chatcmpl-tool-"  # of calls
    begin_ids: tuple[int, ...] = ()  # of the mark that begins the reasoning
    end_id: int | None = None  # the token that ends it, where it is one
    on_call: Callable[[Outcome], None] | None = None  # called for every call, and for text that was mistaken for one

    def reader(self) -> "AnswerReader":
        return AnswerReader(self)

    @property
    def ends_early(self) -> bool:
        """Can an answer be complete before the model ends it?"""
        return self.tools is not None and (self.one_of_a_kind or not self.parallel)


class AnswerReader:
    """One answer."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._called = self._broke = False
        self._repeats = RepeatFilter() if reading.one_of_a_kind else None
        self._left_out = ""  # text in an answer that has only calls: a call that has not begun
        self._reasoned = False
        self.ended = False  # the answer is complete, whatever else the model writes
        self._tokens = 0
        self._reasoning_tokens: int | None = None
        self._parser = None
        if reading.form is not None:
            self._parser = AnswerParser(reading.form, tools=reading.tools, inside=reading.inside, noise=reading.noise)

    async def read(self, part: CompletionOutput, pace: Pace) -> list[Event]:
        """What is new in an output, which holds what is new since the last one."""
        if self._parser is None:
            return [Text(part.text)] if part.text else []
        if self.ended:
            return []
        if self._reasoning_tokens is None and self._reading.end_id is not None:
            self._count(part.token_ids)
        mistaken = self._parser.mistaken
        turns = self._parser.turns(part.text, last=part.finish_reason is not None)
        events = next(turns)
        for more in turns:
            await pace()
            events += more
        cut = part.finish_reason == "length"
        passed_on = self._filter_all(joined(events), cut)
        if self._reading.on_call is not None:
            for event in passed_on:
                if isinstance(event, ToolEnd):
                    self._reading.on_call("complete" if event.complete else "cut" if cut else "broken")
            for _ in range(self._parser.mistaken - mistaken):
                self._reading.on_call("cut" if cut else "text")
        return passed_on

    def finish_reason(self, part: CompletionOutput) -> str | None:
        """Return `tool_calls` if the arguments of all calls are complete, also where the length cut off what follows them."""
        if part.finish_reason in ("stop", "length") and self._called and not self._broke:
            return "tool_calls" if self._reading.calls_finish else "stop"
        return part.finish_reason

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning; known when the token that ends it has come."""
        return self._reasoning_tokens if self._reasoned else None

    def _count(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if token == self._reading.end_id:
                self._reasoning_tokens = self._tokens
                return
            self._tokens += (token,) != self._reading.begin_ids

    def _filter_all(self, events: list[Event], cut: bool) -> list[Event]:
        passed_on: list[Event] = []
        for event in events:
            for passed in [event] if self._repeats is None else self._repeats.feed(event):
                known = self._filter(passed)
                passed_on += [] if known is None else [known]
            self.ended |= self._repeats is not None and self._repeats.repeated
            if self.ended:
                return passed_on
        return passed_on + self._cut_call() if cut and not self._called and self._left_out else passed_on

    def _cut_call(self) -> list[Event]:
        """Return the call that was cut off before its arguments began, if its name is certain: only tools have names here."""
        found = _NAME_SO_FAR.search(self._left_out)
        written = "" if found is None else "".join(found.groups())
        names = [name for name in self._reading.tools or () if f'{escape(name)}"'.startswith(written)]
        events: list[Event] = [ToolStart(0, names[0]), ToolEnd(0, complete=False)] if len(names) == 1 else []
        return [known for event in events if (known := self._filter(event)) is not None]

    def _filter(self, event: Event) -> Event | None:
        if isinstance(event, Reasoning):
            self._reasoned = True
            return event if self._reading.with_reasoning else None
        if isinstance(event, Text):
            if not self._reading.only_calls:
                return event
            self._left_out += event.text
            return None
        if isinstance(event, ToolStart | ToolArguments | ToolEnd):
            if event.index and not self._reading.parallel:
                self.ended = True
                return None
            if isinstance(event, ToolStart):
                self._called = True
                return event if event.id is not None else msgspec.structs.replace(event, id=self._new_id())
            self._broke |= isinstance(event, ToolEnd) and not event.complete
        return event

    def _new_id(self) -> str:
        form = self._reading.form
        if form is not None and form.short_ids:
            return "".join(secrets.choice(_ALPHABET) for _ in range(_SHORT_ID))
        return f"{self._reading.id_prefix}{uuid.uuid4().hex}"


@dataclass
class MessageCall:
    id: str
    name: str
    arguments: str = ""
    complete: bool = False


@dataclass
class Message:
    """Events put together."""

    text: str = ""
    reasoning: str = ""
    calls: list[MessageCall] = field(default_factory=list)

    def add(self, events: Iterable[Event]) -> "Message":
        for event in events:
            match event:
                case Text(text):
                    self.text += text
                case Reasoning(text):
                    self.reasoning += text
                case ToolStart(_, name, own_id):
                    self.calls.append(MessageCall(own_id or "", name))
                case ToolArguments(index, piece):
                    self.calls[index].arguments += piece
                case ToolEnd(index, complete):
                    self.calls[index].complete = complete
        return self


# ---- items

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
    """The tokens of one answer that no piece of text has matched yet.

    The parser reports pieces of text, reasoning and tool calls, but not the tokens they came from. The tokens of a piece are
    found by their bytes: pieces appear in the answer in order, so each is searched for after the one before it.
    """

    def __init__(self, names: TokenNames, top: int) -> None:
        """`top`: alternatives per token."""
        self._names, self._top = names, top
        self._bytes = bytearray()
        self._tokens: list[tuple[int, int, TokenLogprobs | None]] = []  # where its bytes end, token id, logprobs

    async def take(self, part: CompletionOutput, grown: Sequence[ItemGrown], pace: Pace) -> list[list[ChatToken]]:
        """Return the tokens of every piece, given the output that completed these pieces. Only pieces of text have any.

        A token that spans two pieces belongs to the first.
        """
        for token, chances in zip(part.token_ids, part.logprobs or (), strict=False):
            await pace()
            self._bytes += bytes(self._names.spelling(token) or ())
            self._tokens.append((len(self._bytes), token, chances))
        found: list[list[ChatToken]] = []
        done = 0
        for piece, (start, end) in zip(grown, self._spans(grown), strict=True):
            matched: list[ChatToken] = []
            while done < len(self._tokens) and self._begin(done) < end:
                stop, token, chances = self._tokens[done]
                if stop > start and piece.item.kind == "text":
                    await pace()
                    matched.append(token_logprobs(token, chances, self._names, self._top))
                done += 1
            found.append(matched)
        self._drop(done)
        return found

    def _spans(self, grown: Sequence[ItemGrown]) -> list[tuple[int, int]]:
        """Return the bytes of every piece. The search begins at the end, where the parser is, so that markers between pieces
        (`</think>`) are not taken for text.
        """
        spans: list[tuple[int, int]] = []
        end = len(self._bytes)
        for piece in reversed(grown):
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
