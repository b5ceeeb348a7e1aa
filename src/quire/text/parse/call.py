"""One tool call as it is read: its name, its id, its arguments. It is told as soon as its arguments begin."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from quire.text.parse.events import Event, ToolArguments, ToolEnd, ToolStart
from quire.text.parse.source import Malformed

LONGEST_NAME = 256
_NAME = re.compile(rf"[^\s\x00-\x1f\ud800-\udfff]{{1,{LONGEST_NAME}}}")

Tools = Mapping[str, Mapping[str, Any]]  # name -> JSON schema of the parameters


class Call:
    """`only_known`: a name that is none of the tools' makes this no call at all."""

    def __init__(self, index: int, tell: Callable[[Event], None], tools: Tools, only_known: bool) -> None:
        self._index = index
        self._tell = tell
        self._tools = tools
        self._only_known = only_known
        self._name: str | None = None
        self._id: str | None = None
        self._early: list[str] = []  # arguments that came before the name
        self._wrote = False
        self.started = False

    def name_it(self, name: str, own_id: str | None = None) -> None:
        if name not in self._tools and not _NAME.fullmatch(name):
            raise Malformed(f"{name!r:.80} is no name of a tool")
        if self._only_known and name not in self._tools:
            raise Malformed(f"there is no tool {name!r}")
        if self.started:
            raise Malformed("a call has one name")
        self._name = name
        if own_id is not None and _NAME.fullmatch(own_id):
            self._id = own_id

    def identify(self, own_id: str) -> None:
        if not self.started and _NAME.fullmatch(own_id):
            self._id = own_id

    def write(self, piece: str) -> None:
        """The next piece of the arguments, as JSON."""
        self._wrote = True
        if self._name is None:
            self._early.append(piece)
            return
        self._start()
        self._tell(ToolArguments(self._index, piece))

    @property
    def schema(self) -> Mapping[str, Any]:
        return self._tools.get(self._name or "", {})

    def end(self) -> None:
        if self._name is None:
            raise Malformed("the call has no name")
        self._start()
        if not self._wrote:
            self._tell(ToolArguments(self._index, "{}"))
        self._tell(ToolEnd(self._index))

    def break_off(self) -> None:
        self._tell(ToolEnd(self._index, complete=False))

    def _start(self) -> None:
        if self.started:
            return
        assert self._name is not None
        self.started = True
        self._tell(ToolStart(self._index, self._name, self._id))
        if self._early:
            self._tell(ToolArguments(self._index, "".join(self._early)))
            self._early.clear()


def write_settled(call: Call, value: str) -> None:
    """Arguments that came whole: none are an empty object, and JSON in a string is what the string says."""
    decoded = json.loads(value)
    if decoded is None:
        value = "{}"
    elif isinstance(decoded, str):
        try:
            if isinstance(json.loads(decoded), dict):
                value = decoded
        except ValueError:
            pass
    call.write(value)
