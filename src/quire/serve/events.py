"""The engine's outputs as events, for every protocol alike: text, reasoning and tool calls, as they come or put together.

A streamed answer is its events written one by one; one that is not streamed is the same events folded (`Message`).
"""

import re
import secrets
import string
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from quire.paced import Pace
from quire.text.parse.call import Tools
from quire.text.parse.events import Event, Reasoning, Text, ToolArguments, ToolEnd, ToolStart
from quire.text.parse.format import Format
from quire.text.parse.machine import AnswerParser, joined
from quire.text.parse.values import escape
from quire.types.outputs import CompletionOutput


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
        self._thought: int | None = None
        self._parser = None
        if reading.form is not None:
            self._parser = AnswerParser(reading.form, tools=reading.tools, inside=reading.inside, noise=reading.noise)

    async def read(self, part: CompletionOutput, pace: Pace) -> list[Event]:
        """What is new in an output, which holds what is new since the last one."""
        if self._parser is None:
            return [Text(part.text)] if part.text else []
        if self.ended:
            return []
        if self._thought is None and self._reading.end_id is not None:
            self._count(part.token_ids)
        mistaken = self._parser.mistaken
        turns = self._parser.turns(part.text, last=part.finish_reason is not None)
        events = next(turns)
        for more in turns:
            await pace()
            events += more
        cut = part.finish_reason == "length"
        kept = self._keep_all(joined(events), cut)
        if self._reading.on_call is not None:
            for event in kept:
                if isinstance(event, ToolEnd):
                    self._reading.on_call("complete" if event.complete else "cut" if cut else "broken")
            for _ in range(self._parser.mistaken - mistaken):
                self._reading.on_call("cut" if cut else "text")
        return kept

    def finish_reason(self, part: CompletionOutput) -> str | None:
        """Return `tool_calls` if the arguments of all calls are complete, also where the length cut off what follows them."""
        if part.finish_reason in ("stop", "length") and self._called and not self._broke:
            return "tool_calls" if self._reading.calls_finish else "stop"
        return part.finish_reason

    @property
    def thought(self) -> int | None:
        """Tokens of the reasoning; known when the token that ends it has come."""
        return self._thought if self._reasoned else None

    def _count(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            if token == self._reading.end_id:
                self._thought = self._tokens
                return
            self._tokens += (token,) != self._reading.begin_ids

    def _keep_all(self, events: list[Event], cut: bool) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            for passed in [event] if self._repeats is None else self._repeats.feed(event):
                known = self._keep(passed)
                kept += [] if known is None else [known]
            self.ended |= self._repeats is not None and self._repeats.repeated
            if self.ended:
                return kept
        return kept + self._cut_call() if cut and not self._called and self._left_out else kept

    def _cut_call(self) -> list[Event]:
        """Return the call that was cut off before its arguments began, if its name is certain: only tools have names here."""
        found = _NAME_SO_FAR.search(self._left_out)
        written = "" if found is None else "".join(found.groups())
        names = [name for name in self._reading.tools or () if f'{escape(name)}"'.startswith(written)]
        events: list[Event] = [ToolStart(0, names[0]), ToolEnd(0, complete=False)] if len(names) == 1 else []
        return [known for event in events if (known := self._keep(event)) is not None]

    def _keep(self, event: Event) -> Event | None:
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
