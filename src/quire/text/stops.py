"""Stop strings in a stream of text.

The text ends as soon as some stop string is complete, read character by character; so the match that *ends* first wins,
and of two that end together the longer. The result does not depend on how the text was cut into chunks.
Text is held back only while it may still become a stop string.
"""

from collections.abc import Sequence


class StopStrings:
    """`include`: the stop string itself is part of the output."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._matchers = [_Matcher(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._include = include
        self._held = ""
        self._stopped_on: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """The text that may be shown now, and the stop string that ended it, if one did. Text after the end is dropped."""
        if self._stopped_on is not None:
            return "", self._stopped_on
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            # every matcher must see the character, and the longest stop string comes first
            complete = [matcher.stop for matcher in self._matchers if matcher.advance(character)]
            if complete:
                self._held, self._stopped_on = "", complete[0]
                return pending[: end if self._include else end - len(complete[0])], complete[0]
        safe = len(pending) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = pending[safe:]
        return pending[:safe], None

    def finish(self) -> str:
        """The text is over: what was held back is text after all."""
        held, self._held = self._held, ""
        return held


class _Matcher:
    """Knuth-Morris-Pratt: `matched` is the length of the longest prefix of the stop string that the text ends with."""

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("a stop string must not be empty")
        self.stop = stop
        self.matched = 0
        self._borders = _borders(stop)

    def advance(self, character: str) -> bool:
        """Is the stop string complete with this character?"""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._borders[self.matched - 1]
        if self.stop[self.matched] == character:
            self.matched += 1
        return self.matched == len(self.stop)


def _borders(text: str) -> list[int]:
    """For every prefix, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return borders
