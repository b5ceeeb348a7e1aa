"""Messages between an event loop and its text processes.

A job is two frames: what is to be done, in JSON, and bytes (a text, token ids, a body). An answer is frames, each with a mark
in front: pieces of long strings and of long lists of integers, then the value they are part of. No frame takes long to read.
"""

import os
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from quire.text.chat import MediaMarks
from quire.types import errors

TEXT, TEXT_END, INTS, INTS_END = b"t", b"T", b"i", b"I"
VALUE, REFUSED = b"v", b"r"
LAST = {VALUE: b"V", REFUSED: b"R"}  # the same of a process that ends
FINAL = (*LAST, *LAST.values())
LONG_TEXT = 1 << 14  # characters
LONG_INTS = 16
INTS_PIECE = 1 << 15
_PLACE, _BIG = 1, 2  # kinds of msgpack extensions: a string or list that was sent in pieces, an integer beyond 64 bits


LONGEST_REFUSAL = 4096  # characters
RENDER_SECONDS = float(os.environ.get("QUIRE_TEMPLATE_SECONDS", "5"))  # of processor time
TEMPLATE = "the chat template"
MAX_RENDERED = 64 << 20  # characters


class TokenizerSource(msgspec.Struct, array_like=True):
    """Where the tokenizer is: a model's own, or another one."""

    path: str
    tokenizer: str | None
    revision: str | None


class _Job(msgspec.Struct, array_like=True, tag=True):
    pass


class Render(_Job):
    """A chat template's prompt. It is tokenized as well if it has more than `short` characters."""

    template: str
    messages: list[Any]
    tools: list[Any] | None
    documents: list[Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]
    content_format: str
    describe_tools: bool  # the prompt describes the tools, as the template does not read them
    add_special_tokens: bool
    short: int
    most: int  # characters, beyond which it is refused
    cut: "Cut"
    media: MediaMarks | None = None


class Cut(msgspec.Struct, array_like=True):
    """Which of a text's tokens are needed: `keep` of one side, or all if they are at most `most`."""

    most: int
    keep: int | None = None
    right: bool = False  # the end is cut off
    before: int = 0  # special tokens in front of the text, which stay
    after: int = 0  # special tokens at the end of the text, which stay

    def of(self, ids: list[int]) -> tuple[int, list[int] | None]:
        """Return the number of tokens, and those that the cut leaves."""
        count = len(ids)
        if self.keep is None:
            return count, ids if count <= self.most else None
        if count <= self.keep:
            return count, ids
        end = count - self.after
        start = self.before if self.right else max(self.before, end - self.room)
        return count, [*ids[: self.before], *ids[start : min(end, start + self.room)], *ids[end:]]

    @property
    def room(self) -> int:
        """Tokens of the text itself that are kept."""
        assert self.keep is not None
        return max(0, self.keep - self.before - self.after)


ALL = Cut(1 << 40)


class Encode(_Job):
    add_special_tokens: bool
    cut: Cut


class Decode(_Job):
    skip_special_tokens: bool


class Parse(_Job):
    """JSON within bounds. `values` are all but integers in long lists of their own, which have their own bound."""

    depth: int
    containers: int
    values: int
    integers: int


Job = Render | Encode | Decode | Parse
decode_job = msgspec.json.Decoder(Job).decode


class Ids(list[int]):
    """Integers that need not be looked at again: these are the least and the greatest."""

    __slots__ = ("greatest", "least")

    least: int
    greatest: int


# ---- what is refused, in words


def too_long(size: int, most: int) -> str:
    return f"the chat template wrote {size} characters, and {most} are the most that can be used here"


def too_deep(most: int) -> str:
    return f"the request body may nest arrays and objects at most {most} deep"


def too_many(most: int) -> str:
    return f"the request body may have at most {most} arrays and objects"


def not_json(error: Exception) -> str:
    return f"the request body is not valid JSON: {error}"


# ---- answers, written


class FrameWriter:
    """A value as frames. What is beyond the bounds is a body that is refused."""

    def __init__(self, depth: int = 1 << 30, containers: int = 1 << 30, values: int = 1 << 30, integers: int = 1 << 30) -> None:
        self._bounds = (depth, containers, values, integers)
        self._containers, self._values, self._integers = containers, values, integers
        self._sections: list[str | array[int]] = []

    def frames(self, value: Any) -> Iterator[bytes]:
        small = self._small(value, 0)
        for section in self._sections:
            yield from _text_frames(section) if isinstance(section, str) else _int_frames(section)
        yield VALUE + msgspec.msgpack.encode(small)

    def _small(self, value: Any, depth: int) -> Any:
        """The value with extensions in the place of all that is long."""
        if isinstance(value, str):
            return self._section(value) if len(value) > LONG_TEXT else value
        if isinstance(value, list | tuple):
            return self._list(value, depth)
        if isinstance(value, dict):
            self._count(depth, 2 * len(value))
            return {key: self._small(item, depth + 1) for key, item in value.items()}
        if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
            return msgspec.msgpack.Ext(_BIG, str(value).encode())
        return value

    def _list(self, value: Sequence[Any], depth: int) -> Any:
        if len(value) >= LONG_INTS and set(map(type, value)) == {int}:
            try:
                numbers = array("q", value)
            except OverflowError:
                pass
            else:
                self._count(depth, 1)
                self._integers -= len(value)
                if self._integers < 0:
                    raise errors.InvalidParameter(f"the request body may have at most {self._bounds[3]} integers", "body")
                return self._section(numbers)
        self._count(depth, len(value))
        return [self._small(item, depth + 1) for item in value]

    def _count(self, depth: int, values: int) -> None:
        self._containers -= 1
        self._values -= values
        if depth >= self._bounds[0]:
            raise errors.InvalidParameter(too_deep(self._bounds[0]), "body")
        if self._containers < 0:
            raise errors.InvalidParameter(too_many(self._bounds[1]), "body")
        if self._values < 0:
            raise errors.InvalidParameter(
                f"the request body may have at most {self._bounds[2]} values besides token ids", "body"
            )

    def _section(self, section: "str | array[int]") -> msgspec.msgpack.Ext:
        self._sections.append(section)
        return msgspec.msgpack.Ext(_PLACE, str(len(self._sections) - 1).encode())


def _text_frames(text: str) -> Iterator[bytes]:
    for i in range(0, len(text), LONG_TEXT * 4):
        yield TEXT + text[i : i + LONG_TEXT * 4].encode("utf-8", "surrogatepass")
    yield TEXT_END


def _int_frames(numbers: "array[int]") -> Iterator[bytes]:
    for i in range(0, len(numbers), INTS_PIECE):
        yield INTS + numbers[i : i + INTS_PIECE].tobytes()
    yield INTS_END + msgspec.msgpack.encode((min(numbers), max(numbers)))


def refusal(error: errors.RequestError) -> bytes:
    """A message may be a template's own, of any length, with halves of characters in it."""
    message = str(error)[:LONGEST_REFUSAL].encode(errors="replace").decode()
    return REFUSED + msgspec.msgpack.encode((type(error).__name__, message, error.parameter))


# ---- answers, read


class FrameReader:
    """Puts the frames of one answer together."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._ints = Ids()
        self._sections: list[str | Ids] = []

    def take(self, frame: bytes) -> tuple[Any] | None:
        """The value, when it is complete. Raises what was refused."""
        mark, body = frame[:1], memoryview(frame)[1:]
        if mark == TEXT:
            self._texts.append(str(body, "utf-8", "surrogatepass"))
        elif mark == TEXT_END:
            self._sections.append("".join(self._texts))
            self._texts = []
        elif mark == INTS:
            numbers = array("q")
            numbers.frombytes(body)
            self._ints += numbers
        elif mark == INTS_END:
            self._ints.least, self._ints.greatest = msgspec.msgpack.decode(body)
            self._sections.append(self._ints)
            self._ints = Ids()
        elif mark in (REFUSED, LAST[REFUSED]):
            kind, message, parameter = msgspec.msgpack.decode(body)
            raise getattr(errors, kind, errors.RequestError)(message, parameter)
        else:
            return (msgspec.msgpack.decode(body, ext_hook=self._restore),)
        return None

    def _restore(self, kind: int, data: memoryview) -> Any:
        return int(str(data, "ascii")) if kind == _BIG else self._sections[int(str(data, "ascii"))]
