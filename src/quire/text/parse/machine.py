"""The machine: an answer as text, in pieces of any size; events out, the same whatever the pieces were.

    text ──begin of thinking──► reasoning ──end──► text ──begin of calls──► call, call ... ──end──► text

It holds back only what may still turn out to be part of a marker, and space in front of it: space beside a marker belongs to
the marker, and where text goes on after markers it goes on in a new line. A call whose text is not what the format says is
text after all, marker included, as long as its arguments have not begun; after that the call is broken off where it went
wrong, and what follows is text.
"""

import re

from quire.text.parse.call import Call, Tools
from quire.text.parse.events import Event, Reasoning, Text, ToolArguments
from quire.text.parse.format import Calls, Channels, Format, Thinking
from quire.text.parse.parts import Json, Known, Part
from quire.text.parse.source import Malformed, Marks, Pull, Source, marks_of

LONGEST_HEADER = 512

_Prose = type[Text] | type[Reasoning]


class Parser:
    """`tools`: the request's; None: what looks like a call is text. `inside`: does the answer begin in the reasoning?

    None leaves that to the format. `noise`: strings to be left out of text, as special tokens are.
    """

    def __init__(
        self, form: Format, *, tools: Tools | None = None, inside: bool | None = None, noise: frozenset[str] = frozenset()
    ) -> None:
        self._tools = tools
        self._calls: tuple[Calls, ...] = () if tools is None else form.calls
        self._noise = noise.union(form.noise)
        self._source = Source()
        self._events: list[Event] = []
        self._said: set[_Prose] = set()  # what there has been some of
        self._opening = True  # nothing but reasoning has come so far
        self._after_mark = False  # space that comes now belongs to the marker before it
        self._gap = ""  # space in front of the latest marker
        self._owed = ""  # the end of calls that went wrong: it may still come
        self._count = 0
        self.mistaken = 0  # markers of calls that no call followed
        self._over = False
        self._reading = (
            self._read_answer(form.thinking, inside) if form.channels is None else self._read_channels(form.channels)
        )
        self._resume()

    def feed(self, text: str) -> list[Event]:
        if text:
            self._source.add(text)
            self._resume()
        return self._take()

    def finish(self) -> list[Event]:
        """No more text comes."""
        self._source.ended = True
        self._resume()
        return self._take()

    def _resume(self) -> None:
        if not self._over:
            self._over = next(self._reading, self) is self

    def _take(self) -> list[Event]:
        events = _joined(self._events)
        self._events.clear()  # the same list: an open call writes to it
        return events

    def _marks(self, *marks: str) -> Marks:
        return marks_of(self._noise.union(marks))

    # ---- an answer with markers

    def _read_answer(self, thinking: Thinking | None, inside: bool | None) -> Pull[None]:
        if thinking is not None and (thinking.opened if inside is None else inside):
            yield from self._source.ahead(self._marks(*thinking.begin), self._noise)
            yield from self._read_reasoning(thinking)
        while True:
            mark = (yield from self._read_opening(thinking)) if self._opening else ""
            if not mark:
                mark = yield from self._read_prose(Text, self._marks(*self._marks_in_text(thinking)))
            if not mark:
                return
            if mark == self._owed:
                self._owed = ""
            elif thinking is not None and mark in thinking.begin:
                yield from self._read_reasoning(thinking)
            else:
                yield from self._read_calls(mark)

    def _read_opening(self, thinking: Thinking | None) -> Pull[str]:
        """A marker that counts only at the beginning of the answer."""
        marks = [mark for calls in self._calls if calls.markerless for mark in calls.begin]
        if thinking is not None:
            marks += thinking.begin
        if not marks:
            return ""
        self._gap, mark = yield from self._source.ahead(self._marks(*marks), self._noise)
        return mark

    def _marks_in_text(self, thinking: Thinking | None) -> list[str]:
        marks = self._begins_of_calls()
        if thinking is not None and thinking.reopen:
            marks += thinking.begin
        return [*marks, self._owed]

    def _begins_of_calls(self) -> list[str]:
        return [mark for calls in self._calls if not calls.markerless for mark in calls.begin]

    def _read_reasoning(self, thinking: Thinking) -> Pull[None]:
        marks = [*thinking.end, *(self._begins_of_calls() if thinking.calls_end_it else ())]
        self._after_mark = True
        mark = yield from self._read_prose(Reasoning, self._marks(*marks))
        if mark and mark not in thinking.end:
            yield from self._read_calls(mark)

    def _read_prose(self, kind: _Prose, marks: Marks) -> Pull[str]:
        """Tells text up to the next marker, which is taken and returned; nothing at the end."""
        source = self._source
        while True:
            found = marks.find(source.text, source.at)
            if found is not None and (source.ended or not marks.may_grow(source.text, found[0])):
                begin, end = found
                if source.text[begin:end] in self._noise:
                    source.drop(begin, end)
                    continue
                self._say(kind, source.take(source.before_space(begin) - source.at))
                self._gap = source.take(begin - source.at)
                self._after_mark = True
                return source.take(end - begin)
            if source.ended:
                self._say(kind, source.take(len(source.text) - source.at))
                return ""
            sure = marks.safe(source.text, source.at) if found is None else found[0]
            self._say(kind, source.take(source.before_space(sure) - source.at))
            yield from source.more()

    def _say(self, kind: _Prose, text: str) -> None:
        if self._after_mark:
            text = text.lstrip()
            if text and kind in self._said:
                text = "\n" + text
        if text:
            self._events.append(kind(text))
            self._said.add(kind)
            self._after_mark = False
            self._opening &= kind is Reasoning

    # ---- calls

    def _read_calls(self, mark: str) -> Pull[None]:
        """All calls behind this marker. If there are none, it was text."""
        tables = [calls for calls in self._calls if mark in calls.begin]
        self._opening = False
        if not tables[0].begin_is_read:
            self._source.at -= len(mark)
            mark = ""
        self._source.keep()
        try:
            shape = yield from self._choose(tables)
        except Malformed:
            shape = None
        if shape is None or not (yield from self._read_call(shape.call, shape.markerless)):
            self.mistaken += not tables[0].markerless
            self._take_back(self._gap + mark)
            return
        while (yield from self._goes_on(shape)):
            if not (yield from self._read_call(shape.call, shape.markerless)):
                self.mistaken += not shape.markerless
                self._owed = shape.end
                self._take_back("")
                return

    def _read_call(self, parts: tuple[Part, ...], only_known: bool) -> Pull[bool]:
        """False: it was none, and nothing has been told of it."""
        source = self._source
        call = Call(self._count, self._events.append, self._tools or {}, only_known)
        try:
            for part in parts:
                yield from source.space()
                yield from part.read(source, call)
            call.end()
        except Malformed:
            if not call.started:
                return False
            call.break_off()
        source.let_go()
        self._after_mark = True
        self._count += 1
        return True

    def _choose(self, tables: list[Calls]) -> Pull[Calls]:
        yield from self._source.space()
        for calls in tables:
            if not calls.opening or (yield from self._source.literal(calls.opening)):
                return calls
        raise Malformed("no way to write calls begins like this")

    def _goes_on(self, shape: Calls) -> Pull[bool]:
        """Does another call follow? If not, we are behind the end, or the text has left the format."""
        source = self._source
        source.keep()
        yield from source.space()
        if shape.end and (yield from source.literal(shape.end)):
            if shape.closing:
                yield from source.space()
                yield from source.literal(shape.closing)
        elif shape.several and (not shape.between or (yield from source.literal(shape.between))):
            return bool((yield from source.peek()))
        else:
            self._owed = shape.end
        source.let_go()
        return False

    def _take_back(self, mark: str) -> None:
        """It was no call: back to where it began, and on with text."""
        self._source.rewind()
        if mark:
            self._after_mark = False
            self._say(Text, mark)

    # ---- an answer in channels

    def _read_channels(self, channels: Channels) -> Pull[None]:
        source = self._source
        headers = self._marks(channels.start, channels.channel, channels.recipient)
        while True:
            self._gap, mark = yield from source.ahead(headers, self._noise)
            header = (yield from self._read_header(mark, channels)) if mark else ""
            if source.at == len(source.text) and source.ended:
                return
            self._after_mark |= bool(header)
            recipient = re.search(re.escape(channels.recipient) + r"([^\s<]+)", header)
            if recipient is not None and self._tools is not None:
                source.keep()
                name = recipient[1].removeprefix(channels.prefix)
                if (yield from self._read_call((Known(name), Json()), only_known=False)):
                    continue
                self.mistaken += 1
                self._take_back("")
            channel = re.search(re.escape(channels.channel) + r"\s*(\w+)", header)
            kind = Reasoning if channel is not None and channel[1] in channels.reasoning else Text
            mark = yield from self._read_prose(kind, self._marks(channels.start, *channels.ends))
            if mark == channels.start:
                source.at -= len(mark)

    def _read_header(self, mark: str, channels: Channels) -> Pull[str]:
        """From its first marker to the one in front of the body. A header that does not end is text."""
        source = self._source
        source.keep()
        try:
            header = mark + (yield from source.until(marks_of(frozenset({channels.message})), LONGEST_HEADER))
            yield from source.expect(channels.message)
        except Malformed:
            if source.ended:
                source.let_go()
                source.at = len(source.text)
            else:
                self._take_back(self._gap + mark)
            return ""
        source.let_go()
        return header


def _joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind become one event."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        if isinstance(event, Text) and isinstance(last, Text):
            out[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            out[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, ToolArguments) and isinstance(last, ToolArguments) and event.index == last.index:
            out[-1] = ToolArguments(event.index, last.json + event.json)
        else:
            out.append(event)
    return out
