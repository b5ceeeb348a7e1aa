"""Draws draft tokens as the target model will draw them: with the request's parameters and the same random numbers.

Random numbers are a function of seed, position and token id. A drafter that adds the same Gumbel noise to its own logits draws
the target's token whenever the two distributions are close enough, at any temperature. Grammar masks are not applied: the host
computes them for the tokens that the target draws.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.runner.sampler.pipeline import Sampler
from quire.runner.sampler.stage import Rows
from quire.runner.slots import Slots
from quire.runner.transfer import upload_together
from quire.types.plan import Ints


class DraftSampler:
    """`draw` and `latest` are what recorded steps of a draft model call in place of a sampler's."""

    def __init__(self, sampler: Sampler, slots: Slots) -> None:
        self._sampler, self._slots = sampler.for_drafts(), slots

    @property
    def latest(self) -> Tensor:
        return self._sampler.latest

    def plain(self, slot: Ints) -> bool:
        """Return whether `draw` is all that these slots need: no penalties, no logit bias."""
        return self._sampler.plain(slot)

    def draw(self, logits: Tensor, drawer: Tensor, end: Tensor, tokens: Tensor) -> Tensor:
        return self._sampler.draw(self._fit(logits), drawer, end, tokens)

    def rows(self, slot: Ints, end: Ints) -> Rows:
        """Return the rows that draw the tokens of `slot` [N] at positions `end` [N]."""
        slots, ends = slot.astype(np.int64), end.astype(np.int64)
        prompts = self._slots.prompt_length[slots]
        there = upload_together([slots, ends, prompts], self._slots.device)
        return Rows(slots, ends, prompts, there[0], there[1], there[2], self._slots.tokens)

    def guess(self, logits: Tensor, rows: Rows, ids: Tensor | None = None) -> Tensor:
        """Draw one draft token per row and write it to the row's slot.

        logits: [N, W] float32; may be overwritten.
        ids: [W] int64, the target's token id of each column; None: columns are the target's first W tokens.
        Return the token ids [N] int32.
        """
        return self._sampler.guess(self._fit(logits, ids), rows)

    def _fit(self, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        """Return [N, V]: the logits of the target's vocabulary, -inf for tokens that the drafter does not have."""
        vocabulary = self._sampler.vocabulary
        if ids is not None:
            return logits.new_full((len(logits), vocabulary), -torch.inf).index_copy_(1, ids, logits)
        missing = vocabulary - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, :vocabulary]
