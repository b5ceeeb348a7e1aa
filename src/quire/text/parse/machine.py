"""The machine: the text of an answer, in chunks of any size, becomes events, which do not depend on the chunks.

    text ──begin of thinking──► reasoning ──end──► text ──begin of calls──► call, call ... ──end──► text

It holds back only what may still turn out to be part of a marker, and space in front of it: space next to a marker belongs to
the marker, and where text goes on after markers it goes on in a new line. A call whose text does not follow the format is
text after all, marker included, as long as its arguments have not begun; after that the call is broken off where it went
wrong, and what follows is text. Other calls are read all the same. A call whose arguments are whole is complete,
whatever marks may be missing after them.
"""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Literal

from quire.text.parse.events import CallWriter, Event, Reasoning, Text, ToolArguments, ToolEnd, Tools, ToolStart
from quire.text.parse.format import Calls, Channels, Format, Thinking
from quire.text.parse.parts import CallPart, Json, Known
from quire.text.parse.source import AnswerText, Malformed, Marks, Pull, marks_of
from quire.text.parse.values import read_value

LONGEST_HEADER = 512
LONGEST_NOISE = 1024  # characters in front of a call
LONGEST_SPAN = 128

_HEADER_WORD = re.compile(r"[\w.-]*", re.ASCII)

_Prose = type[Text] | type[Reasoning]
_Outcome = Literal["whole", "broken", "none"]  # of a call; none: it was none, and nothing of it was emitted


class AnswerParser:
    """`tools`: the request's; None: what looks like a call is text. `inside`: does the answer begin in the reasoning?

    None leaves that to the format. `noise`: strings to be left out of text, as special tokens are.
    """

    def __init__(
        self, form: Format, *, tools: Tools | None = None, inside: bool | None = None, noise: frozenset[str] = frozenset()
    ) -> None:
        self._tools = tools
        self._calls: tuple[Calls, ...] = () if tools is None else form.calls
        self._noise = noise.union(form.noise)
        self._spans = dict(form.spans)
        self._header = form.header
        self._mentions = 0  # marks that begin reasoning, in text: their ends are text as well
        self._source = AnswerText()
        self._events: list[Event] = []
        self._said: set[_Prose] = set()  # what there has been some of
        self._opening = True  # nothing but reasoning has come so far
        self._after_mark = False  # space that comes now belongs to the marker before it
        self._gap = ""  # space in front of the latest marker
        self._left: Calls | None = None  # calls that the text has left: they may go on, and their end may still come
        self._stray: tuple[str, ...] = form.frames  # marks that mean nothing
        self._skipped = ""  # between calls: what is none
        self._count = 0
        self._end_ahead = -1  # position of an end of the reasoning that was seen
        self.mistaken = 0  # markers of calls that no call followed
        self._over = False
        self._reading = (
            self._read_answer(form.thinking, inside) if form.channels is None else self._read_channels(form.channels)
        )
        self._resume()

    def feed(self, text: str) -> list[Event]:
        return self._all(self.turns(text))

    def finish(self) -> list[Event]:
        """No more text comes."""
        return self._all(self.turns("", last=True))

    def turns(self, text: str, last: bool = False) -> Iterator[list[Event]]:
        """Events, in turns of a moment each: much may have to be read at once, also where text was held back."""
        source = self._source
        if text:
            source.add(text)
        for complete in (False, True)[: 1 + last]:  # that it is all is emitted when what there was has been read
            source.complete |= complete
            while not self._over and (source.show() or complete):
                self._resume()
                if source.hides:
                    yield self._take()
        yield self._take()

    def _resume(self) -> None:
        self._over = next(self._reading, self) is self

    def _take(self) -> list[Event]:
        events = joined(self._events)
        self._events.clear()  # the same list: an open call writes to it
        return events

    def _all(self, turns: Iterator[list[Event]]) -> list[Event]:
        first = next(turns)
        rest = [event for events in turns for event in events]
        return joined(first + rest) if rest else first

    def _marks(self, *marks: str) -> Marks:
        return marks_of(self._noise.union(marks, self._spans))

    def _marks_ahead(self, *marks: str) -> Marks:
        """Marks that must come next."""
        return marks_of(self._noise.union(marks))

    # ---- an answer with markers

    def _read_answer(self, thinking: Thinking | None, inside: bool | None) -> Pull[None]:
        if thinking is not None and thinking.as_text:
            self._say(Text, thinking.begin[0])
            thinking = None
        if thinking is not None and (thinking.opened if inside is None else inside):
            yield from self._source.next_mark(self._marks_ahead(*thinking.begin), self._noise)
            yield from self._read_reasoning(thinking)
        elif self._header and not inside:
            yield from self._drop_header()
        while True:
            mark = (yield from self._read_opening(thinking)) if self._opening else ""
            if not mark:
                mark = yield from self._read_prose(Text, self._marks(*self._marks_in_text(thinking)))
            if not mark:
                return
            if thinking is not None and mark in thinking.begin:
                yield from self._read_begin(thinking, mark)
            elif self._mentions and thinking is not None and mark in thinking.end:
                self._mentions -= 1
                self._unmark(mark, Text)
            elif self._header and mark == self._header[0]:
                yield from self._drop_header()
            elif self._left is not None and mark == self._left.resume:
                yield from self._read_calls(mark, [self._left])
            elif any(mark in calls.begin for calls in self._calls):
                yield from self._read_calls(mark, [calls for calls in self._calls if mark in calls.begin])
            elif self._left is not None and mark == self._left.end:
                self._left = None

    def _read_begin(self, thinking: Thinking, mark: str) -> Pull[None]:
        if self._opening or thinking.reopen:
            yield from self._read_reasoning(thinking)
        else:
            self._mentions += 1
            self._unmark(mark, Text)

    def _drop_header(self) -> Pull[None]:
        """A word in front of one of the marks that end a header; anything else is text."""
        source = self._source
        source.keep()
        place = source.position
        while source.run(_HEADER_WORD) or source.at == len(source.text):
            if source.position - place > LONGEST_SPAN or not (yield from source.more()):
                break
        _, mark = yield from source.next_mark(marks_of(frozenset(self._header)), frozenset())
        if not mark:
            source.rewind()
            return
        source.at -= len(mark)
        source.let_go()

    def _read_opening(self, thinking: Thinking | None) -> Pull[str]:
        """A marker that counts only at the beginning of the answer."""
        marks = [mark for calls in self._calls if calls.markerless for mark in calls.begin]
        if thinking is not None:
            marks += thinking.begin
        if not marks:
            return ""
        self._gap, mark = yield from self._source.next_mark(self._marks_ahead(*marks), self._noise)
        return mark

    def _marks_in_text(self, thinking: Thinking | None) -> list[str]:
        marks = [*self._begins_of_calls(), *self._stray, *self._header[:1]]
        if thinking is not None and not (thinking.phrases and not thinking.reopen):
            marks += thinking.begin + thinking.end
        if self._left is not None:
            marks += [self._left.resume, *self._left.tail]
        return marks

    def _begins_of_calls(self) -> list[str]:
        return [mark for calls in self._calls if calls.in_text for mark in calls.begin]

    def _read_reasoning(self, thinking: Thinking) -> Pull[None]:
        begins = [mark for calls in self._calls if not calls.markerless for mark in calls.begin]
        marks = self._marks(*thinking.end, *begins)
        self._after_mark = True
        while True:
            mark = yield from self._read_prose(Reasoning, marks)
            if not mark or mark in thinking.end:
                return
            tables = [calls for calls in self._calls if mark in calls.begin]
            if thinking.calls_end_it or (yield from self._never_ends(mark, tables, thinking)):
                if (yield from self._read_calls(mark, tables, Reasoning)):
                    self._stray += thinking.end
                    return
            else:
                self._unmark(mark, Reasoning)

    def _never_ends(self, mark: str, tables: list[Calls], thinking: Thinking) -> Pull[bool]:
        """A call in the middle of reasoning: does the reasoning never end, so that it is one? Nothing of it is emitted here."""
        source = self._source
        back = 0 if tables[0].begin_is_read else len(mark)
        source.at -= back
        source.keep()
        shape = yield from self._choose(tables)
        trial = CallWriter(0, lambda _: None, self._tools or {}, False, lambda: None)
        outcome = "none" if shape is None else (yield from self._try(shape.call, trial))
        never = outcome == "whole" or (outcome == "broken" and source.complete)
        ends = marks_of(frozenset(thinking.end))
        while never and source.position > self._end_ahead:
            found = ends.find(source.text, source.at)
            source.at = ends.safe(source.text, source.at) if found is None else found[0]
            if found is not None:
                self._end_ahead = source.position
            elif not (yield from source.more()):
                break
        never &= source.position > self._end_ahead
        source.rewind()
        source.at += back
        return never

    def _read_prose(self, kind: _Prose, marks: Marks) -> Pull[str]:
        """Emit text up to the next marker, which is taken and returned; nothing at the end."""
        source = self._source
        while True:
            found = marks.find(source.text, source.at)
            if found is not None and (source.ended or not marks.may_grow(source.text, found[0])):
                begin, end = found
                self._say(kind, source.take(source.before_space(begin) - source.at))  # what is dropped joins nothing
                mark = source.text[begin:end]
                if mark in self._noise:
                    source.drop(begin, end)
                    continue
                if mark in self._spans:
                    yield from self._drop_span(kind, begin, end)
                    continue
                self._gap = source.take(begin - source.at)
                self._after_mark = True
                return source.take(end - begin)
            if source.ended:
                self._say(kind, source.take(len(source.text) - source.at))
                return ""
            sure = marks.safe(source.text, source.at) if found is None else found[0]
            self._say(kind, source.take(source.before_space(sure) - source.at))
            yield from source.more()

    def _drop_span(self, kind: _Prose, begin: int, end: int) -> Pull[None]:
        """Leaves out a mark with what stands between it and its other half. Without one, it is text."""
        source = self._source
        begin, end = begin - source.at, end - source.at
        mark = source.text[source.at + begin : source.at + end]
        ends = marks_of(frozenset({self._spans[mark], "<", "\n"}))
        while True:
            found = ends.find(source.text, source.at + end, source.at + end + LONGEST_SPAN)
            if found is not None and source.text[slice(*found)] == self._spans[mark]:
                source.drop(source.at + begin, found[1])
                return
            over = found is not None or len(source.text) - source.at - end >= LONGEST_SPAN
            if over or not (yield from source.more()):
                self._say(kind, source.take(end))
                return

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

    def _read_calls(self, mark: str, tables: list[Calls], kind: _Prose = Text) -> Pull[bool]:
        """All calls after this marker. If there are none, it was text, or whatever it stood in."""
        source = self._source
        resumed = mark not in tables[0].begin
        back = len(mark) if resumed or not tables[0].begin_is_read else 0
        source.at -= back
        source.keep()
        shape = tables[0] if resumed else (yield from self._choose(tables))
        if shape is None or not (yield from self._read_section(shape)):
            self.mistaken += not tables[0].markerless
            self._skipped = ""
            source.rewind()
            source.at += back
            self._unmark(mark, kind)
            return False
        source.let_go()
        self._opening = False
        return True

    def _unmark(self, mark: str, kind: _Prose) -> None:
        """It was no marker."""
        self._after_mark = False
        self._say(kind, self._gap + mark)

    def _choose(self, tables: list[Calls]) -> Pull[Calls | None]:
        yield from self._source.space()
        for calls in tables:
            if not calls.opening:
                return calls
            if (yield from self._source.literal(calls.opening)):
                self._source.at -= 0 if calls.opening_is_read else len(calls.opening)
                return calls
        return None

    def _read_section(self, shape: Calls) -> Pull[bool]:
        """Calls up to their end, or until the text leaves the format. False: there was none, and nothing has been emitted."""
        source = self._source
        emitted = False
        while True:
            if shape.noisy:
                yield from self._skip_noise(shape, emitted)
            place = source.place()
            outcome = yield from self._read_call(shape.call, shape.markerless)
            emitted |= outcome != "none"
            over = outcome == "broken"
            if outcome == "none" and (shape.markerless or not shape.between or not (yield from self._skip(place))):
                if not emitted:
                    return False
                self.mistaken += not shape.markerless
                source.rewind()
                over = True
            self._left = shape if over else None
            if over or not (yield from self._goes_on(shape)):
                break
        if emitted:
            self._flush()
        return emitted

    def _read_call(self, parts: tuple[CallPart, ...], only_known: bool) -> Pull[_Outcome]:
        call = CallWriter(self._count, self._emit, self._tools or {}, only_known, self._source.keep)
        outcome = yield from self._try(parts, call)
        if outcome != "none":
            call.end(complete=outcome == "whole")
            self._after_mark = True
            self._count += 1
        return outcome

    def _try(self, parts: tuple[CallPart, ...], call: CallWriter) -> Pull[_Outcome]:
        source = self._source
        try:
            for part in parts:
                yield from source.space()
                yield from part.read(source, call)
            call.close()
        except Malformed:
            if not call.started:
                return "none"
            source.rewind()
            source.keep()
            return "whole" if call.whole else "broken"
        return "whole"

    def _skip(self, place: int) -> Pull[bool]:
        """An item of a list that is no call becomes text, and the list goes on."""
        source = self._source
        source.go_to(place)
        yield from source.space()
        begin = source.place()
        try:
            yield from read_value(source, lambda _: None)
        except Malformed:
            return False
        self._skipped += source.since(begin)
        return True

    def _skip_noise(self, shape: Calls, emitted: bool) -> Pull[None]:
        """Leaves out text in front of a call and, after a call that was `emitted`, in front of the end."""
        source = self._source
        place = source.place()
        try:
            yield from source.until(marks_of(frozenset({shape.resume, shape.end})), LONGEST_NOISE)
        except Malformed:
            source.go_to(place)
            return
        if emitted:
            source.keep()

    def _goes_on(self, shape: Calls) -> Pull[bool]:
        """Does another call follow? If not, the end was read, or the text has left the format."""
        source = self._source
        yield from source.space()
        if shape.end and (yield from source.literal(shape.end)):
            if shape.closing:
                yield from source.space()
                yield from source.literal(shape.closing)
            return False
        if shape.several and (not shape.between or (yield from source.literal(shape.between))) and (yield from source.peek()):
            return True
        self._left = shape
        return False

    def _emit(self, event: Event) -> None:
        self._flush()
        self._events.append(event)

    def _flush(self) -> None:
        skipped, self._skipped = self._skipped, ""
        self._say(Text, skipped)

    # ---- an answer in channels

    def _read_channels(self, channels: Channels) -> Pull[None]:
        source = self._source
        headers = self._marks_ahead(channels.start, channels.channel, channels.recipient)
        while True:
            self._gap, mark = yield from source.next_mark(headers, self._noise)
            header = (yield from self._read_header(mark, channels)) if mark else ""
            if source.at == len(source.text) and source.ended:
                return
            self._after_mark |= bool(header)
            recipient = re.search(re.escape(channels.recipient) + r"([^\s<]+)", header)
            reader = "" if recipient is None else recipient[1]
            if reader and reader not in channels.readers + channels.reasoning and self._tools is not None:
                source.keep()
                if (yield from self._read_message_calls(channels, reader)):
                    source.let_go()
                    continue
                self.mistaken += 1
                source.rewind()
            channel = re.search(re.escape(channels.channel) + r"\s*(\w+)", header) if channels.channel else recipient
            kind = Reasoning if channel is not None and channel[1] in channels.reasoning else Text
            mark = yield from self._read_prose(kind, self._marks(channels.start, *channels.ends))
            if mark == channels.start:
                source.at -= len(mark)

    def _read_message_calls(self, channels: Channels, reader: str) -> Pull[bool]:
        if channels.calls is None:
            known = Known(reader.removeprefix(channels.prefix))
            return (yield from self._read_call((known, Json()), only_known=False)) != "none"
        yield from self._source.space()
        if not (yield from self._source.literal(channels.calls.begin[0])):
            return False
        return (yield from self._read_section(channels.calls))

    def _read_header(self, mark: str, channels: Channels) -> Pull[str]:
        """From its first marker to the one in front of the body. A header that does not end is text."""
        source = self._source
        source.keep()
        try:
            header = mark + (yield from source.until(marks_of(frozenset({channels.message})), LONGEST_HEADER))
            yield from source.expect(channels.message)
        except Malformed:
            if source.ended and len(source.text) - source.at <= LONGEST_HEADER:
                source.let_go()
                source.at = len(source.text)
            else:
                source.rewind()
                self._unmark(mark, Text)
            return ""
        source.let_go()
        return header


def joined(events: list[Event]) -> list[Event]:
    """Neighbours of one kind become one event."""
    out: list[Event] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        first, *others = group
        if not others or isinstance(first, ToolStart | ToolEnd):
            out += [first, *others]
        elif isinstance(first, ToolArguments):
            out.append(ToolArguments(first.index, first.json + "".join(event.json for event in others)))  # type: ignore[union-attr]
        else:
            out.append(type(first)(first.text + "".join(event.text for event in others)))  # type: ignore[union-attr]
    return out
