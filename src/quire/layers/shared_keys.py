"""Attention to the keys and values of a layer before."""

from typing import Any

from torch import Tensor

from quire.attn.batch import Batch
from quire.layers.attention import SelfAttention
from quire.layers.linear import MergedLinear
from quire.layers.norm import RMSNorm
from quire.layers.role import Role
from quire.layers.rope import Rope
from quire.ops.qkv import turn
from quire.types.cache import LayerCache


class SharedAttention(SelfAttention):
    """`source` wrote the keys and values. Behind the last layer that writes some only those tokens go on that the batch keeps,
    and this is behind it."""

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        cache: LayerCache,
        rope: Rope | None,
        *,
        source: SelfAttention,
        norm: RMSNorm | None = None,
        bias: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(hidden_size, heads, cache, rope, bias=bias, **more)
        queries = {"q_proj": heads * cache.head_dim}
        self.qkv = MergedLinear(hidden_size, queries, bias=bias, role=Role.COLUMN, cuts=(self.division.cut_queries,))
        self.q_norm = norm
        self.core = source.core

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [K, H] -> [K, H]."""
        final, spec = batch.final, self.core.spec
        query = self.qkv(x, final.tokens).view(len(x), spec.heads, spec.head_dim)
        if isinstance(self.q_norm, RMSNorm):
            query = self.q_norm(query)
        if self.rope is not None:
            table = self.rope.table
            turn(query, *table.rows(final.positions), table.interleaved)
        out: Tensor = self.o_proj(self.core.attend(query, final, None), final.tokens)
        return out

    def tokens_after(self, batch: Batch) -> Any:
        return batch.final.tokens

    def select_residual(self, residual: Tensor, batch: Batch) -> Tensor:  # noqa: ARG002
        return residual
