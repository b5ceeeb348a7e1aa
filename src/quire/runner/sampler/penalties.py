"""Penalties on what was already said, computed anew each step from the slot's own tokens.

Nothing is counted along the way, so preemption, replay and forks need no care here.
"""

import numpy as np
import torch
from torch import Tensor

from quire.ops.arguments import Factors
from quire.ops.sample_penalties import penalize
from quire.runner.sampler.stage import LEAST, MOST, Columns, Rows
from quire.runner.transfer import Longs, upload
from quire.types.plan import Admission

COUNTED_AT_ONCE = 64  # rows a GPU has memory to count for
NEUTRAL = (1.0, 0.0, 0.0)  # repetition, frequency, presence


class Penalties:
    """repetition_penalty over prompt and output; frequency_penalty and presence_penalty over the output alone."""

    fields = ("repetition_penalty", "frequency_penalty", "presence_penalty")

    def __init__(self, columns: Columns, vocabulary: int) -> None:
        self._device, self._vocabulary = columns.device, vocabulary
        self._columns = [columns.make(np.float32, neutral) for neutral in NEUTRAL]
        self._factors = Factors(*(column.there for column in self._columns))
        self._counts: Tensor | None = None

    def wants(self, admission: Admission) -> bool:
        return _factors(admission) != NEUTRAL

    def admit(self, slot: int, admission: Admission) -> None:
        for column, value in zip(self._columns, _factors(admission), strict=True):
            column[slot] = value

    def retire(self, slot: int) -> None:
        for column in self._columns:
            column.reset(slot)

    def active(self, rows: Rows) -> bool:
        return self._penalized(rows).size > 0

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        index = self._penalized(rows)
        rows = rows.take(index)
        if self._device.type == "cuda" and self._counts is None:
            self._counts = torch.zeros(COUNTED_AT_ONCE, self._vocabulary, dtype=torch.int32, device=self._device)
        row, longest = upload(index, self._device), int(rows.ends.max())
        penalize(logits, row, rows.slot, rows.end, rows.prompt, rows.tokens, self._factors, self._counts, longest)
        return logits

    def _penalized(self, rows: Rows) -> Longs:
        used = np.logical_or.reduce([column.used(rows.slots) for column in self._columns])
        return np.flatnonzero(used)


def _factors(admission: Admission) -> tuple[float, float, float]:
    params = admission.params
    repetition = min(max(params.repetition_penalty, LEAST), MOST)  # what float32 would call 0 or infinity makes NaN of a logit
    return repetition, params.frequency_penalty, params.presence_penalty
