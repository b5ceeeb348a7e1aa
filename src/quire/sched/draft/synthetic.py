"""Drafts of a given quality, for benchmarks with any model, also a random one: whoever was answered once is expected to be
answered so again, but for as many wrong guesses as were asked for. The first answer to a prompt has no drafts; none changes.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence

from quire.sched.draft.base import Text

MOST_PROMPTS, MOST_ANSWERS = 4096, 4


class SyntheticDrafter:
    def __init__(self, rates: Sequence[float], vocabulary: int) -> None:
        """`rates`: of each draft, if all before it were right."""
        self._rates, self._vocabulary = tuple(rates), vocabulary
        self._answers: OrderedDict[tuple[tuple[str, ...], bytes], list[array[int]]] = OrderedDict()

    def propose(self, text: Text, most: int) -> Sequence[int]:
        known, at = self._answers.get(_key(text), ()), len(text.tokens) - text.prompt
        output = text.tokens[text.prompt :]
        drafts: list[int] = []
        for answer in known:
            if answer[:at] == output:
                drafts = answer[at : at + min(most, len(self._rates))].tolist()
                break
        for i, rate in enumerate(self._rates[: len(drafts)]):
            if _chance(len(text.tokens), i) >= rate:
                drafts[i] = (drafts[i] + 1) % self._vocabulary
                break  # what comes behind a wrong one is never looked at
        return drafts

    def finished(self, text: Text) -> None:
        answers = self._answers.setdefault(key := _key(text), [])
        self._answers.move_to_end(key)
        output = text.tokens[text.prompt :]
        if output not in answers:
            answers.insert(0, output)
            del answers[MOST_ANSWERS:]
        if len(self._answers) > MOST_PROMPTS:
            self._answers.popitem(last=False)


def _key(text: Text) -> tuple[tuple[str, ...], bytes]:
    return text.scope, text.tokens[: text.prompt].tobytes()


def _chance(position: int, draft: int) -> float:
    """From 0 to 1, the same for the same place."""
    x = (position * 0x9E3779B97F4A7C15 + draft * 0xD1B54A32D192ED03) & 2**64 - 1
    x = (x ^ x >> 31) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    return float((x ^ x >> 29) >> 11 & 2**40 - 1) / 2**40
