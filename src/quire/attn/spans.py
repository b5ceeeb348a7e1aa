"""Bidirectional attention within spans: tokens of an image attend to each other, or those of a whole prompt.

The backend attends causally; then this module replaces the outputs of each span's tokens. All keys are in the KV cache.

    keys of a span   [ unused | lowest ......... start | ......... | end )      lowest: window edge of the first token
                                                        ^ queries ^

If a prefix hit ends within a span, zeros stand for the queries of the tokens before: a matrix library then gets the same sizes
and strides, and the other queries have the same bits as without the hit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attn.batch import Batch, Span
from quire.ops.kv import attend, kv_gather

if TYPE_CHECKING:
    from quire.attn.backend import AttentionSpec


@dataclass(frozen=True)
class SpanTile:
    """The work of one span in the layers of a cache group."""

    tokens: slice  # of the batch
    before: int  # tokens of the span that are not in the batch
    pages: Tensor  # [1, P]
    keys: slice  # of the gathered pages
    visible: Tensor | None  # [1, before + N, S] bool; None: all keys


def attend_spans(
    spec: "AttentionSpec",
    queries_of: Callable[[slice], Tensor],
    kv: Tensor,
    batch: Batch,
    group: int,
    sinks: Tensor | None,
    out: Tensor,
) -> None:
    """Replace the rows of out [T, heads, head_dim] of tokens in the batch's spans.

    queries_of: returns the queries [N, heads, head_dim] of a slice of tokens
    kv: [pages, 2, kv_heads, page_size, head_dim] with this batch's keys and values
    """
    if not batch.spans:
        return
    assert spec.slopes is None
    if ("spans", group) not in batch.plans:
        batch.plans["spans", group] = make_span_tiles(batch, group, spec.window, kv.shape[3])
    tiles: list[SpanTile] = batch.plans["spans", group]
    for tile in tiles:
        query = F.pad(queries_of(tile.tokens), (0, 0, 0, 0, tile.before, 0))
        keys, values = kv_gather(kv, tile.pages)[:, :, :, tile.keys].to(query.dtype).contiguous()
        found = attend(query[None], keys, values, tile.visible, scale=spec.scale, soft_cap=spec.soft_cap, sinks=sinks)
        out[tile.tokens] = found[0, tile.before :]


def make_span_tiles(batch: Batch, group: int, window: int | None, page_size: int) -> list[SpanTile]:
    """Return the work of all spans that have tokens in the batch."""
    found = [_tile(span, batch.rows[span.row], batch.groups[group].tables, window, page_size) for span in batch.spans]
    return [tile for tile in found if tile is not None]


def _tile(span: Span, shape: tuple[int, int, int], tables: Tensor, window: int | None, page_size: int) -> SpanTile | None:
    first, count, length = shape
    begin, end = max(span.start, length - count), min(span.end, length)
    if begin >= end:
        return None
    lowest = 0 if window is None else max(0, span.start - window + 1)
    if not span.windowed:
        lowest = min(lowest, span.start)
    pages = tables[span.row : span.row + 1, lowest // page_size : (end - 1) // page_size + 1].long()
    offset = lowest // page_size * page_size
    visible = None
    if window is not None and end - window > lowest:
        query_at, key_at = (torch.arange(start, end, device=tables.device) for start in (span.start, lowest))
        visible = key_at > (query_at - window).unsqueeze(1)
        if not span.windowed:
            visible |= key_at >= span.start
    at = first + begin - (length - count)
    return SpanTile(
        slice(at, at + end - begin), begin - span.start, pages, slice(lowest - offset, end - offset),
        None if visible is None else visible[None],
    )  # fmt: skip
