"""The draw itself: Gumbel-max over what the filters left."""

import numpy as np
import torch
from torch import Tensor

from quire.runner.sampler.extremes import largest
from quire.runner.sampler.random import as_signed, gumbel, row_keys
from quire.runner.sampler.stage import Column, Rows
from quire.types.plan import Admission


class Draw:
    def __init__(self, slots: int, device: torch.device) -> None:
        self._seed = Column(slots, np.int64, 0, device)

    def admit(self, slot: int, admission: Admission) -> None:
        self._seed[slot] = as_signed(admission.seed)

    def retire(self, slot: int) -> None:
        self._seed.reset(slot)

    def choose(self, logits: Tensor, rows: Rows) -> Tensor:
        """logits [N, V] -> ids [N] int64."""
        keys = row_keys(self._seed.at(rows.slot), rows.end)
        if logits.device.type == "cpu":
            return torch.stack([_choose_one(row, key) for row, key in zip(logits, keys, strict=True)])
        index = torch.arange(logits.shape[1], device=logits.device)
        return largest(logits + gumbel(keys[:, None], index))[1]


def _choose_one(logits: Tensor, key: Tensor) -> Tensor:
    """One row on a CPU: it fits the processor's cache, and tokens that were filtered out need no noise."""
    kept = torch.from_numpy(np.flatnonzero(logits.numpy() > -np.inf))
    if len(kept) == len(logits):
        return largest((logits + gumbel(key, kept))[None])[1][0]
    if len(kept) == 0:
        return torch.zeros_like(key)
    return kept[largest((logits[kept] + gumbel(key, kept))[None])[1][0]]
