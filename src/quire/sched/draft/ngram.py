"""Prompt look-up: where the last few tokens stood before, the text went on in some way, and may go on so again."""

from collections.abc import Sequence

import numpy as np

from quire.sched.draft.base import Text, matches


class NgramDrafter:
    def __init__(self, least: int, most: int) -> None:
        """`least` to `most` last tokens have to stand there; the more do, the better."""
        self._least, self._most = least, most

    def propose(self, text: Text, most: int) -> Sequence[int]:
        tokens = np.frombuffer(text.tokens, np.int32)  # the array cannot grow as long as this is there
        places, _ = matches(tokens, self._least, self._most)
        if not len(places):
            return ()
        long = places[
            places <= len(tokens) - most
        ]  # the latest that has as much as is asked for, or else the one with the most
        place = int(long[-1] if len(long) else places[0])
        drafts: list[int] = tokens[place : place + most].tolist()
        return drafts

    def finished(self, text: Text) -> None:
        """Nothing is kept of it."""
