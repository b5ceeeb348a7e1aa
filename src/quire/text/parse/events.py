"""Events of the parser. Together, in order, they are the whole answer; none is repeated or taken back."""

import msgspec


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
    json: str  # the next piece: the pieces of a complete call together are one JSON value


class ToolEnd(msgspec.Struct, frozen=True):
    """`complete` false: the text ended or left the format inside the arguments, which are emitted as far as they came."""

    index: int
    complete: bool = True


Event = Text | Reasoning | ToolStart | ToolArguments | ToolEnd
