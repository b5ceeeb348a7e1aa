"""Attention in PyTorch, on any device: the reference for the kernels, and latent attention without Triton.

The batch is cut into tiles: up to QUERIES_PER_TILE tokens of one row, or many one-token rows of similar key length. A tile
gathers the pages its queries may see and attends in one call.

    keys of a tile   [ unseen | first page ... | last page . pad ]      pad: another row of the tile is longer
                                ^ origin                ^ kv length
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.backend import NO_LATENTS, AttentionBackend, AttentionSpec, Latents, slopes_of
from quire.attn.batch import Batch
from quire.ops.kv import attend, kv_gather
from quire.ops.qkv import gather_rows, place_rows, turn_queries

QUERIES_PER_TILE = 256
# of all rows of a tile: on a CPU the gathered keys should fit into its cache, on a GPU few launches matter
CPU_KEYS_PER_TILE = 2048
KEYS_PER_TILE = 1 << 17


@dataclass(frozen=True)
class Tile:
    tokens: Tensor  # [B, N] indices into the batch's tokens
    pages: Tensor  # [B, P] page ids
    visible: Tensor  # [B, N, S] bool, S = P * page_size
    back: Tensor  # [B, N, S] positions from key to query
    unseen: tuple[Tensor, Tensor]  # [U] sequence and [U] key index that no query of the tile sees: may be uninitialized


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one row, and the pages they reach."""

    row: int
    token: int  # index of the first in the batch
    count: int
    position: int  # of the first
    first_page: int
    pages: int


class ReferenceAttention(AttentionBackend):
    def refuse(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> list[str]:  # noqa: ARG002
        return [] if spec.latent is None else [NO_LATENTS]

    def plan(self, batch: Batch, group: int, spec: AttentionSpec, query: Tensor, kv: Tensor) -> None:  # noqa: ARG002
        batch.plans["reference", group] = make_tiles(batch, group, spec.window, kv.shape[3])

    def run(self, spec: AttentionSpec, query: Tensor, kv: Tensor, batch: Batch, group: int, sinks: Tensor | None) -> Tensor:
        if ("reference", group) not in batch.plans:
            self.plan(batch, group, spec, query, kv)
        out = torch.zeros_like(query)
        for tile in batch.plans["reference", group]:
            gathered = kv_gather(kv, tile.pages)
            sequence, at = tile.unseen
            gathered.transpose(2, 3)[:, sequence, at] = 0.0
            keys, values = gathered.to(query.dtype)
            out[tile.tokens] = attend(
                query[tile.tokens],
                keys,
                values,
                tile.visible,
                scale=spec.scale,
                soft_cap=spec.soft_cap,
                sinks=sinks,
                slopes=slopes_of(spec, query.device),
                back=tile.back,
            )
        return out


def make_tiles(batch: Batch, group: int, window: int | None, page_size: int) -> list[Tile]:
    spans = [span for row in range(len(batch.rows)) for span in _spans(row, batch.rows[row], window, page_size)]
    tables = batch.groups[group].tables
    most = max(1, (CPU_KEYS_PER_TILE if tables.device.type == "cpu" else KEYS_PER_TILE) // page_size)
    return [_tile(part, tables, window, page_size) for part in _together(spans, most)]


def _spans(row: int, shape: tuple[int, int, int], window: int | None, page_size: int) -> list[Span]:
    start, count, length = shape
    spans = []
    for done in range(0, count, QUERIES_PER_TILE):
        n = min(QUERIES_PER_TILE, count - done)
        position = length - count + done
        lowest = 0 if window is None else max(0, position - window + 1)
        first = lowest // page_size
        spans.append(Span(row, start + done, n, position, first, (position + n - 1) // page_size + 1 - first))
    return spans


def _together(spans: list[Span], most_pages: int) -> list[list[Span]]:
    """Group one-token rows with rows that need at most twice their pages, so padding never doubles the work."""
    parts = [[span] for span in spans if span.count > 1]
    part: list[Span] = []
    for span in sorted((span for span in spans if span.count == 1), key=lambda span: -span.pages):
        if part and (span.pages * 2 < part[0].pages or part[0].pages * (len(part) + 1) > most_pages):
            parts.append(part)
            part = []
        part.append(span)
    return [*parts, part] if part else parts


def _tile(spans: list[Span], tables: Tensor, window: int | None, page_size: int) -> Tile:
    device = tables.device
    count, most = spans[0].count, max(span.pages for span in spans)
    # one copy to the device: row, token, position, first page
    numbers = torch.tensor([(s.row, s.token, s.position, s.first_page) for s in spans], dtype=torch.long).to(device)
    row, token, position, first = numbers.T.unsqueeze(-1)  # each [B, 1]
    columns = (first + torch.arange(most, device=device)).clamp_(max=tables.shape[1] - 1)
    step = torch.arange(count, device=device)
    query_at = (position + step).unsqueeze(-1)  # [B, N, 1]
    key_at = (first * page_size + torch.arange(most * page_size, device=device)).unsqueeze(1)  # [B, 1, S]
    back = query_at - key_at
    visible = back >= 0
    if window is not None:
        visible &= back < window
    sequence, at = torch.nonzero(~visible.any(dim=1), as_tuple=True)
    return Tile(token + step, tables[row, columns].long(), visible, back, (sequence, at))


class LatentAttention(AttentionBackend):
    """Latent attention, row by row: few tokens attend over latents, many over expanded keys and values."""

    def refuse(self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype) -> list[str]:  # noqa: ARG002
        return ["it requires a latent cache"] if spec.latent is None else []

    def run_latent(
        self,
        spec: AttentionSpec,
        latents: Latents,
        query: Tensor,
        rows: Tensor,
        kv: Tensor,
        batch: Batch,
        group: int,
        final: bool,
    ) -> Tensor:
        assert latents.table is None
        place_rows(rows, kv, batch.groups[group].write, batch.positions, latents.norm, latents.eps, latents.rotation)
        batch = batch.final if final else batch
        tables = batch.groups[group].tables
        query = turn_queries(query, latents.nope, batch.positions, latents.rotation)
        out = query.new_zeros(len(query), spec.heads, latents.values)
        few = [row for row, (_, count, _) in enumerate(batch.rows) if count and not latents.worth_expanding(count)]
        near = absorb(query, latents) if few else query
        found = near.new_zeros(len(query), spec.heads, len(latents.norm)) if few else out
        for row, (start, count, length) in enumerate(batch.rows):
            if not count:
                continue
            part = slice(start, start + count)
            pages = tables[row, : -(-length // kv.shape[3])].long()
            held = gather_rows(kv, pages, length).to(query.dtype)
            if latents.worth_expanding(count):
                out[part] = _expanded(spec, latents, query[part], held)
            else:
                found[part] = _absorbed(spec, near[part], held)
        for row in few:
            start, count, _ = batch.rows[row]
            part = slice(start, start + count)
            out[part] = torch.einsum("thr,hvr->thv", found[part], latents.up[:, latents.nope :])
        return out.flatten(1)


def absorb(query: Tensor, latents: Latents) -> Tensor:
    """Return query [T, heads, nope + rotary], with RoPE applied, in the latent space [T, heads, rank + rotary]."""
    near = torch.einsum("thn,hnr->thr", query[..., : latents.nope], latents.up[:, : latents.nope])
    return torch.cat((near, query[..., latents.nope :]), dim=-1)


def _absorbed(spec: AttentionSpec, query: Tensor, held: Tensor) -> Tensor:
    """Return [N, heads, rank] for query [N, heads, rank + rotary] of the last N of the rows held [S, rank + rotary]."""
    assert spec.latent is not None
    logits = (query.flatten(0, 1) @ held.t()).view(*query.shape[:2], -1).float() * spec.scale
    if len(query) > 1:
        logits.masked_fill_(~_visible(len(query), len(held), held.device)[:, None], float("-inf"))
    weights = logits.softmax(-1).to(held.dtype)
    return (weights.flatten(0, 1) @ held[:, : spec.latent]).view(*query.shape[:2], -1)


def _expanded(spec: AttentionSpec, latents: Latents, query: Tensor, held: Tensor) -> Tensor:
    """Return [N, heads, values] for query [N, heads, nope + rotary] of the last N of the rows held [S, rank + rotary]."""
    assert spec.latent is not None
    made = F.linear(held[:, : spec.latent], latents.up.flatten(0, 1)).view(len(held), spec.heads, -1)
    turned = held[:, None, spec.latent :].expand(-1, spec.heads, -1)
    keys, values = torch.cat((made[..., : latents.nope], turned), dim=-1), made[..., latents.nope :]
    whole = len(query) == len(held)
    out = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None], keys.transpose(0, 1)[None], values.transpose(0, 1)[None],
        attn_mask=None if whole else _visible(len(query), len(held), held.device), is_causal=whole, scale=spec.scale,
    )  # fmt: skip
    return out[0].transpose(0, 1)


def _visible(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return which keys queries see, [queries, keys] bool; the last key belongs to the last query."""
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril_(keys - queries)
