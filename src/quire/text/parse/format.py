"""What a format is: a table of markers and parts that the machine reads by. No format has code of its own."""

from dataclasses import dataclass
from itertools import takewhile

from quire.text.parse.parts import CallPart, Mark

SHORT = 3  # characters: brackets and the like are text as well


@dataclass(frozen=True)
class Calls:
    """How tool calls are written.

        begin opening call between call ... end closing          and after that, text again

    Spaces between these mean nothing. Several `Calls` of a format may share a `begin`: `opening` distinguishes them.
    """

    begin: tuple[str, ...]  # any of these
    call: tuple[CallPart, ...]
    opening: str = ""
    opening_is_read: bool = True  # or is it part of the first call?
    end: str = ""  # nothing: calls are over when no other follows
    closing: str = ""  # may stand after the end
    several: bool = False  # more than one between begin and end
    between: str = ""
    noisy: bool = False  # text may stand in front of every one of several calls, and of the end: it is left out
    begin_is_read: bool = True  # or is it part of the first call?
    # No marker that could not be text as well: only calls of tools that the request named count, and only at the very
    # beginning of the answer, unless they may stand `anywhere`.
    markerless: bool = False
    anywhere: bool = False

    @property
    def in_text(self) -> bool:
        """Return whether calls may begin after text."""
        return self.anywhere or not self.markerless

    @property
    def resume(self) -> str:
        """What begins every one of several calls, where that is a mark."""
        first = self.call[0]
        return first.text if self.several and isinstance(first, Mark) else ""

    @property
    def tail(self) -> tuple[str, ...]:
        """Marks after the arguments: where a call has gone wrong, they may still come, and mean nothing."""
        trailing = takewhile(lambda part: isinstance(part, Mark), reversed(self.call))
        last = [part.text for part in trailing if isinstance(part, Mark)]
        return tuple(mark for mark in (*last, self.end, self.closing) if len(mark) > SHORT)

    @property
    def marks(self) -> tuple[str, ...]:
        inner = tuple(mark for part in self.call for mark in part.marks)
        return (*self.begin, self.opening, self.end, self.closing, *inner)


@dataclass(frozen=True)
class Thinking:
    """How reasoning is written. It opens an answer; anywhere else its first mark is text, unless it may `reopen`.

    An end that ends nothing is left out, unless it is one of `phrases` that prose has too, or the first mark was in the text.
    A tool call in the middle of reasoning is one if the reasoning never ends; or at once (`calls_end_it`).
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    opened: bool = False  # an answer begins with reasoning even without a mark
    reopen: bool = False
    calls_end_it: bool = False
    phrases: bool = False  # the marks are words
    as_text: bool = False  # reasoning stays in the text, marks included, and the text begins with the first mark


@dataclass(frozen=True)
class Channels:
    """Messages with headers: `start` role `channel` name [recipient] `message` body, and one of `ends`.

    Without a `channel` the recipient decides what a message is: reasoning for those in `reasoning`, text for those in `readers`
    and for none, and otherwise calls, which are written as in `calls`.
    """

    start: str
    channel: str
    message: str
    ends: tuple[str, ...]
    reasoning: tuple[str, ...]  # channels; all others are text
    final: str  # header of the message that answers; what comes before it is on the way there
    recipient: str  # in a header, in front of the name of the tool that the message calls
    prefix: str  # of tools' names
    readers: tuple[str, ...] = ()
    calls: Calls | None = None  # None: the recipient is the tool, and the body its arguments

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.start, self.channel, self.message, *self.ends, *(() if self.calls is None else self.calls.marks))


@dataclass(frozen=True)
class Format:
    calls: tuple[Calls, ...] = ()
    thinking: Thinking | None = None
    channels: Channels | None = None  # instead of the two above
    noise: tuple[str, ...] = ()  # strings without a meaning: they are left out
    frames: tuple[str, ...] = ()  # marks around the answer: they are left out with the space next to them
    spans: tuple[tuple[str, str], ...] = ()  # two strings that are left out with the few characters between them
    # The answer, and what follows the first of these strings, may begin with a word in front of one of the others. It is a
    # header, which is left out.
    header: tuple[str, ...] = ()
    short_ids: bool = False  # calls without an id get one of nine letters and digits
    in_template: tuple[str, ...] = ()  # a chat template with all of these strings is this format's; for "auto"

    @property
    def marks(self) -> frozenset[str]:
        thinking = () if self.thinking is None else self.thinking.begin + self.thinking.end
        channels = () if self.channels is None else self.channels.marks
        calls = tuple(mark for calls in self.calls for mark in calls.marks)
        spans = tuple(mark for span in self.spans for mark in span if len(mark) > SHORT)
        every = (*calls, *thinking, *channels, *self.noise, *self.frames, *spans, *self.header)
        return frozenset(mark for mark in every if mark)


def combine(tools: Format | None, reasoning: Format | None) -> Format:
    """Tool calls as one format writes them, reasoning as another does."""
    tools, reasoning = tools or Format(), reasoning or Format()
    return Format(
        calls=tools.calls,
        thinking=reasoning.thinking,
        channels=tools.channels or reasoning.channels,
        noise=tools.noise + reasoning.noise,
        frames=tools.frames + reasoning.frames,
        spans=tools.spans + reasoning.spans,
        header=tools.header or reasoning.header,
        short_ids=tools.short_ids,
    )
