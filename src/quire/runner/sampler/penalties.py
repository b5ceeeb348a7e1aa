"""Penalties on what was already said, computed anew each step from the slot's own tokens.

Nothing is counted along the way, so preemption, replay and forks need no care here.
"""

import numpy as np
import torch
from torch import Tensor

from quire.runner.sampler.stage import Column, Rows
from quire.runner.transfer import Longs, upload
from quire.types.plan import Admission


class Penalties:
    """repetition_penalty over prompt and output; frequency_penalty and presence_penalty over the output alone."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._repetition = Column(slots, np.float32, 1.0, device)
        self._frequency = Column(slots, np.float32, 0.0, device)
        self._presence = Column(slots, np.float32, 0.0, device)

    def admit(self, slot: int, admission: Admission) -> None:
        self._repetition[slot] = admission.params.repetition_penalty
        self._frequency[slot] = admission.params.frequency_penalty
        self._presence[slot] = admission.params.presence_penalty

    def retire(self, slot: int) -> None:
        for column in (self._repetition, self._frequency, self._presence):
            column.reset(slot)

    def active(self, rows: Rows) -> bool:
        return self._penalized(rows).size > 0

    def apply(self, logits: Tensor, rows: Rows) -> Tensor:
        index = self._penalized(rows)
        rows = rows.take(index)
        row = upload(index, self._device)[:, None]  # [n, 1]
        place = torch.arange(int(rows.ends.max()), device=self._device)  # [m]
        said = rows.tokens[rows.slot, : len(place)].long()  # [n, m]
        # places past a row's end repeat its first token: each value below depends on the token alone, so repeats agree
        said = torch.where(place < rows.end[:, None], said, said[:, :1])
        values = logits[row, said]
        repetition = self._repetition.at(rows.slot)[:, None]
        values = torch.where(values > 0, values / repetition, values * repetition)
        if self._counts_matter(rows):
            drawn = (place >= rows.prompt[:, None]) & (place < rows.end[:, None])
            counts = logits.new_zeros(len(index), logits.shape[1]).scatter_add_(1, said, drawn.float()).gather(1, said)
            values -= self._frequency.at(rows.slot)[:, None] * counts
            values -= self._presence.at(rows.slot)[:, None] * (counts > 0)
        return logits.index_put_((row, said), values)

    def _penalized(self, rows: Rows) -> Longs:
        used = self._repetition.used(rows.slots) | self._frequency.used(rows.slots) | self._presence.used(rows.slots)
        return np.flatnonzero(used)

    def _counts_matter(self, rows: Rows) -> bool:
        return bool((self._frequency.used(rows.slots) | self._presence.used(rows.slots)).any())
