"""Self-attention over the paged KV cache."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from quire.attn.backend import AttentionBackend, AttentionSpec, Heads, choose_backend
from quire.attn.batch import Batch, GroupView, Tokens
from quire.dist.mesh import HeadDivision
from quire.layers.linear import HeadsLinear, Linear, MergedLinear
from quire.layers.norm import HeadLayerNorm, RMSNorm, WidthNorms
from quire.layers.parameter import Role, WeightSlices, parameter, rows_of
from quire.layers.rope import Rope
from quire.ops.arguments import HeadNorms
from quire.ops.kv import kv_write
from quire.ops.norm import rms_norm
from quire.ops.qkv import turn
from quire.types.cache import LayerCache
from quire.types.errors import EngineError


class Attention(nn.Module):
    """Write a step's keys and values to their pages, then attend over the pages."""

    def __init__(self, spec: AttentionSpec) -> None:
        super().__init__()
        self.spec = spec
        self.kv: Tensor | None = None  # [pages, 2 (latents: 1), kv_heads, page_size, head_dim]
        self.dtype = torch.float32  # dtype of queries
        self.group = -1
        self.backend: AttentionBackend | None = None

    def bind(self, kv: Tensor, group: int, backend: str = "auto", dtype: torch.dtype | None = None) -> None:
        """Bind the layer to its KV cache and cache group.

        kv: [pages, 2 (latent: 1), kv_heads, page_size, head_dim]
        group: index of the cache group whose page tables address kv
        dtype: dtype of queries; None: that of kv
        """
        expected = (2 if self.spec.latent is None else 1, self.spec.kv_heads, self.spec.head_dim)
        if kv.ndim != 5 or (kv.shape[1], kv.shape[2], kv.shape[4]) != expected:
            raise EngineError(f"the KV cache must fit {self.spec}; got shape {list(kv.shape)}")
        self.kv, self.group, self.dtype = kv, group, dtype or kv.dtype
        self.backend = choose_backend(self.spec, kv.device, self.dtype, backend)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, batch: Batch, sinks: Tensor | None = None) -> Tensor:
        """query [T, heads, head_dim], key and value [T, kv_heads, head_dim] -> [T, heads * head_dim]."""
        kv_write(self.bound(), key, value, batch.groups[self.group].write)
        return self.attend(query, batch, sinks)

    def attend(self, query: Tensor, batch: Batch, sinks: Tensor | None) -> Tensor:
        """query [T, heads, head_dim] -> [T, heads * head_dim]; the step's keys and values are in their pages."""
        kv = self.bound()
        assert self.backend is not None
        return self.backend.run(self.spec, query, kv, batch, self.group, sinks).flatten(1)

    def bound(self) -> Tensor:
        if self.kv is None:
            raise EngineError("an attention layer was run before it was bound to a cache")
        return self.kv


class SelfAttention(nn.Module):
    """Attention with its projections, RoPE and per-head norms.

    fused: the checkpoint stores q, k and v as one matrix at `<path>.qkv`, concatenated or "by key head".
    q_norm, k_norm: per-head norms, applied before RoPE, or after it with `norm_last`.
    width_norm: epsilon of RMSNorms over all heads of q and of k.
    clip: bound of the projections' outputs.
    query_scale: (every, weight); queries are multiplied by 1 + weight * log1p(position // every).
    value_norm: epsilon of an RMSNorm of the values, without weights.
    slopes: ALiBi slope of each head.
    last: the model's last attention layer: only the batch's final tokens go on after it.
    """

    def __init__(
        self,
        hidden_size: int,
        heads: int,
        cache: LayerCache,
        rope: Rope | None,
        *,
        bias: bool = False,
        out_bias: bool = False,
        fused: bool | Literal["by key head"] = False,
        transposed: bool = False,
        q_norm: RMSNorm | HeadLayerNorm | None = None,
        k_norm: RMSNorm | HeadLayerNorm | None = None,
        norm_last: bool = False,
        width_norm: float | None = None,
        clip: float | None = None,
        query_scale: tuple[float, float] | None = None,
        value_norm: float | None = None,
        scale: float | None = None,
        soft_cap: float | None = None,
        sinks: bool = False,
        slopes: Sequence[float] | None = None,
        last: bool = False,
    ) -> None:
        super().__init__()
        head_dim, kv_heads = cache.head_dim, cache.kv_heads
        sizes = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        self.division = HeadDivision(heads, kv_heads, head_dim)
        cuts = self.division.cut_queries, self.division.cut_keys, self.division.cut_keys
        if fused == "by key head":
            self.qkv: Linear = HeadsLinear(hidden_size, self.division, bias=bias, transposed=transposed)
        elif fused:
            three = tuple(sizes.values())
            self.qkv = Linear(
                hidden_size, sum(three), bias=bias, transposed=transposed, role=Role.COLUMN, sections=three, cuts=cuts
            )
        else:
            self.qkv = MergedLinear(hidden_size, sizes, bias=bias, role=Role.COLUMN, cuts=cuts)
        self.o_proj = Linear(heads * head_dim, hidden_size, bias=out_bias, transposed=transposed, role=Role.ROW, cuts=cuts[:1])
        assert (q_norm is None) == (k_norm is None)
        self.q_norm, self.k_norm, self.norm_last, self.clip = q_norm, k_norm, norm_last, clip
        self.query_scale, self.value_norm = query_scale, value_norm
        self.width_norms = None if width_norm is None else WidthNorms(self.division, width_norm)
        unfused = (clip, query_scale, value_norm, width_norm)
        self.prepares = norm_last or any(each is not None for each in unfused) or isinstance(q_norm, HeadLayerNorm)
        self.norms: HeadNorms | None = None
        self.cache_scales: Tensor | None = None  # [2, kv_heads] float32 from the checkpoint, for an 8-bit KV cache
        self.rope = rope
        self.last = last
        scale = head_dim**-0.5 if scale is None else scale
        self.slopes = slopes  # of all heads
        self.core = Attention(AttentionSpec(heads, kv_heads, head_dim, scale, cache.window, soft_cap, sinks))
        self.shard_heads(range(heads), range(kv_heads))

    def shard_heads(self, queries: range, keys: range) -> None:
        """Attend with these heads only; the linear layers are sharded separately. Before loading."""
        self.local_heads, self.local_keys = queries, keys
        slopes = None if self.slopes is None else tuple(self.slopes[queries.start : queries.stop])
        self.core.spec = replace(self.core.spec, heads=len(queries), kv_heads=len(keys), slopes=slopes)
        self.sinks = parameter(len(queries)) if self.core.spec.sinks else None
        for norm, heads in ((self.q_norm, queries), (self.k_norm, keys)):
            if isinstance(norm, HeadLayerNorm):
                norm.shard_heads(heads)

    def weight_slices(self, path: str) -> WeightSlices:
        if self.sinks is None:
            return {}
        return {f"{path}.sinks": rows_of((self.division.queries,), [(self.sinks.data, self.local_heads)])}

    def finish(self, device: torch.device) -> None:  # noqa: ARG002
        if isinstance(self.q_norm, RMSNorm) and isinstance(self.k_norm, RMSNorm) and not self.norm_last:
            self.norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.offset)

    @property
    def heads(self) -> Heads:
        """Return what the attention kernels apply after `prepare_heads`."""
        rotation = None if self.rope is None or self.norm_last else self.rope.table
        return Heads(rotation, self.norms, self.sinks, self.cache_scales)

    def forward(self, x: Any, batch: Batch) -> Tensor:
        """Return the output [T, H] of Rows x [T, H]; only the batch's final tokens if this is the last attention layer."""
        qkv = self.qkv(x, batch.tokens)
        if self.prepares:
            qkv = prepare_heads(self, qkv, batch)
        out: Tensor = self.o_proj(attend_heads(self, qkv, batch), self.tokens_after(batch))
        return out

    def tokens_after(self, batch: Batch) -> Tokens:
        """Return the tokens of this layer's output."""
        return batch.final.tokens if self.last else batch.tokens

    def select_residual(self, residual: Tensor, batch: Batch) -> Tensor:
        """Return the rows of residual [T, H] that belong to this layer's output."""
        return take_final(residual, batch) if self.last else residual


def prepare_heads(attention: SelfAttention, qkv: Tensor, batch: Batch) -> Tensor:
    """Apply the head norms, clipping and scaling that attention kernels do not fuse. Overwrites qkv
    [T, (heads + 2 * kv_heads) * head_dim]. Overridable by __torch_function__.
    """
    if has_torch_function_unary(qkv):
        return handle_torch_function(prepare_heads, (qkv,), attention, qkv, batch)
    spec, rope = attention.core.spec, attention.rope
    lanes = qkv.view(len(qkv), -1, spec.head_dim)
    turning = lanes[:, : spec.heads + spec.kv_heads]
    query, key = turning[:, : spec.heads], turning[:, spec.heads :]
    if attention.width_norms is not None:
        normed = attention.width_norms(query.flatten(1), key.flatten(1))
        query.copy_(normed[0].view_as(query))
        key.copy_(normed[1].view_as(key))
    if attention.clip is not None:
        qkv.clamp_(-attention.clip, attention.clip)
    if attention.value_norm is not None:
        value = lanes[:, spec.heads + spec.kv_heads :]
        value.copy_(rms_norm(value, torch.ones_like(value[0, 0]), attention.value_norm))
    if attention.query_scale is not None:
        every, weight = attention.query_scale
        sharper = torch.log1p(torch.floor(batch.positions.float() / every)) * weight + 1.0
        query.mul_(sharper[:, None, None].to(query.dtype))
    if attention.norm_last and rope is not None:
        cos, sin = (table[batch.positions].unsqueeze(1) for table in (rope.table.cos, rope.table.sin))
        turn(turning, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    for norm, heads in ((attention.q_norm, query), (attention.k_norm, key)):
        if isinstance(norm, HeadLayerNorm):
            heads.copy_(norm(heads))
        elif norm is not None and attention.norm_last:
            heads.copy_(rms_norm(heads, norm.weight, norm.eps, norm.offset))
    return qkv


def attend_heads(attention: SelfAttention, qkv: Tensor, batch: Batch) -> Tensor:
    """Return attention's output [T, heads * head_dim]; only final tokens after the last attention layer. May overwrite qkv
    [T, (heads + 2 * kv_heads) * head_dim]. Overridable by __torch_function__.
    """
    if has_torch_function_unary(qkv):
        return handle_torch_function(attend_heads, (qkv,), attention, qkv, batch)
    core, backend, heads = attention.core, attention.core.backend, attention.heads
    assert backend is not None
    if batch.rotary is not None and batch.rotary.table is not None and heads.rotation is not None:
        heads = replace(heads, rotation=batch.rotary.table)
    return backend.run_heads(core.spec, heads, qkv, core.bound(), batch, core.group, attention.last)


def take_final(x: Tensor, batch: Batch) -> Tensor:
    """Return the rows of x [T, ...] that belong to the batch's final tokens. Overridable by __torch_function__."""
    if has_torch_function_unary(x):
        return handle_torch_function(take_final, (x,), x, batch)
    return batch.take_final(x)


class SharedAttention(SelfAttention):
    """Attention over the keys and values that layer `source` wrote (Gemma 3n and 4).

    It comes after the last layer that writes keys and values, so it only sees the batch's final tokens.
    """

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


def cut_rows(batch: Batch, group: int, chunk: int, page_size: int) -> Batch:
    """Return the same tokens, all of them final, in rows that end at chunk boundaries (chunked attention). Cached per batch.

    Only the cache group `group` may be attended to.
    """
    key = "chunks", group, chunk
    if key in batch.plans:
        found: Batch = batch.plans[key]
        return found
    source, first, rows = list[int](), list[int](), list[tuple[int, int, int]]()
    for row, (start, count, length) in enumerate(batch.rows):
        at, end = length - count, length
        while at < end:
            stop = min(end, at // chunk * chunk + chunk)
            source.append(row)
            first.append(at // chunk * chunk // page_size)
            rows.append((start + at - (length - count), stop - at, stop - at // chunk * chunk))
            at = stop
    tables, device = batch.groups[group].tables, batch.ids.device
    width = min(tables.shape[1], chunk // page_size)
    columns = torch.tensor(first, device=device)[:, None] + torch.arange(width, device=device)
    part = tables[torch.tensor(source, device=device)[:, None], columns.clamp_(max=tables.shape[1] - 1)].contiguous()
    views = [GroupView(part, view.write) if i == group else view for i, view in enumerate(batch.groups)]
    cut = replace(
        batch,
        row_starts=torch.tensor([0, *np.cumsum([count for _, count, _ in rows])], dtype=torch.int32, device=device),
        kv_lengths=torch.tensor([length for _, _, length in rows], dtype=torch.int32, device=device),
        rows=tuple(rows),
        groups=tuple(views),
        plans={},
        logit_tokens=None,
    )
    batch.plans[key] = cut
    return cut
