"""Multi-head latent attention (MLA): the cache holds one latent vector per token, from which the keys and values of all heads
are computed (`attn/reference.py`).
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from quire.attn.backend import AttentionSpec, Latents
from quire.attn.batch import Batch, Tokens, take_rows
from quire.dist.mesh import HeadDivision, Position
from quire.layers.attention import Attention, take_final
from quire.layers.linear import Linear, MergedLinear
from quire.layers.norm import RMSNorm
from quire.layers.parameter import CheckpointTensor, Destination, Role, WeightSlices
from quire.layers.rope import Rope
from quire.ops.arguments import AdapterTable
from quire.types.cache import LayerCache
from quire.types.errors import ModelError

EPS = 1e-6  # epsilon of its own norms, independent of the model's


class UpProjection(Linear):
    """The projection from latents to keys and values: of each head `nope` rows for keys, then `values` rows for values.

    Some checkpoints store both separately next to `path`: k_b_proj [heads, rank, nope] and v_b_proj [heads, values, rank].
    """

    separate = False

    def __init__(self, rank: int, heads: int, nope: int, values: int) -> None:
        cut = HeadDivision(heads, heads, nope + values).cut_queries
        super().__init__(rank, heads * (nope + values), role=Role.COLUMN, cuts=(cut,), as_floats=True)
        self.heads, self.nope, self.values = heads, nope, values

    def by_head(self, changed: Tensor | None = None) -> Tensor:
        """Return the matrix [heads of this rank, nope + values, rank]; `changed`: the matrix with a LoRA adapter applied."""
        return (self.weight if changed is None else changed).view(-1, self.nope + self.values, self.inputs)

    def arrange(self, path: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.separate = f"{path.removesuffix('kv_b_proj')}k_b_proj.weight" in shapes

    def weight_slices(self, path: str) -> WeightSlices:
        if not self.separate:
            return super().weight_slices(path)
        [some], size, rank = self.local_outputs, self.nope + self.values, self.inputs
        heads = some.start // size, some.stop // size
        whole = self.by_head().data
        keys, values = whole[:, : self.nope], whole[:, self.nope :]
        of_keys = Destination(keys.transpose(1, 2), (heads, (0, rank), (0, self.nope)))
        of_values = Destination(values, (heads, (0, self.values), (0, rank)))
        parent = path.removesuffix("kv_b_proj")
        return {
            f"{path}.weight": None,  # some files have it too
            f"{parent}k_b_proj.weight": CheckpointTensor((self.heads, rank, self.nope), (of_keys,)).simple,
            f"{parent}v_b_proj.weight": CheckpointTensor((self.heads, self.values, rank), (of_values,)).simple,
        }


class LatentAttention(nn.Module):
    """Latent attention with its projections. Ranks divide the heads; every rank caches the whole latent row.

    nope, rotary: head dimensions without and with RoPE
    values: head dimension of values
    query_rank: rank of the query projection; None: full rank
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        cache: LayerCache,
        rope: Rope,
        *,
        nope: int,
        rotary: int,
        values: int,
        query_rank: int | None,
        scale: float,
        bias: bool = False,
        last: bool = False,
    ) -> None:
        super().__init__()
        if cache.latent is None:
            raise ModelError("latent attention requires kv_lora_rank; the configuration has none")
        rank = cache.latent
        self.division = HeadDivision(heads, heads, nope + rotary)
        cut, cut_back = self.division.cut_queries, HeadDivision(heads, heads, values).cut_queries
        row = {"kv_a_proj_with_mqa": rank + rotary}
        if query_rank is None:
            if bias:
                raise ModelError("attention_bias in latent attention requires q_lora_rank; the configuration has none")
            parts = {"q_proj": heads * (nope + rotary)} | row
            self.down = MergedLinear(hidden_size, parts, role=Role.COLUMN, cuts=(cut, lambda _: range(rank + rotary)))
            self.q_a_layernorm: RMSNorm | None = None
            self.q_b_proj: Linear | None = None
        else:
            self.down = MergedLinear(hidden_size, {"q_a_proj": query_rank} | row, bias=bias)
            self.q_a_layernorm = RMSNorm(query_rank, EPS)
            self.q_b_proj = Linear(query_rank, heads * (nope + rotary), role=Role.COLUMN, cuts=(cut,))
        self.kv_a_layernorm = RMSNorm(rank, EPS)
        self.kv_b_proj = UpProjection(rank, heads, nope, values)
        self.o_proj = Linear(heads * values, hidden_size, bias=bias, role=Role.ROW, cuts=(cut_back,))
        self.rope, self.nope, self.row, self.last = rope, nope, rank + rotary, last
        self.core = Attention(AttentionSpec(heads, 1, rank + rotary, scale, latent=rank))

    def shard_heads(self, position: Position) -> None:
        """Attend with this rank's heads only; the linear layers are sharded separately. Before loading."""
        self.core.spec = replace(self.core.spec, heads=len(self.division.share(position)[0]))

    def latents(self, changed: Tensor | None = None, table: AdapterTable | None = None) -> Latents:
        norm = self.kv_a_layernorm
        return Latents(norm.weight, norm.eps, self.rope.table, self.kv_b_proj.by_head(changed), self.nope, table)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Return the output [T, H] of x [T, H]; only the batch's final tokens if this is the last attention layer."""
        core, made = self.core, self.down(x, batch.tokens)
        query, rows = made.split((made.shape[1] - self.row, self.row), dim=1)  # type: ignore[no-untyped-call]
        query, after = self.select_residual(query, batch), self.tokens_after(batch)
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            query = self.q_b_proj(self.q_a_layernorm(query), after)
        out = self._attend(query.unflatten(1, (core.spec.heads, -1)), rows, batch)  # type: ignore[no-untyped-call]
        back: Tensor = self.o_proj(out, after)
        return back

    def _attend(self, query: Tensor, rows: Tensor, batch: Batch) -> Tensor:
        """Attend. query [Q, heads, nope + rotary] of the output's tokens, rows [T, rank + rotary] of all tokens."""
        bank = self.kv_b_proj.bank
        lora = batch.tokens.lora
        if bank is None or lora is None:
            return self._run(query, rows, batch, self.latents())
        if bank.table is not None:
            return self._run(query, rows, batch, self.latents(table=bank.table))
        if not any(slot in bank.slots for slot, _ in lora.groups):
            return self._run(query, rows, batch, self.latents())
        slots = lora.slots[[start for start, _, _ in batch.rows]]  # the keys and values of a row depend on its adapter
        shape, out = len(query), query.new_zeros(0)
        for slot in np.unique(np.where(np.isin(slots, [*bank.slots]), slots, 0)).tolist():
            some = np.flatnonzero(slots == slot if slot else ~np.isin(slots, [*bank.slots])).tolist()
            part = take_rows(batch, some)
            index = part.final if self.last else part.tokens
            asked = query[index]
            if self.last and len(part.batch.final.ids) > len(asked):  # a token without a query: it is not final
                asked = torch.cat((asked, asked.new_zeros(1, *asked.shape[1:])))
            weights = bank.slots.get(slot)
            found = self._run(asked, rows[part.tokens], part.batch, self.latents(None if weights is None else weights.whole))
            out = out if len(out) else found.new_empty(shape, found.shape[1])
            out[index] = found[: len(index)]
        return out

    def _run(self, query: Tensor, rows: Tensor, batch: Batch, latents: Latents) -> Tensor:
        core = self.core
        assert core.backend is not None
        return core.backend.run_latent(core.spec, latents, query, rows, core.bound(), batch, core.group, self.last)

    def tokens_after(self, batch: Batch) -> Tokens:
        """Return the tokens of this layer's output."""
        return batch.final.tokens if self.last else batch.tokens

    def select_residual(self, residual: Tensor, batch: Batch) -> Tensor:
        """Return the rows of residual [T, H] that belong to this layer's output."""
        return take_final(residual, batch) if self.last else residual
