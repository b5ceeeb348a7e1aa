"""What the parser tells. The events of an answer, in order, are all of it; nothing is told twice or taken back."""

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
    """`complete` false: the text ended or went astray inside of the arguments, which are told as far as they came."""

    index: int
    complete: bool = True


Event = Text | Reasoning | ToolStart | ToolArguments | ToolEnd
