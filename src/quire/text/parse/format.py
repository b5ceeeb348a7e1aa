"""What a format is: a table of markers and parts that the machine reads by. No format has code of its own."""

from dataclasses import dataclass

from quire.text.parse.parts import Part


@dataclass(frozen=True)
class Calls:
    """How tool calls are written.

        begin opening call between call ... end closing          and after that, text again

    Spaces between these mean nothing. Several `Calls` of a format may share a `begin`: `opening` tells them apart.
    """

    begin: tuple[str, ...]  # any of these
    call: tuple[Part, ...]
    opening: str = ""
    end: str = ""  # nothing: calls are over when no other follows
    closing: str = ""  # may stand behind the end
    several: bool = False  # more than one between begin and end
    between: str = ""
    # No marker that could not be text as well: calls count only at the very beginning of the answer, and only calls of tools
    # that the request named. `begin` is then part of the call or not (`begin_is_read`).
    markerless: bool = False
    begin_is_read: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        inner = tuple(mark for part in self.call for mark in part.marks)
        return (*self.begin, self.opening, self.end, self.closing, *inner)


@dataclass(frozen=True)
class Thinking:
    """How reasoning is written. It opens an answer; anywhere else its marks are text, unless it may `reopen`."""

    begin: tuple[str, ...]
    end: tuple[str, ...]
    opened: bool = False  # an answer begins with reasoning even where no mark says so
    reopen: bool = False
    calls_end_it: bool = False  # a tool call in the middle of reasoning is one


@dataclass(frozen=True)
class Channels:
    """Messages with headers: `start` role `channel` name [recipient] `message` body, and one of `ends`."""

    start: str
    channel: str
    message: str
    ends: tuple[str, ...]
    reasoning: tuple[str, ...]  # channels; all others are text
    final: str  # header of the message that answers; what comes before it is on the way there
    recipient: str  # in a header, in front of the name of the tool that the message calls
    prefix: str  # of tools' names

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.start, self.channel, self.message, *self.ends)


@dataclass(frozen=True)
class Format:
    calls: tuple[Calls, ...] = ()
    thinking: Thinking | None = None
    channels: Channels | None = None  # instead of the two above
    noise: tuple[str, ...] = ()  # strings without a meaning: they are left out
    short_ids: bool = False  # calls without an id get one of nine letters and digits
    in_template: tuple[str, ...] = ()  # a chat template with all of these strings is this format's; for "auto"

    @property
    def marks(self) -> frozenset[str]:
        thinking = () if self.thinking is None else self.thinking.begin + self.thinking.end
        channels = () if self.channels is None else self.channels.marks
        calls = tuple(mark for calls in self.calls for mark in calls.marks)
        return frozenset(mark for mark in (*calls, *thinking, *channels, *self.noise) if mark)


def combine(tools: Format | None, reasoning: Format | None) -> Format:
    """Tool calls as one format writes them, reasoning as another does."""
    tools, reasoning = tools or Format(), reasoning or Format()
    return Format(
        calls=tools.calls,
        thinking=reasoning.thinking,
        channels=tools.channels or reasoning.channels,
        noise=tools.noise + reasoning.noise,
        short_ids=tools.short_ids,
    )
