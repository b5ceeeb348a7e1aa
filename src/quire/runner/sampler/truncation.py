"""top_k and top_p: only the head of the distribution stays.

top_k   every token at least as likely as the k-th most likely one (equals of the k-th stay)
top_p   of what is left, the smallest set whose mass reaches p, the lower id first among equals; never empty
"""

import numpy as np
import torch
from torch import Tensor

from quire.runner.sampler.extremes import drop_below, top_values
from quire.runner.sampler.stage import LEAST, Columns, Rows
from quire.runner.transfer import upload
from quire.types.plan import Admission

FIRST_LOOK = 1024  # as many of the most likely tokens hold the mass of nearly every row


class Truncation:
    fields = ("top_k", "top_p")

    def __init__(self, columns: Columns, vocabulary: int) -> None:
        self._device = columns.device
        self._vocabulary = vocabulary
        self.top_k = columns.make(np.int64, vocabulary)
        self.top_p = columns.make(np.float32, 1.0)

    def admit(self, slot: int, admission: Admission) -> None:
        k = admission.params.top_k
        self.top_k[slot] = k if 0 < k < self._vocabulary else self._vocabulary
        self.top_p[slot] = max(admission.params.top_p, LEAST)  # a share of nothing would keep no token

    def retire(self, slot: int) -> None:
        self.top_k.reset(slot)
        self.top_p.reset(slot)

    def active(self, rows: Rows) -> bool:
        return bool((self.top_k.used(rows.slots) | self.top_p.used(rows.slots)).any())

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        index = np.flatnonzero(self.top_k.used(rows.slots) | self.top_p.used(rows.slots))
        if len(index) == len(rows.slots):
            return self._cut(logits, rows)
        chosen = upload(index, self._device)
        logits[chosen] = self._cut(logits[chosen], rows.take(index))
        return logits

    def _cut(self, logits: Tensor, rows: Rows) -> Tensor:
        k, p = self.top_k.at(rows.slot), self.top_p.at(rows.slot)
        nucleus = bool(self.top_p.used(rows.slots).any())
        look = self._look(rows, nucleus)
        values = top_values(logits, look)
        if self.top_k.used(rows.slots).any():
            least = values.gather(1, (k - 1).clamp(max=look - 1)[:, None])
            least = torch.where((k < self._vocabulary)[:, None], least, -torch.inf)
            drop_below(logits, least.squeeze(1))
            values = torch.where(values >= least, values, -torch.inf)
        return cut_to_mass(logits, values, p) if nucleus else logits

    def _look(self, rows: Rows, nucleus: bool) -> int:
        """How many of the largest values are needed at first. More than a first look means waiting for the device to say
        whether it was enough, which is free on a CPU only."""
        if nucleus and self._device.type != "cpu":
            return self._vocabulary
        ks = self.top_k.host[rows.slots]
        look = int(np.where(ks < self._vocabulary, ks, FIRST_LOOK if nucleus else 1).max())
        return look if look < self._vocabulary // 4 else self._vocabulary


def cut_to_mass(logits: Tensor, values: Tensor, p: Tensor) -> Tensor:
    """Keeps the likeliest tokens up to mass p [N]. `values` [N, look] are the largest of `logits` [N, V], falling.

    values   9  7  7  7  5  2 ...        mass before each     0  .6  .7  .8  .9 ...
             └─ kept ─┘                  p = .75: three are kept, the threshold is 7, two of the three sevens stay
    """
    likeliest = logits.softmax(dim=1).amax(dim=1, keepdim=True)  # many times faster than logsumexp where most are -inf
    mass = (values - values[:, :1]).exp_().mul_(likeliest).cumsum(dim=1)
    share = torch.where(p < 1, p, torch.inf)[:, None]
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=1)
    count = (before < share).sum(dim=1, keepdim=True)
    threshold = values.gather(1, count - 1)
    spare = count - (values > threshold).sum(dim=1, keepdim=True)  # how many tokens at the threshold stay
    threshold = torch.where(p[:, None] < 1, threshold, -torch.inf)
    complete = values.shape[1] == logits.shape[1]
    if not complete:
        short = (mass[:, -1] < p) & (p < 1) & (values[:, -1] > -torch.inf)
        if short.any():
            _cut_deeper(logits, p, short)
            threshold = threshold.masked_fill_(short[:, None], -torch.inf)
    return _keep(logits, values, threshold, spare)


def _cut_deeper(logits: Tensor, p: Tensor, short: Tensor) -> None:
    """The mass lies deeper than we looked: starts over with all values of those rows."""
    deep = logits[short]
    logits[short] = cut_to_mass(deep, top_values(deep, deep.shape[1]), p[short])


def _keep(logits: Tensor, values: Tensor, threshold: Tensor, spare: Tensor) -> Tensor:
    """Drops what is below the threshold [N, 1], and of the tokens at it all but the first `spare` [N, 1]."""
    drop_below(logits, threshold.squeeze(1))
    finite = threshold > -torch.inf
    if logits.device.type != "cpu":
        equal = (logits == threshold) & finite
        return logits.masked_fill_(equal & (equal.cumsum(dim=1) > spare), -torch.inf)
    at_border = (values == threshold).sum(dim=1, keepdim=True) > spare
    at_end = (values[:, -1:] == threshold) & (values.shape[1] < logits.shape[1])
    crowded = ((at_border | at_end) & finite).squeeze(1)
    if crowded.any():
        equal = logits[crowded] == threshold[crowded]
        logits[crowded] = logits[crowded].masked_fill_(equal & (equal.cumsum(dim=1) > spare[crowded]), -torch.inf)
    return logits
