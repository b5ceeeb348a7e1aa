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
        drafts: list[int] = tokens[int(places[-1]) :][:most].tolist()  # as it went on the last time
        return (drafts * most)[:most]  # and where the text ends: over again, for it is in a loop

    def finished(self, text: Text) -> None:
        """Nothing is kept of it."""
