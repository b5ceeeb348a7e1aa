"""Suffix decoding: how did texts go on that ended like this one? In this text itself, and in earlier outputs of the same scope.

    text        ... the quick brown │ ?           the longest end that stood somewhere before: "quick brown"
    elsewhere   ... a quick brown │ fox jumped     two of three went on with "fox": likely enough, and so on from there
                ... quick brown │ fox ran
                ... quick brown │ bear

It is a walk down a tree of suffixes of bounded depth that is never built: the text itself is searched, earlier outputs have an
index by pairs of tokens. What is kept is bounded, in generations: when the younger is full, the older is forgotten.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.sched.draft.base import Longs, Text, matches

MOST_TOKENS = 1 << 18  # kept, of all scopes together: at most some 50 MB with the index
MOST_SCOPES = 1024
MOST_PLACES = 128  # that are looked at
GAP = -1  # between two outputs


class Generation:
    """Outputs end to end, and where each pair of tokens stands."""

    def __init__(self) -> None:
        self.tokens = array("i", [GAP])
        self.latest: dict[int, int] = {}  # pair -> the last place behind one
        self.before = array("i", [0])  # [tokens] place behind a pair -> the one before, 0 = none
        self.texts = 0

    def add(self, output: "array[int]") -> None:
        self.texts += 1
        start = len(self.tokens)
        self.tokens.extend(output)
        self.tokens.append(GAP)
        self.before.extend([0] * (len(output) + 1))
        for i in range(1, len(output)):
            pair, place = output[i - 1] << 32 | output[i], start + i + 1
            self.before[place] = self.latest.get(pair, 0)
            self.latest[pair] = place

    def places(self, first: int, second: int) -> list[int]:
        """The latest behind these two tokens, falling."""
        place, found = self.latest.get(first << 32 | second, 0), list[int]()
        while place and len(found) < MOST_PLACES:
            found.append(place)
            place = self.before[place]
        return found


class Scope:
    def __init__(self) -> None:
        self.young, self.old = Generation(), Generation()

    @property
    def size(self) -> int:
        return len(self.young.tokens) + len(self.old.tokens)

    def add(self, output: "array[int]", most_texts: int, most_tokens: int) -> None:
        self.young.add(output)
        if 2 * self.young.texts >= most_texts or 2 * len(self.young.tokens) >= most_tokens:
            self.young, self.old = Generation(), self.young


class SuffixDrafter:
    def __init__(self, depth: int, texts: int, factor: float, least: float, most_tokens: int = MOST_TOKENS) -> None:
        """`depth`: tokens of an end that are compared, and drafts at most. `texts`: outputs of a scope that are kept, or 0.
        `factor`: drafts for each equal token. `least`: how likely a draft is at least, by what is known."""
        self._depth, self._texts, self._factor, self._least, self._most_tokens = depth, texts, factor, least, most_tokens
        self._scopes: OrderedDict[tuple[str, ...], Scope] = OrderedDict()

    def propose(self, text: Text, most: int) -> Sequence[int]:
        most = min(most, self._depth)
        tokens = np.frombuffer(text.tokens, np.int32)  # the array cannot grow as long as this is there
        places, length = matches(tokens, 1, self._depth)
        best = self._walk(tokens, places[-MOST_PLACES:], length, most)
        scope = self._scopes.get(text.scope)
        for generation in () if scope is None or len(tokens) < 2 else (scope.young, scope.old):
            places, equal = self._find(generation, tokens)
            if equal > length or (equal and equal == length and not best):
                found = self._walk(np.frombuffer(generation.tokens, np.int32), places, equal, most)
                best, length = (found, equal) if found else (best, length)
        return best

    def finished(self, text: Text) -> None:
        output = text.tokens[text.prompt :]
        if len(output) < 2 or not self._texts:
            return
        scope = self._scopes.setdefault(text.scope, Scope())
        self._scopes.move_to_end(text.scope)
        scope.add(output[: self._most_tokens // 4], self._texts, self._most_tokens)
        size = sum(each.size for each in self._scopes.values())
        while len(self._scopes) > 1 and (size > self._most_tokens or len(self._scopes) > MOST_SCOPES):
            size -= self._scopes.popitem(last=False)[1].size

    def _find(self, generation: Generation, tokens: npt.NDArray[np.int32]) -> tuple[Longs, int]:
        """The latest places behind the longest end of the text that stands there, and its length."""
        places, length = np.array(generation.places(int(tokens[-2]), int(tokens[-1])), np.int64), 2
        if not len(places):
            return places, 0
        kept = np.frombuffer(generation.tokens, np.int32)
        while length < min(self._depth, len(tokens)):
            longer = places[kept[np.maximum(places - length - 1, 0)] == tokens[-length - 1]]
            if not len(longer):
                break
            places, length = longer, length + 1
        return places, length

    def _walk(self, tokens: npt.NDArray[np.int32], places: Longs, length: int, most: int) -> list[int]:
        """Goes on as most of the places do, as long as that is likely."""
        drafts: list[int] = []
        likely, most = 1.0, min(most, int(self._factor * length))
        while len(places) and len(drafts) < most:
            known = tokens[np.minimum(places, len(tokens) - 1)]
            ahead = np.array([GAP, *drafts], np.int32)  # behind the end of the text itself: what was drafted
            nexts = np.where(places < len(tokens), known, ahead[np.maximum(places - len(tokens) + 1, 0)])
            values, counts = np.unique(nexts[nexts != GAP], return_counts=True)
            if not len(values):
                break
            best = int(values[counts.argmax()])
            likely *= counts.max() / len(nexts)
            if likely < self._least:
                break
            drafts.append(best)
            places = places[nexts == best] + 1
        return drafts
