"""Reads the JSON of a safetensors header member by member.

`json.loads` holds the interpreter lock until it has parsed the whole text: a header of 30 MB would stop every other thread of a
server for a second. Here each call into the JSON library gets one name or one entry.
"""

import re
from collections.abc import Iterator
from json import JSONDecoder
from typing import Any

from quire.types.json_text import read_json

MAX_ENTRY_CHARS = 4096  # of one tensor: dtype, shape and offsets have about 80
_DECODER = JSONDecoder()
_BLANKS = re.compile(r"[ \t\r\n]*")


class HeaderScanner:
    """A cursor in a text. All methods raise ValueError where the text is something else."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def members(self) -> Iterator[str]:
        """Yield the names of an object's members. The caller reads each value before it asks for the next name."""
        self._take("{", "an object")
        if self._next() == "}":
            self._at += 1
            return
        while True:
            name = self.string()
            self._take(":", "a colon")
            yield name
            if self._next() == "}":
                self._at += 1
                return
            self._take(",", "a comma")

    def string(self) -> str:
        if self._next() != '"':
            raise self._unexpected("a string")
        value, self._at = _DECODER.raw_decode(self._text, self._at)
        return str(value)

    def flat_object(self) -> Any:
        """Return an object that has no objects in it."""
        if self._next() != "{":
            raise self._unexpected("an object")
        end = self._text.find("}", self._at, self._at + MAX_ENTRY_CHARS) + 1
        if not end:
            raise self._unexpected(f"an object of at most {MAX_ENTRY_CHARS:,} characters")
        value, self._at = read_json(self._text[self._at : end]), end
        return value

    def end(self) -> None:
        if self._next():
            raise self._unexpected("the end")

    def _next(self) -> str:
        """Skip blanks and return the next character; nothing at the end."""
        blanks = _BLANKS.match(self._text, self._at)
        self._at = blanks.end() if blanks else self._at
        return self._text[self._at : self._at + 1]

    def _take(self, character: str, what: str) -> None:
        if self._next() != character:
            raise self._unexpected(what)
        self._at += 1

    def _unexpected(self, what: str) -> ValueError:
        return ValueError(f"character {self._at:,} must begin {what}; got {self._text[self._at : self._at + 20]!r}")
