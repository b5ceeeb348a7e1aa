"""Attention on a CPU, row by row, over keys in place where possible.

Rows with one token and short rows go to the C kernel (`ops/paged_attention.py`) if it supports the layer. Otherwise PyTorch
attends: a row with contiguous pages is read in place, a scattered one is gathered first. A single query needs no mask, only a
slice of the keys. Several queries of one row form a chunk: causal if it starts at position 0, otherwise with a mask. Adjacent
causal chunks of equal length are run as one.

    keys of a chunk   [ unseen | lowest ......... position | ... last ]        lowest: window edge of the first query
"""

from dataclasses import dataclass
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.backend import NO_LATENTS, AttentionBackend, AttentionSpec, Heads, slopes_of
from quire.attn.batch import Batch
from quire.attn.spans import attend_spans
from quire.ops import paged_attention
from quire.ops.kv import attend, kv_gather, kv_lines
from quire.ops.native import run_decoders
from quire.ops.order import order_is_fixed
from quire.ops.qkv import Lanes

QUERIES_PER_CHUNK = 256  # with a mask
CACHED_VIEW_ELEMENTS = 1 << 16  # of a projection whose views are reused in the next step
SHORT_ROW_KEYS = 256  # up to which the C kernel is faster for several queries of a row


@dataclass(frozen=True)
class QueryChunk:
    """Consecutive tokens of one row, and the keys they see."""

    count: int  # of all rows together
    start: int  # of the keys, in tokens from the first page of `pages`, or without pages in the cache
    keys: int
    pages: Tensor | None  # [rows, P] pages to gather; None: read in place
    mask: Tensor | None  # [count, keys] bool
    causal: bool  # query i sees keys 0 ... i
    rows: int = 1
    tokens: Tensor | None = None  # [count] token indices of several rows in the cache


@dataclass(frozen=True)
class KernelRows:
    """Adjacent rows for the C kernel."""

    count: int  # of their tokens
    rows: paged_attention.AttentionRows


def batch_rows(batch: Batch, group: int) -> paged_attention.AttentionRows:
    """Return all rows of a batch, for the C kernel."""
    if ("rows", group) not in batch.plans:
        batch.plans["rows", group] = _kernel_rows(batch, group, 0, len(batch.rows)).rows
    rows: paged_attention.AttentionRows = batch.plans["rows", group]
    return rows


def all_by_kernel(spec: AttentionSpec, kv: Tensor) -> bool:
    """Return whether every token goes to the C kernel, which makes attention independent of chunking and of other requests.

    This only pays off where GEMMs have that property, too, or if it is required.
    """
    supported = not spec.sinks and spec.slopes is None and paged_attention.suits(kv)
    return supported and (run_decoders() or order_is_fixed())


def attend_by_kernel(
    spec: AttentionSpec, heads: Heads, qkv: Tensor, kv: Tensor, batch: Batch, group: int, final: bool
) -> Tensor:
    """Write the keys and values of all tokens to their pages, then attend. The kernel applies norms and RoPE."""

    def bind(columns: Tensor, out: Tensor | None) -> paged_attention.PagedAttention:
        return paged_attention.PagedAttention(
            kv, columns, out,
            scale=spec.scale, window=spec.window, soft_cap=spec.soft_cap, rotation=heads.rotation, norms=heads.norms,
            placed=out is not None,
        )  # fmt: skip

    bind(qkv, None).run(batch_rows(batch, group))
    query = qkv[:, : spec.heads * spec.head_dim]
    if final:
        query, qkv, batch = batch.take_final(query), batch.take_final(qkv) if batch.spans else qkv, batch.final
    out = torch.zeros(query.shape)
    bind(query, out).run(batch_rows(batch, group))

    def queries_of(tokens: slice) -> Tensor:
        lanes = Lanes(qkv[tokens].clone(), kv)
        lanes.prepare(batch.rotary_rows[tokens], heads.rotation, heads.norms)
        return lanes.query

    attend_spans(spec, queries_of, kv, batch, group, None, out.view(len(out), spec.heads, -1))
    return out


class CPUAttention(AttentionBackend):
    def __init__(self) -> None:
        self._kv: Tensor | None = None
        self._lines: Tensor | None = None  # [2, kv_heads, tokens, head_dim]
        self._turned_keys = self._values = torch.empty(0)  # [kv_heads, head_dim, tokens], [kv_heads, tokens, head_dim]
        self._nothing = torch.zeros(1, 1, 1)
        self._lanes: Lanes | None = None  # views of the latest step

    def refuse(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> list[str]:  # noqa: ARG002
        if spec.latent is not None:
            return [NO_LATENTS]
        return [] if device.type == "cpu" else [f"it requires a CPU; got {device.type}"]

    def plan(self, batch: Batch, group: int, spec: AttentionSpec, query: Tensor, kv: Tensor) -> None:  # noqa: ARG002
        tables, plain = batch.groups[group].tables, spec.soft_cap is None and not spec.sinks and spec.slopes is None
        by_kernel = not spec.sinks and spec.slopes is None and paged_attention.suits(kv)
        in_place = kv_lines(kv) is not None
        plan: list[QueryChunk | KernelRows] = []
        for for_kernel, some in groupby(enumerate(batch.rows), lambda item: by_kernel and _short(*item[1][1:])):
            if for_kernel:
                numbers = [row for row, _ in some]
                plan.append(_kernel_rows(batch, group, numbers[0], numbers[-1] + 1))
                continue
            chunks = [
                chunk
                for row, (_, count, length) in some
                for chunk in _chunks(tables[row].numpy(), count, length, spec.window, kv.shape[3], in_place)
            ]
            plan += _joined(chunks) if plain else chunks
        batch.plans["cpu", group] = plan

    def run(self, spec: AttentionSpec, query: Tensor, kv: Tensor, batch: Batch, group: int, sinks: Tensor | None) -> Tensor:
        if ("cpu", group) not in batch.plans:
            self.plan(batch, group, spec, query, kv)
        if self._kv is not kv:
            self._bind_cache(kv)
        plan: list[QueryChunk | KernelRows] = batch.plans["cpu", group]
        plain = spec.soft_cap is None and sinks is None and spec.slopes is None and query.dtype == kv.dtype
        if len(plan) == 1 and isinstance(plan[0], QueryChunk) and plan[0].count == len(query) > 1:
            return self._run_chunk(spec, query, kv, plan[0], sinks)
        out, at = query.new_empty(query.shape), 0
        for item in plan:
            part = slice(at, at + item.count)
            if isinstance(item, KernelRows):
                taken, result = query[part].to(kv.dtype).flatten(1), torch.empty(item.count, query.shape[1:].numel())
                call = paged_attention.PagedAttention(
                    kv, taken, result, scale=spec.scale, window=spec.window, soft_cap=spec.soft_cap, placed=True
                )
                call.run(item.rows)
                out[part] = result.view(-1, *query.shape[1:])
            elif plain and item.count == 1 and item.pages is None:
                self._run_single_token(spec, query[at], item, out[at])
            else:
                out[part] = self._run_chunk(spec, query[part], kv, item, sinks)
            at += item.count
        out[at:] = 0
        return out

    def run_heads(
        self, spec: AttentionSpec, heads: Heads, qkv: Tensor, kv: Tensor, batch: Batch, group: int, final: bool
    ) -> Tensor:
        if all_by_kernel(spec, kv):
            if heads.rotation is not None and heads.rotation.interleaved:  # the kernel rotates halves only
                Lanes(qkv, kv).prepare(batch.rotary_rows, heads.rotation, heads.norms)
                heads = Heads(sinks=heads.sinks)
            return attend_by_kernel(spec, heads, qkv, kv, batch, group, final)
        lanes = self._lanes
        if lanes is None or lanes.qkv is not qkv or lanes.kv is not kv:
            lanes = Lanes(qkv, kv)
            self._lanes = lanes if qkv.numel() <= CACHED_VIEW_ELEMENTS else None  # larger projections rarely reuse memory
        query = lanes.place(batch.groups[group].write, batch.rotary_rows, heads.rotation, heads.norms, heads.cache_scales)
        if final:
            query, batch = batch.take_final(query), batch.final
        out = self.run(spec, query, kv, batch, group, heads.sinks)
        attend_spans(spec, lambda tokens: query[tokens], kv, batch, group, heads.sinks, out)
        return out.flatten(1)

    def _bind_cache(self, kv: Tensor) -> None:
        self._kv, self._lines = kv, kv_lines(kv)
        if self._lines is not None:
            self._turned_keys, self._values = self._lines[0].transpose(1, 2), self._lines[1]
        self._nothing = self._nothing.to(kv.dtype)

    def _run_single_token(self, spec: AttentionSpec, query: Tensor, chunk: QueryChunk, out: Tensor) -> None:
        """Write the output of query [heads, head_dim] to `out`; keys are read in place."""
        one, target = query.view(spec.kv_heads, -1, spec.head_dim), out.view(spec.kv_heads, -1, spec.head_dim)
        keys = self._turned_keys.narrow(2, chunk.start, chunk.keys)
        weights = torch.softmax(torch.baddbmm(self._nothing, one, keys, beta=0, alpha=spec.scale), dim=-1)
        torch.bmm(weights, self._values.narrow(1, chunk.start, chunk.keys), out=target)

    def _run_chunk(self, spec: AttentionSpec, query: Tensor, kv: Tensor, chunk: QueryChunk, sinks: Tensor | None) -> Tensor:
        """Return the output [N, heads, head_dim] of query [N, heads, head_dim]."""
        if chunk.pages is None:
            assert self._lines is not None
            held = self._lines[:, None]
        else:
            held = kv_gather(kv, chunk.pages)
        if chunk.tokens is not None:
            together = held[:, 0].index_select(2, chunk.tokens).view(2, spec.kv_heads, chunk.rows, chunk.keys, -1)
            keys, values = together.transpose(1, 2).to(query.dtype)
        else:
            keys, values = held.narrow(3, chunk.start, chunk.keys).to(query.dtype)  # each [rows, kv_heads, S, head_dim]
        if chunk.causal and spec.soft_cap is None and sinks is None and spec.slopes is None:
            by_head = query.reshape(chunk.rows, -1, spec.heads, spec.head_dim).transpose(1, 2)  # [rows, heads, N, head_dim]
            shared = spec.heads != spec.kv_heads
            out = F.scaled_dot_product_attention(by_head, keys, values, is_causal=True, scale=spec.scale, enable_gqa=shared)
            return out.transpose(1, 2).flatten(0, 1)
        return self._attend_masked(spec, query, keys, values, chunk, sinks)

    def _attend_masked(
        self, spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, chunk: QueryChunk, sinks: Tensor | None
    ) -> Tensor:
        mask = _causal(chunk.count) if chunk.causal else chunk.mask
        visible = None if mask is None else mask[None]
        slopes, back = slopes_of(spec, query.device), None
        if slopes is not None:  # the last key belongs to the last query
            back = (torch.arange(chunk.count)[:, None] + chunk.keys - chunk.count - torch.arange(chunk.keys))[None]
        return attend(
            query[None], keys, values, visible,
            scale=spec.scale, soft_cap=spec.soft_cap, sinks=sinks, slopes=slopes, back=back,
        )[0]  # fmt: skip


def _short(count: int, length: int) -> bool:
    return count == 1 or (count > 1 and length <= SHORT_ROW_KEYS)


def _kernel_rows(batch: Batch, group: int, first: int, end: int) -> KernelRows:
    """Return rows first ... end of a batch, with token starts relative to the first of them."""
    starts = batch.row_starts[first : end + 1]
    starts = starts - starts[0] if first else starts
    rotary = None if batch.rotary is None else batch.rotary.rows[batch.rows[first][0] :]
    rows = paged_attention.AttentionRows(batch.groups[group].tables[first:end], batch.kv_lengths[first:end], starts, rotary)
    return KernelRows(sum(count for _, count, _ in batch.rows[first:end]), rows)


def _chunks(
    table: npt.NDArray[np.int32], count: int, length: int, window: int | None, page_size: int, in_place: bool
) -> list[QueryChunk]:
    begin = length - count
    if count > 1 and begin == 0 and (window is None or window >= length):
        return [_chunk(table, count, 0, length, None, page_size, in_place, causal=True)]
    chunks = []
    for position in range(begin, length, QUERIES_PER_CHUNK):
        n = min(QUERIES_PER_CHUNK, length - position)
        lowest = 0 if window is None else max(0, position - window + 1)
        mask = None
        if n > 1:
            query_at, key_at = torch.arange(position, position + n).unsqueeze(1), torch.arange(lowest, position + n)
            mask = key_at <= query_at
            if window is not None:
                mask &= key_at > query_at - window
        chunks.append(_chunk(table, n, lowest, position + n, mask, page_size, in_place))
    return chunks


def _joined(chunks: list[QueryChunk]) -> list[QueryChunk]:
    joined = []
    for (count, causal, _), alike in groupby(chunks, lambda chunk: (chunk.count, chunk.causal, chunk.pages is None)):
        some = list(alike)
        if len(some) == 1 or not causal:
            joined += some
            continue
        pages = [chunk.pages for chunk in some if chunk.pages is not None]
        if pages:
            joined.append(QueryChunk(count * len(some), 0, count, torch.cat(pages), None, True, len(some)))
            continue
        tokens = torch.cat([torch.arange(chunk.start, chunk.start + count) for chunk in some])
        joined.append(QueryChunk(len(tokens), 0, count, None, None, True, len(some), tokens))
    return joined


def _chunk(
    table: npt.NDArray[np.int32], count: int, lowest: int, end: int, mask: Tensor | None, page_size: int, in_place: bool,
    causal: bool = False,
) -> QueryChunk:  # fmt: skip
    first, last = lowest // page_size, (end - 1) // page_size
    pages = table[first : last + 1]
    offset = lowest - first * page_size
    if in_place and (len(pages) == 1 or bool((np.diff(pages) == 1).all())):
        return QueryChunk(count, int(pages[0]) * page_size + offset, end - lowest, None, mask, causal)
    return QueryChunk(count, offset, end - lowest, torch.from_numpy(pages.astype(np.int64))[None], mask, causal)


def _causal(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril_()
