"""Bidirectional self-attention of encoder-only models: no KV cache, every sequence is whole in one step."""

import math
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.attn.batch import Batch
from quire.dist.mesh import HeadDivision
from quire.layers.linear import FusedLinear, Linear
from quire.layers.parameter import Role, parameter
from quire.layers.rope import Rope
from quire.ops.packed_attention import attend_packed
from quire.ops.qkv import turn


class PositionBias(Protocol):
    """What is added to logits, by head and by the key's position relative to the query's."""

    table: Tensor  # [heads, 2 * reach + 1] float32; column reach + key - query


class ALiBi(nn.Module):
    """Logits fall with the distance, in both directions; slopes [heads]."""

    table: Tensor

    def __init__(self, slopes: list[float], max_position: int) -> None:
        super().__init__()
        self.slopes, self.reach = slopes, max_position - 1

    def finish(self, device: torch.device) -> None:
        distance = torch.arange(-self.reach, self.reach + 1, device=device).abs()
        self.table = -torch.tensor(self.slopes, dtype=torch.float32, device=device)[:, None] * distance


class RelativeBias(nn.Module):
    """A learned value for each head and bucket of distances: small distances have a bucket each, larger ones share them."""

    table: Tensor
    max_distance = 128  # farther keys share the last bucket

    def __init__(self, buckets: int, heads: int, max_position: int) -> None:
        super().__init__()
        self.weight, self.reach = parameter(buckets, heads), max_position - 1

    def finish(self, device: torch.device) -> None:
        away = torch.arange(-self.reach, self.reach + 1, device=device)  # key - query
        half = len(self.weight) // 2
        exact, size = half // 2, away.abs()
        growth = torch.log(size.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        shared = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
        bucket = torch.where(size < exact, size, shared) + half * (away > 0)
        self.table = self.weight.data[bucket].T.float().contiguous()


class PackedSelfAttention(nn.Module):
    """Projections, RoPE, and attention over all tokens of the same sequence.

    The checkpoint stores q, k and v as one matrix at `<path>.qkv`, or as siblings `<path>.q_proj` ...
    window: largest distance between a query and a key that it sees; None: no limit.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        *,
        bias: bool = True,
        out_bias: bool = True,
        rope: Rope | None = None,
        window: int | None = None,
        position_bias: PositionBias | None = None,
    ) -> None:
        super().__init__()
        self.head_dim, self.window = hidden_size // heads, window
        self.division = HeadDivision(heads, heads, self.head_dim)
        sizes, cut = dict.fromkeys(("q_proj", "k_proj", "v_proj"), hidden_size), self.division.cut_queries
        self.qkv = FusedLinear(hidden_size, sizes, bias=bias, role=Role.COLUMN, cuts=(cut,) * 3)
        self.o_proj = Linear(hidden_size, hidden_size, bias=out_bias, role=Role.ROW, cuts=(cut,))
        self.rope, self.position_bias = rope, position_bias
        self.scale = self.head_dim**-0.5
        self.shard_heads(range(heads))

    def shard_heads(self, heads: range) -> None:
        """Attend with these heads only; the linear layers are sharded separately. Before loading."""
        self.local_heads = heads

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, batch: Batch) -> Tensor: ...

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """x [T, H] -> [T, H]."""
        return self.o_proj(attend_sequences(self, self.qkv(x, batch.tokens), batch), batch.tokens)


def attend_sequences(attention: PackedSelfAttention, qkv: Tensor, batch: Batch) -> Tensor:
    """Return attention's output [T, heads * head_dim]. May overwrite qkv [T, 3 * heads * head_dim]. Overridable by
    __torch_function__.
    """
    if has_torch_function_unary(qkv):
        return handle_torch_function(attend_sequences, (qkv,), attention, qkv, batch)
    heads = attention.local_heads
    qkv = qkv.view(len(qkv), 3 * len(heads), attention.head_dim)
    if attention.rope is not None:
        table = attention.rope.table
        turn(qkv[:, : 2 * len(heads)], *table.rows(batch.positions), table.interleaved)
    query, key, value = qkv.chunk(3, dim=1)
    bias = None if attention.position_bias is None else attention.position_bias.table[heads.start : heads.stop]
    out = attend_packed(
        query, key, value, batch.rows, batch.row_starts, batch.plans, scale=attention.scale, window=attention.window, bias=bias
    )
    return out.flatten(1)
