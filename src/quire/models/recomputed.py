"""Models of transformers whose layers do not fit our KV cache: correct, and slow.

The cache holds token ids. Every step runs all tokens of each of its sequences through the model and keeps the hidden states of
the step's tokens. So tokens do not depend on chunks, prefix hits or preemption; but a decode step costs as much as prefilling
the whole sequence.
"""

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quire.attn.backend import AttentionSpec
from quire.attn.batch import PLAIN, Batch
from quire.layers.attention import Attention, keep
from quire.load.source import Source
from quire.models.fallback import Fallback
from quire.models.fallback_checks import DIGITS, RADIX
from quire.models.fallback_interface import find_class
from quire.ops.kv import kv_write
from quire.types.errors import ModelError

if TYPE_CHECKING:
    from quire.config.facts import ModelFacts

logger = logging.getLogger(__name__)
TOLERANCE = 0.02  # relative; a token that sees what follows changes far more than rounding does


class TokenPages(Attention):
    """A cache of token ids, as digits that every floating-point type represents exactly."""

    def __init__(self) -> None:
        super().__init__(AttentionSpec(1, 1, DIGITS, 1.0))

    def bind(self, kv: Tensor, group: int, backend: str = "auto", dtype: torch.dtype | None = None) -> None:  # noqa: ARG002
        self.kv, self.group, self.dtype = kv, group, dtype or kv.dtype

    def write(self, ids: Tensor, batch: Batch) -> None:
        powers = RADIX ** torch.arange(DIGITS, device=ids.device)
        digits = (ids[:, None] // powers % RADIX)[:, None].to(self.dtype)
        kv_write(self.bound(), digits, digits, batch.groups[self.group].write)

    def read(self, batch: Batch, row: int, length: int) -> Tensor:
        """Return the first `length` token ids of a row's sequence [length] int64."""
        kv, table = self.bound(), batch.groups[self.group].tables
        pages = table[row, : -(-length // kv.shape[3])].long()
        digits = kv[pages, 0, 0].flatten(0, 1)[:length].long()
        return (digits * RADIX ** torch.arange(DIGITS, device=digits.device)).sum(-1)


class Recomputed(Fallback):
    def __init__(self, facts: "ModelFacts") -> None:
        nn.Module.__init__(self)
        self.config, self.kind = find_class(facts)
        self.facts = facts
        self.attentions, self.recurrents = [TokenPages()], []

    def fill(self, source: Source | None, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        logger.warning(
            "%s is run without a cache of keys and values, every token as long as all before it: %s",
            self.facts.architecture, self.facts.recomputed,
        )  # fmt: skip
        model = self.build("eager", dtype, device, seed) if source is None else self.load(source, device, dtype, "eager")
        self.take(model)
        self.trunk.requires_grad_(False)
        self.head.requires_grad_(False)
        self._check(device)

    def forward(self, batch: Batch) -> Tensor:
        tokens = self.attentions[0]
        assert isinstance(tokens, TokenPages)
        tokens.write(batch.ids, batch)
        most = self.facts.vocab_size - 1
        parts = [
            self._run(tokens.read(batch, row, length).clamp_(max=most))[length - count :]
            for row, (_, count, length) in enumerate(batch.rows)
            if count
        ]
        return keep(torch.cat(parts), batch)

    def _run(self, ids: Tensor) -> Tensor:
        """ids [n] -> hidden states [n, H]."""
        out: Tensor = self.trunk(input_ids=ids[None], use_cache=False)[0]
        return out[0]

    def _check(self, device: torch.device) -> None:
        """Raise ModelError if later tokens change the hidden states of earlier ones."""
        size = self.facts.vocab_size
        first, second = (torch.tensor(ids, device=device) % size for ids in ((3, 5, 7, 9, 11), (3, 5, 7, 10, 4)))
        try:
            with torch.inference_mode():
                one, other = (self._run(ids) for ids in (first, second))
                alone = self._run(first[:3])
                count = self.logits(one, PLAIN).shape[-1]
        except Exception as error:
            raise ModelError(
                f"{self.facts.architecture} cannot be run through transformers: a trial run fails ({error})"
            ) from error
        if one.shape != (5, one.shape[-1]) or count != size:
            raise ModelError(
                f"{self.facts.architecture} cannot be run through transformers: it gives {count} logits of {one.shape[0]} "
                f"states for 5 tokens of a vocabulary of {size}"
            )
        if not one.isfinite().all():
            return  # random or broken weights: the check would compare NaN
        for others in (other[:3], alone):
            if (one[:3] - others).norm() > TOLERANCE * one[:3].norm():
                raise ModelError(
                    f"{self.facts.architecture} cannot be run through transformers: what comes later changes what its tokens "
                    "are (it is not causal)"
                )
