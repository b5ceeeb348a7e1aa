"""Text as it comes, read from the left by generators that pause when they have to see more.

A reader is written as if all text were there: `yield from` gives it what it asks for, and control leaves it only where the
next step depends on text that has not come. Nothing here knows what the text means.

Text is shown in pieces, however much of it has come, and shown in pieces again when it is read again: so a reader pauses soon.
"""

import re
from collections import deque
from collections.abc import Generator, Iterable
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Pull = Generator[None, None, T]

PIECE = 512  # characters that are shown at a time
MAX_SPACE = 256  # characters of space next to a mark; further ones are text
_SPACE = re.compile(r"\s*")


class Malformed(Exception):
    """The text does not follow the format here, or it ended too early."""


class AnswerText:
    def __init__(self) -> None:
        self.text = ""  # what is shown
        self.at = 0  # what is before is read
        self.complete = False  # no more text comes
        self._paused = False
        self._hidden: deque[tuple[str, int]] = deque()  # what came and is not shown: strings, and where they go on
        self._gone = 0  # characters in front of the text
        self._kept: int | None = None  # text from here on may be read again

    def add(self, text: str) -> None:
        self._hidden.append((text, 0))

    @property
    def hides(self) -> bool:
        """Can reading go on without more text?"""
        return self._paused or bool(self._hidden)

    @property
    def ended(self) -> bool:
        return self.complete and not self._hidden

    def show(self) -> bool:
        """The next piece; False when there is none. A reader that pauses by itself needs none to go on."""
        if self._paused or not self._hidden:
            return self._paused
        text, begin = self._hidden.popleft()
        if begin + PIECE < len(text):
            self._hidden.appendleft((text, begin + PIECE))
        first = self.at if self._kept is None else self._kept
        self.text = self.text[first:] + text[begin : begin + PIECE]
        self.at -= first
        self._gone += first
        if self._kept is not None:
            self._kept = 0
        return True

    @property
    def position(self) -> int:
        """Where we are in all of the text. What lies ahead keeps its position when something in front of it is dropped."""
        return self._gone + self.at

    # ---- reading again

    def keep(self) -> None:
        """`rewind` leads back to here."""
        self._kept = self.at

    def rewind(self) -> None:
        assert self._kept is not None
        self.at, self._kept = self._kept, None
        if len(self.text) - self.at > PIECE:
            self._hidden.appendleft((self.text[self.at + PIECE :], 0))
            self.text = self.text[: self.at + PIECE]

    def let_go(self) -> None:
        self._kept = None

    def place(self) -> int:
        """How far behind the place that is kept we are."""
        assert self._kept is not None
        return self.at - self._kept

    def since(self, place: int) -> str:
        """What has been read since then."""
        assert self._kept is not None
        return self.text[self._kept + place : self.at]

    def go_to(self, place: int) -> None:
        assert self._kept is not None
        self.at = self._kept + place

    # ---- reading

    def more(self) -> Pull[bool]:
        """Waits for text; False when there is no more."""
        if self.ended:
            return False
        size = len(self.text) - self.at
        yield
        return len(self.text) - self.at > size

    def pause(self) -> Pull[None]:
        """Lets others have their turn."""
        self._paused = True
        yield
        self._paused = False

    def before_space(self, end: int) -> int:
        """Where the space begins that stands in front of `end`."""
        tail = self.text[max(self.at, end - MAX_SPACE) : end]
        return end - len(tail) + len(tail.rstrip())

    def take(self, count: int) -> str:
        begin, self.at = self.at, self.at + count
        return self.text[begin : self.at]

    def drop(self, begin: int, end: int) -> None:
        """Takes something out of what is not read yet."""
        self.text = self.text[:begin] + self.text[end:]
        self._gone += end - begin

    def peek(self) -> Pull[str]:
        """The next character; nothing at the end."""
        while self.at == len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def space(self) -> Pull[None]:
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            self.at = found.end()
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def run(self, pattern: "re.Pattern[str]") -> str:
        """What matches of the text that is there."""
        found = pattern.match(self.text, self.at)
        return "" if found is None else self.take(found.end() - self.at)

    def literal(self, text: str) -> Pull[bool]:
        """Is this next? If so it is taken."""
        while True:
            if self.text.startswith(text, self.at):
                self.at += len(text)
                return True
            decided = len(self.text) - self.at >= len(text) or not text.startswith(self.text[self.at :])
            if decided or not (yield from self.more()):
                return False

    def expect(self, text: str) -> Pull[None]:
        if not (yield from self.literal(text)):
            raise Malformed(f"expected {text!r}")

    def until(self, marks: "Marks", most: int) -> Pull[str]:
        """The text before the next of the marks, which is not taken; at most this many characters."""
        most += marks.longest
        while True:
            found = marks.find(self.text, self.at, self.at + most)
            if found is not None:
                return self.take(found[0] - self.at)
            if len(self.text) - self.at >= most or not (yield from self.more()):
                raise Malformed("a mark is missing")

    def next_mark(self, marks: "Marks", dropped: frozenset[str]) -> Pull[tuple[str, str]]:
        """The space and the mark that come next; both are taken. If something else comes, neither is. `dropped` ones vanish."""
        while True:
            found = _SPACE.match(self.text, self.at)
            assert found is not None
            begin = found.end()
            if begin - self.at > MAX_SPACE:
                return "", ""
            if not self.ended and marks.may_grow(self.text, begin):
                yield from self.more()
                continue
            mark = marks.match(self.text, begin)
            if mark and mark in dropped:
                self.drop(begin, begin + len(mark))
                continue
            return (self.take(begin - self.at), self.take(len(mark))) if mark else ("", "")


class Marks:
    """Several strings to look for at once. Of those that begin at the same place the longest counts."""

    def __init__(self, marks: Iterable[str]) -> None:
        ordered = sorted({mark for mark in marks if mark}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._beginnings = frozenset(mark[:i] for mark in ordered for i in range(1, len(mark)))
        self.longest = max(map(len, ordered), default=0)

    def find(self, text: str, at: int, end: int | None = None) -> tuple[int, int] | None:
        """Where the first one begins and ends, as far as the text shows."""
        found = None if self._pattern is None else self._pattern.search(text, at, len(text) if end is None else end)
        return None if found is None else found.span()

    def match(self, text: str, at: int) -> str:
        found = None if self._pattern is None else self._pattern.match(text, at)
        return "" if found is None else found.group()

    def may_grow(self, text: str, at: int) -> bool:
        """Is all of the text from here on the beginning of a (longer) mark?"""
        return at == len(text) or (len(text) - at < self.longest and text[at:] in self._beginnings)

    def safe(self, text: str, at: int) -> int:
        """Up to here the text cannot be part of a mark. There is no whole mark in it."""
        for begin in range(max(at, len(text) - self.longest + 1), len(text)):
            if text[begin:] in self._beginnings:
                return begin
        return len(text)


@lru_cache(maxsize=512)
def marks_of(marks: frozenset[str]) -> Marks:
    return Marks(marks)
