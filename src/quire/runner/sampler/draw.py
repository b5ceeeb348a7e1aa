"""The draw itself: Gumbel-max over what the filters left."""

import numpy as np
import torch
from torch import Tensor

from quire.runner.sampler.extremes import largest
from quire.runner.sampler.random import as_signed, gumbel, row_keys, steps
from quire.runner.sampler.stage import Columns, Rows
from quire.types.plan import Admission

FEW = 8  # noise is made for the tokens left alone when they are less than a FEW-th of the vocabulary


class Draw:
    def __init__(self, columns: Columns, vocabulary: int) -> None:
        self.seed = columns.make(np.int64, 0)
        self._steps = steps(vocabulary, columns.device)  # [V]

    def admit(self, slot: int, admission: Admission) -> None:
        self.seed[slot] = as_signed(admission.seed)

    def choose(self, logits: Tensor, rows: Rows) -> Tensor:
        """logits [N, V] -> ids [N] int64."""
        keys = row_keys(self.seed.at(rows.slot), rows.end)
        if logits.device.type == "cpu":
            return torch.stack([self._choose_one(row, key) for row, key in zip(logits, keys, strict=True)])
        return largest(gumbel(keys[:, None], self._steps).add_(logits))[1]

    def _choose_one(self, logits: Tensor, key: Tensor) -> Tensor:
        """One row on a CPU: it fits the processor's cache, and tokens that were filtered out need no noise."""
        left = logits.numpy() > -np.inf
        if np.count_nonzero(left) * FEW > len(logits):
            return largest(gumbel(key, self._steps).add_(logits)[None])[1][0]
        kept = torch.from_numpy(np.flatnonzero(left))
        if not len(kept):
            return torch.zeros_like(key)
        return kept[largest(gumbel(key, self._steps[kept]).add_(logits[kept])[None])[1][0]]
