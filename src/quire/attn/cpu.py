"""Attention on a CPU: row by row, over keys where they lie.

Tokens of short rows, and those that are alone in theirs, go to a kernel of ours (`ops/paged_attention.py`) where it suits. For
torch, a row whose pages follow each other is read in place; a scattered one is gathered first. One query needs no mask, only
the right slice of keys. Several queries of one row are a piece: causal from the beginning of the row, else behind a mask.
Causal pieces of equal length that follow each other are run as one.

    keys of a piece   [ unseen | lowest ......... position | ... last ]        lowest: the window's edge of the first query
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
from quire.ops import paged_attention
from quire.ops.kv import attend, kv_gather, kv_lines
from quire.ops.native import run_decoders
from quire.ops.qkv import Lanes

QUERIES_PER_PIECE = 256  # behind a mask
KEPT_ELEMENTS = 1 << 16  # of a projection whose views are kept for the next step
SHORT = 256  # keys of a row, up to which several queries are quicker by the kernel


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one row, and the keys they see."""

    count: int  # of all rows together
    start: int  # of the keys, counted in tokens from the first page of `pages`; without pages, in the cache's lines
    keys: int
    pages: Tensor | None  # [rows, P] where the keys must be gathered from
    mask: Tensor | None  # [count, keys] bool
    causal: bool  # query i sees keys 0 ... i
    rows: int = 1
    tokens: Tensor | None = None  # [count] where the keys of several rows lie in the cache's lines


@dataclass(frozen=True)
class Several:
    """Rows that follow each other, for the kernel."""

    count: int  # of their tokens
    rows: paged_attention.Rows


def batch_rows(batch: Batch, group: int) -> paged_attention.Rows:
    """All rows of a batch."""
    if ("rows", group) not in batch.plans:
        batch.plans["rows", group] = _several(batch, group, 0, len(batch.rows)).rows
    rows: paged_attention.Rows = batch.plans["rows", group]
    return rows


def all_by_kernel(spec: AttentionSpec, kv: Tensor) -> bool:
    """Does every token go to the kernel? Then what it gets depends neither on how its prompt was cut nor on who is beside it.
    It is worth it where products have that property too, for then a whole decoder does."""
    return not spec.sinks and spec.slopes is None and paged_attention.suits(kv) and run_decoders()


def attend_by_kernel(
    spec: AttentionSpec, heads: Heads, qkv: Tensor, kv: Tensor, batch: Batch, group: int, final: bool
) -> Tensor:
    """Keys and values of all tokens go to their pages, then every query, which the kernel norms and turns, attends."""

    def bind(columns: Tensor, out: Tensor | None) -> paged_attention.PagedAttention:
        return paged_attention.PagedAttention(
            kv, columns, out,
            scale=spec.scale, window=spec.window, soft_cap=spec.soft_cap, rotation=heads.rotation, norms=heads.norms,
            placed=out is not None,
        )  # fmt: skip

    bind(qkv, None).run(batch_rows(batch, group))
    query = qkv[:, : spec.heads * spec.head_dim]
    if final:
        query, batch = batch.take_final(query), batch.final
    out = torch.zeros(query.shape)
    bind(query, out).run(batch_rows(batch, group))
    return out


class CPUAttention(AttentionBackend):
    def __init__(self) -> None:
        self._kv: Tensor | None = None
        self._lines: Tensor | None = None  # [2, kv_heads, tokens, head_dim]
        self._turned_keys = self._values = torch.empty(0)  # [kv_heads, head_dim, tokens], [kv_heads, tokens, head_dim]
        self._nothing = torch.zeros(1, 1, 1)
        self._lanes: Lanes | None = None  # of the latest step

    def refuse(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> list[str]:  # noqa: ARG002
        if spec.latent is not None:
            return [NO_LATENTS]
        return [] if device.type == "cpu" else [f"it runs on CPUs, not on {device.type}"]

    def plan(self, batch: Batch, group: int, spec: AttentionSpec, query: Tensor, kv: Tensor) -> None:  # noqa: ARG002
        tables, plain = batch.groups[group].tables, spec.soft_cap is None and not spec.sinks and spec.slopes is None
        by_kernel = not spec.sinks and spec.slopes is None and paged_attention.suits(kv)
        in_place = kv_lines(kv) is not None
        plan: list[Piece | Several] = []
        for for_kernel, some in groupby(enumerate(batch.rows), lambda item: by_kernel and _short(*item[1][1:])):
            if for_kernel:
                numbers = [row for row, _ in some]
                plan.append(_several(batch, group, numbers[0], numbers[-1] + 1))
                continue
            pieces = [
                piece
                for row, (_, count, length) in some
                for piece in _pieces(tables[row].numpy(), count, length, spec.window, kv.shape[3], in_place)
            ]
            plan += _joined(pieces) if plain else pieces
        batch.plans["cpu", group] = plan

    def run(self, spec: AttentionSpec, query: Tensor, kv: Tensor, batch: Batch, group: int, sinks: Tensor | None) -> Tensor:
        if ("cpu", group) not in batch.plans:
            self.plan(batch, group, spec, query, kv)
        if self._kv is not kv:
            self._look_at(kv)
        plan: list[Piece | Several] = batch.plans["cpu", group]
        plain = spec.soft_cap is None and sinks is None and spec.slopes is None and query.dtype == kv.dtype
        if len(plan) == 1 and isinstance(plan[0], Piece) and plan[0].count == len(query) > 1:
            return self._run_piece(spec, query, kv, plan[0], sinks)
        out, at = query.new_empty(query.shape), 0
        for item in plan:
            part = slice(at, at + item.count)
            if isinstance(item, Several):
                taken, result = query[part].to(kv.dtype).flatten(1), torch.empty(item.count, query.shape[1:].numel())
                call = paged_attention.PagedAttention(
                    kv, taken, result, scale=spec.scale, window=spec.window, soft_cap=spec.soft_cap, placed=True
                )
                call.run(item.rows)
                out[part] = result.view(-1, *query.shape[1:])
            elif plain and item.count == 1 and item.pages is None:
                self._run_single_token(spec, query[at], item, out[at])
            else:
                out[part] = self._run_piece(spec, query[part], kv, item, sinks)
            at += item.count
        out[at:] = 0
        return out

    def run_heads(
        self, spec: AttentionSpec, heads: Heads, qkv: Tensor, kv: Tensor, batch: Batch, group: int, final: bool
    ) -> Tensor:
        if all_by_kernel(spec, kv):
            if heads.rotation is not None and heads.rotation.interleaved:  # the kernel turns by halves alone
                Lanes(qkv, kv).prepare(batch.positions, heads.rotation, heads.norms)
                heads = Heads(sinks=heads.sinks)
            return attend_by_kernel(spec, heads, qkv, kv, batch, group, final)
        lanes = self._lanes
        if lanes is None or lanes.qkv is not qkv or lanes.kv is not kv:
            lanes = Lanes(qkv, kv)
            self._lanes = lanes if qkv.numel() <= KEPT_ELEMENTS else None  # larger ones are not the same memory again
        query = lanes.place(batch.groups[group].write, batch.positions, heads.rotation, heads.norms, heads.cache_scales)
        if final:
            query, batch = batch.take_final(query), batch.final
        return self.run(spec, query, kv, batch, group, heads.sinks).flatten(1)

    def _look_at(self, kv: Tensor) -> None:
        self._kv, self._lines = kv, kv_lines(kv)
        if self._lines is not None:
            self._turned_keys, self._values = self._lines[0].transpose(1, 2), self._lines[1]
        self._nothing = self._nothing.to(kv.dtype)

    def _run_single_token(self, spec: AttentionSpec, query: Tensor, piece: Piece, out: Tensor) -> None:
        """query [heads, head_dim] -> `out`: the keys of its piece are read in place."""
        one, target = query.view(spec.kv_heads, -1, spec.head_dim), out.view(spec.kv_heads, -1, spec.head_dim)
        keys = self._turned_keys.narrow(2, piece.start, piece.keys)
        weights = torch.softmax(torch.baddbmm(self._nothing, one, keys, beta=0, alpha=spec.scale), dim=-1)
        torch.bmm(weights, self._values.narrow(1, piece.start, piece.keys), out=target)

    def _run_piece(self, spec: AttentionSpec, query: Tensor, kv: Tensor, piece: Piece, sinks: Tensor | None) -> Tensor:
        """query [N, heads, head_dim] -> the same."""
        if piece.pages is None:
            assert self._lines is not None
            held = self._lines[:, None]
        else:
            held = kv_gather(kv, piece.pages)
        if piece.tokens is not None:
            together = held[:, 0].index_select(2, piece.tokens).view(2, spec.kv_heads, piece.rows, piece.keys, -1)
            keys, values = together.transpose(1, 2).to(query.dtype)
        else:
            keys, values = held.narrow(3, piece.start, piece.keys).to(query.dtype)  # each [rows, kv_heads, S, head_dim]
        if piece.causal and spec.soft_cap is None and sinks is None and spec.slopes is None:
            by_head = query.reshape(piece.rows, -1, spec.heads, spec.head_dim).transpose(1, 2)  # [rows, heads, N, head_dim]
            shared = spec.heads != spec.kv_heads
            out = F.scaled_dot_product_attention(by_head, keys, values, is_causal=True, scale=spec.scale, enable_gqa=shared)
            return out.transpose(1, 2).flatten(0, 1)
        return self._attend_masked(spec, query, keys, values, piece, sinks)

    def _attend_masked(
        self, spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, piece: Piece, sinks: Tensor | None
    ) -> Tensor:
        mask = _causal(piece.count) if piece.causal else piece.mask
        visible = None if mask is None else mask[None]
        slopes, back = slopes_of(spec, query.device), None
        if slopes is not None:  # the last key is the last query's own
            back = (torch.arange(piece.count)[:, None] + piece.keys - piece.count - torch.arange(piece.keys))[None]
        return attend(
            query[None], keys, values, visible,
            scale=spec.scale, soft_cap=spec.soft_cap, sinks=sinks, slopes=slopes, back=back,
        )[0]  # fmt: skip


def _short(count: int, length: int) -> bool:
    return count == 1 or (count > 1 and length <= SHORT)


def _several(batch: Batch, group: int, first: int, end: int) -> Several:
    """Rows first ... end of a batch, whose tokens are counted from the first of these."""
    starts = batch.row_starts[first : end + 1]
    starts = starts - starts[0] if first else starts
    rows = paged_attention.Rows(batch.groups[group].tables[first:end], batch.kv_lengths[first:end], starts)
    return Several(sum(count for _, count, _ in batch.rows[first:end]), rows)


def _pieces(
    table: npt.NDArray[np.int32], count: int, length: int, window: int | None, page_size: int, in_place: bool
) -> list[Piece]:
    begin = length - count
    if count > 1 and begin == 0 and (window is None or window >= length):
        return [_piece(table, count, 0, length, None, page_size, in_place, causal=True)]
    pieces = []
    for position in range(begin, length, QUERIES_PER_PIECE):
        n = min(QUERIES_PER_PIECE, length - position)
        lowest = 0 if window is None else max(0, position - window + 1)
        mask = None
        if n > 1:
            query_at, key_at = torch.arange(position, position + n).unsqueeze(1), torch.arange(lowest, position + n)
            mask = key_at <= query_at
            if window is not None:
                mask &= key_at > query_at - window
        pieces.append(_piece(table, n, lowest, position + n, mask, page_size, in_place))
    return pieces


def _joined(pieces: list[Piece]) -> list[Piece]:
    joined = []
    for (count, causal, _), alike in groupby(pieces, lambda piece: (piece.count, piece.causal, piece.pages is None)):
        some = list(alike)
        if len(some) == 1 or not causal:
            joined += some
            continue
        pages = [piece.pages for piece in some if piece.pages is not None]
        if pages:
            joined.append(Piece(count * len(some), 0, count, torch.cat(pages), None, True, len(some)))
            continue
        tokens = torch.cat([torch.arange(piece.start, piece.start + count) for piece in some])
        joined.append(Piece(len(tokens), 0, count, None, None, True, len(some), tokens))
    return joined


def _piece(
    table: npt.NDArray[np.int32], count: int, lowest: int, end: int, mask: Tensor | None, page_size: int, in_place: bool,
    causal: bool = False,
) -> Piece:  # fmt: skip
    first, last = lowest // page_size, (end - 1) // page_size
    pages = table[first : last + 1]
    offset = lowest - first * page_size
    if in_place and (len(pages) == 1 or bool((np.diff(pages) == 1).all())):
        return Piece(count, int(pages[0]) * page_size + offset, end - lowest, None, mask, causal)
    return Piece(count, offset, end - lowest, torch.from_numpy(pages.astype(np.int64))[None], mask, causal)


def _causal(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).tril_()
