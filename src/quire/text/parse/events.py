"""Events of the parser, and the writer of one tool call's events.

Together, in order, the events are the whole answer; no event is repeated or withdrawn. A call is emitted as soon as its
arguments begin.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.text.parse.source import AnswerText, Malformed, Pull
from quire.text.parse.values import is_string_only, reread_value, types_of


class Text(msgspec.Struct, frozen=True):
    text: str


class Reasoning(msgspec.Struct, frozen=True):
    text: str


class ToolStart(msgspec.Struct, frozen=True):
    """`id` is the model's own, where its format has one."""

    index: int
    name: str
    id: str | None = None


class ToolArguments(msgspec.Struct, frozen=True):
    index: int
    json: str  # the next piece: the parts of a complete call together are one JSON value


class ToolEnd(msgspec.Struct, frozen=True):
    """`complete` false: the text ended or left the format inside the arguments, which are emitted as far as they came."""

    index: int
    complete: bool = True


Event = Text | Reasoning | ToolStart | ToolArguments | ToolEnd


# ---- one tool call as it is read

LONGEST_NAME = 256
_NAME = re.compile(rf"[^\s\x00-\x1f\ud800-\udfff<>{{}}\"]{{1,{LONGEST_NAME}}}")

_object = msgspec.json.Decoder(dict[str, msgspec.Raw])  # looks at all of it and keeps nothing

Tools = Mapping[str, Mapping[str, Any]]  # name -> JSON schema of the parameters


class CallWriter:
    """`only_known`: a name that is none of the tools' makes this no call at all.

    `emitted` is called after every event: the text read so far cannot become plain text any more.
    """

    def __init__(
        self, index: int, emit: Callable[[Event], None], tools: Tools, only_known: bool, emitted: Callable[[], None]
    ) -> None:
        self._index = index
        self._emit = emit
        self._emitted = emitted
        self._tools = tools
        self._only_known = only_known
        self._name: str | None = None
        self._id: str | None = None
        self._pieces: list[str] = []  # the arguments; what came before the name is not emitted yet
        self.started = False

    def name_it(self, name: str, own_id: str | None = None) -> None:
        if name not in self._tools and not _NAME.fullmatch(name):
            raise Malformed(f"{name!r:.80} is no name of a tool")
        if self._only_known and name not in self._tools:
            raise Malformed(f"there is no tool {name!r}")
        if self._name not in (None, name):
            raise Malformed("a call has one name")
        self._name = name
        if own_id is not None and _NAME.fullmatch(own_id):
            self._id = own_id

    def identify(self, own_id: str) -> None:
        if not self.started and _NAME.fullmatch(own_id):
            self._id = own_id

    def write(self, piece: str) -> None:
        """The next piece of the arguments, as JSON."""
        self._pieces.append(piece)
        if self._name is None:
            return
        if self.started:
            self._emit(ToolArguments(self._index, piece))
        else:
            self._start()
        self._emitted()

    @property
    def named(self) -> bool:
        return self._name is not None

    @property
    def has_arguments(self) -> bool:
        return bool(self._pieces)

    @property
    def schema(self) -> Mapping[str, Any]:
        return self._tools.get(self._name or "", {})

    def must_be_string(self, key: str) -> bool:
        """Does the schema allow nothing but a string for this argument?"""
        return is_string_only(types_of(self.schema, key))

    def is_tool(self, name: str) -> bool:
        return name in self._tools

    @property
    def whole(self) -> bool:
        """Is all of it there: a name, and arguments that are one JSON object?"""
        return self._name is not None and is_object("".join(self._pieces))

    def close(self) -> None:
        """Nothing more of it comes."""
        if self._name is None:
            raise Malformed("the call has no name")
        if not self._pieces:
            self.write("{}")
        if not self.whole:
            raise Malformed("the arguments are no object")
        self._start()

    def end(self, complete: bool) -> None:
        self._emit(ToolEnd(self._index, complete))
        self._emitted()

    def _start(self) -> None:
        if self.started:
            return
        assert self._name is not None
        self.started = True
        self._emit(ToolStart(self._index, self._name, self._id))
        self._emit(ToolArguments(self._index, "".join(self._pieces)))


def is_object(text: str) -> bool:
    try:
        _object.decode(text)
    except (ValueError, RecursionError):  # an error of msgspec's is a ValueError
        return False
    return True


def write_settled(source: AnswerText, call: CallWriter, value: str) -> Pull[None]:
    """Write complete arguments: none are an empty object, and a string with an object is that object."""
    decoded = json.loads(value)
    if decoded is None or (isinstance(decoded, str) and not decoded.strip()):
        call.write("{}")
        return
    if not isinstance(decoded, str):
        raise Malformed("the arguments are no object")
    if not decoded.lstrip().startswith("{"):
        raise Malformed("the arguments are no object")
    call.write((yield from reread_value(source, decoded.strip(), strings=call.must_be_string)))
