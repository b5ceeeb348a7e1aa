"""Filters of rows that sample at random: temperature, min_p, top_k and top_p; and the searches over the vocabulary."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.runner.sampler.stage import LEAST, Columns, ColumnStage, Rows
from quire.runner.transfer import Longs, upload
from quire.types.plan import Admission

MASS_CANDIDATES = 1024  # most likely tokens, which hold the mass of nearly every row


def largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return value [N] and index [N] int64 of the maximum of logits [N, V]; the first of equals. NaN counts as largest."""
    if logits.device.type != "cpu":
        value, index = logits.max(dim=1)
        return value, index
    index = torch.from_numpy(np.argmax(logits.numpy(), axis=1))  # vectorized, unlike torch's
    return logits.gather(1, index[:, None]).squeeze(1), index


def top_values(logits: Tensor, count: int) -> Tensor:
    """Return the `count` largest values of logits [N, V] per row [N, count], in falling order."""
    if logits.device.type != "cpu":
        if count == logits.shape[1]:
            return logits.sort(dim=1, descending=True).values
        return logits.topk(count, dim=1).values
    values = logits.numpy()
    if count < values.shape[1]:
        values = np.partition(values, values.shape[1] - count, axis=1)[:, -count:]
    return torch.from_numpy(np.sort(values, axis=1)[:, ::-1].copy())


def drop_below(logits: Tensor, least: Tensor) -> Tensor:
    """Set logits [N, V] that are smaller than least [N] to -inf, in place."""
    if logits.device.type != "cpu":
        return logits.masked_fill_(logits < least[:, None], -torch.inf)
    below = least.nextafter(torch.tensor(-torch.inf))  # threshold_ keeps what is strictly larger, an order faster than masks
    for row, bound in zip(logits, below.tolist(), strict=True):
        torch.threshold_(row, bound, -torch.inf)
    return logits


class Temperature(ColumnStage):
    """temperature: divides the logits. A slot at 0 is greedy and is not filtered."""

    fields = ("temperature",)

    def __init__(self, columns: Columns) -> None:
        self.column = columns.make(np.float32, 1.0)
        super().__init__(self.column)

    def admit(self, slot: int, admission: Admission) -> None:
        self.column[slot] = 0.0 if admission.params.greedy else admission.params.temperature

    def random(self, slots: Longs) -> npt.NDArray[np.bool_]:
        """Return [N] which of these slots sample at random."""
        random: npt.NDArray[np.bool_] = self.column.host[slots] > 0
        return random

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        return logits.div_(self.column.at(rows.slot)[:, None])


class MinP(ColumnStage):
    """min_p: drops tokens less likely than min_p times the most likely one."""

    fields = ("min_p",)

    def __init__(self, columns: Columns) -> None:
        self.column = columns.make(np.float32, 0.0)
        super().__init__(self.column)

    def admit(self, slot: int, admission: Admission) -> None:
        self.column[slot] = admission.params.min_p

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        """Compute p ≥ min_p · max p on logits: x ≥ max x + log min_p; log 0 = -inf keeps everything."""
        least = logits.amax(dim=1) + self.column.at(rows.slot).log()
        return drop_below(logits, least)


class Truncation(ColumnStage):
    """top_k and top_p.

    top_k   every token at least as likely as the k-th most likely one stays, ties included
    top_p   of what is left, the smallest set whose mass reaches p stays, the lower id first among ties; never empty
    """

    fields = ("top_k", "top_p")

    def __init__(self, columns: Columns, vocabulary: int) -> None:
        self._device = columns.device
        self._vocabulary = vocabulary
        self.top_k = columns.make(np.int64, vocabulary)
        self.top_p = columns.make(np.float32, 1.0)
        super().__init__(self.top_k, self.top_p)

    def admit(self, slot: int, admission: Admission) -> None:
        k = admission.params.top_k
        self.top_k[slot] = k if 0 < k < self._vocabulary else self._vocabulary
        self.top_p[slot] = max(admission.params.top_p, LEAST)  # 0 would keep no token

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        index = np.flatnonzero(self.used(rows))
        if len(index) == len(rows.slots):
            return self._cut(logits, rows)
        chosen = upload(index, self._device)
        logits[chosen] = self._cut(logits[chosen], rows.take(index))
        return logits

    def _cut(self, logits: Tensor, rows: Rows) -> Tensor:
        k, p = self.top_k.at(rows.slot), self.top_p.at(rows.slot)
        nucleus = bool(self.top_p.used(rows.slots).any())
        look = self._candidates(rows, nucleus)
        values = top_values(logits, look)
        if self.top_k.used(rows.slots).any():
            least = values.gather(1, (k - 1).clamp(max=look - 1)[:, None])
            least = torch.where((k < self._vocabulary)[:, None], least, -torch.inf)
            drop_below(logits, least.squeeze(1))
            values = torch.where(values >= least, values, -torch.inf)
        return cut_to_mass(logits, values, p) if nucleus else logits

    def _candidates(self, rows: Rows, nucleus: bool) -> int:
        """Return how many of the largest values are computed first.

        More can only be added after the device was asked whether they suffice, which is free on a CPU only.
        """
        if nucleus and self._device.type != "cpu":
            return self._vocabulary
        ks = self.top_k.host[rows.slots]
        look = int(np.where(ks < self._vocabulary, ks, MASS_CANDIDATES if nucleus else 1).max())
        return look if look < self._vocabulary // 4 else self._vocabulary


def cut_to_mass(logits: Tensor, values: Tensor, p: Tensor) -> Tensor:
    """Keep the most likely tokens up to mass p [N]. `values` [N, look] are the largest of `logits` [N, V], falling.

    values   9  7  7  7  5  2 ...        mass before each     0  .6  .7  .8  .9 ...
             └─ kept ─┘                  p = .75: three are kept, the threshold is 7, two of the three sevens stay
    """
    likeliest = logits.softmax(dim=1).amax(dim=1, keepdim=True)  # many times faster than logsumexp where most are -inf
    mass = (values - values[:, :1]).exp_().mul_(likeliest).cumsum(dim=1)
    share = torch.where(p < 1, p, torch.inf)[:, None]
    before = torch.cat([torch.zeros_like(mass[:, :1]), mass[:, :-1]], dim=1)
    count = (before < share).sum(dim=1, keepdim=True)
    threshold = values.gather(1, count - 1)
    at_threshold = count - (values > threshold).sum(dim=1, keepdim=True)  # number of tokens at the threshold that stay
    threshold = torch.where(p[:, None] < 1, threshold, -torch.inf)
    complete = values.shape[1] == logits.shape[1]
    if not complete:
        short = (mass[:, -1] < p) & (p < 1) & (values[:, -1] > -torch.inf)
        if short.any():
            _cut_deeper(logits, p, short)
            threshold = threshold.masked_fill_(short[:, None], -torch.inf)
    return _keep(logits, values, threshold, at_threshold)


def _cut_deeper(logits: Tensor, p: Tensor, short: Tensor) -> None:
    """Repeat with all values of the rows whose mass lies deeper."""
    deep = logits[short]
    logits[short] = cut_to_mass(deep, top_values(deep, deep.shape[1]), p[short])


def _keep(logits: Tensor, values: Tensor, threshold: Tensor, at_threshold: Tensor) -> Tensor:
    """Drop tokens below the threshold [N, 1], and of those at it all but the first `at_threshold` [N, 1]."""
    drop_below(logits, threshold.squeeze(1))
    finite = threshold > -torch.inf
    if logits.device.type != "cpu":
        equal = (logits == threshold) & finite
        return logits.masked_fill_(equal & (equal.cumsum(dim=1) > at_threshold), -torch.inf)
    at_border = (values == threshold).sum(dim=1, keepdim=True) > at_threshold
    at_end = (values[:, -1:] == threshold) & (values.shape[1] < logits.shape[1])
    crowded = ((at_border | at_end) & finite).squeeze(1)
    if crowded.any():
        equal = logits[crowded] == threshold[crowded]
        logits[crowded] = logits[crowded].masked_fill_(equal & (equal.cumsum(dim=1) > at_threshold[crowded]), -torch.inf)
    return logits
