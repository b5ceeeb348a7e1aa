"""bad_words: the token that would complete a forbidden sequence is forbidden.

Only drawn tokens count as the beginning of a sequence: a word begun by the prompt may be completed, as in vLLM.
"""

import numpy as np
import torch
from torch import Tensor

from quire.runner.sampler.stage import Rows
from quire.runner.transfer import Longs, upload
from quire.types.plan import Admission

ANYTHING = -1  # in a beginning: matches whatever is there


class BadWords:
    fields = ("bad_words",)

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._words: dict[int, tuple[tuple[int, ...], ...]] = {}

    def wants(self, admission: Admission) -> bool:
        return any(admission.bad_words)

    def admit(self, slot: int, admission: Admission) -> None:
        words = tuple(word for word in admission.bad_words if word)
        if words:
            self._words[slot] = words

    def retire(self, slot: int) -> None:
        self._words.pop(slot, None)

    def active(self, rows: Rows) -> bool:
        return bool(self._words) and not self._words.keys().isdisjoint(rows.slots.tolist())

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        row, beginning, last = (upload(array, self._device) for array in self._collect(rows))
        width = beginning.shape[1]
        position = rows.end[row, None] - width + torch.arange(width, device=self._device)  # [W, width]
        recent = rows.tokens[rows.slot[row, None], position.clamp(min=0)]
        matched = ((recent == beginning) & (position >= rows.prompt[row, None])) | (beginning == ANYTHING)
        # added, because a token may be the last of several words, and -inf must win over the words that do not match
        ban = torch.zeros_like(last, dtype=logits.dtype).masked_fill_(matched.all(dim=1), -torch.inf)
        return logits.index_put_((row, last), ban, accumulate=True)

    def _collect(self, rows: Rows) -> tuple[Longs, Longs, Longs]:
        """For every word of every row: the row [W], the beginning [W, width] ending where the row ends, the last token [W]."""
        found = [(row, word) for row, slot in enumerate(rows.slots.tolist()) for word in self._words.get(slot, ())]
        width = max(len(word) for _, word in found) - 1
        beginning = np.full((len(found), width), ANYTHING, np.int64)
        for i, (_, word) in enumerate(found):
            beginning[i, width - len(word) + 1 :] = word[:-1]
        return np.array([row for row, _ in found], np.int64), beginning, np.array([word[-1] for _, word in found], np.int64)
