"""Bidirectional attention over packed sequences (`ops/packed_attention.py`): one program for a tile of queries and a head.

Programs find their tiles on the device, so that a CUDA graph can run any sequences:

    rows       [ a: 130 tokens | b: 64 | c: 10 ]
    tile_ends  [ 3               4       5     ]     program 2 has the last tile of a, program 5 and later ones have none
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.ops.kernels.launcher import launched, power_of_two

LOG2_E = tl.constexpr(1.4426950408889634)
QUERIES, KEYS = 64, 64  # of a tile
ROW_BLOCKS = (64, 1024)  # sequences that a program looks through: few sizes, each of which is compiled


@launched
@triton.jit
def _attend_packed(
    query,  # [T, heads, HEAD_DIM]
    key,  # [T, heads, HEAD_DIM]
    value,  # [T, heads, HEAD_DIM]
    out,  # [T, heads, HEAD_DIM]
    bias,  # [heads, 2 * reach + 1] float32, if BIAS
    tile_ends,  # [R] int32 tiles of this and all earlier sequences
    key_counts,  # [R] int32 tokens of each sequence, from its first one, that are keys
    starts,  # [R + 1] int32
    rows,
    query_stride,  # between tokens
    key_stride,
    value_stride,
    out_stride,
    reach,
    window,
    scale,
    HEAD_DIM: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    WINDOW: tl.constexpr,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    each = tl.arange(0, ROWS)
    row = tl.sum((tl.load(tile_ends + each, mask=each < rows, other=2147483647) <= tile).to(tl.int32), 0)
    if row == rows:
        return
    first = (tile - tl.load(tile_ends + row - 1, mask=row > 0, other=0)) * M
    start = tl.load(starts + row).to(tl.int64)
    count = (tl.load(starts + row + 1) - start).to(tl.int32)
    keys = tl.minimum(tl.load(key_counts + row), count)
    dim = tl.arange(0, DIM_BLOCK)
    inside = dim < HEAD_DIM
    position = first + tl.arange(0, M)
    column = head * HEAD_DIM + dim
    asking = (position < count)[:, None] & inside[None, :]
    q = tl.load(query + (start + position)[:, None] * query_stride + column[None, :], mask=asking, other=0.0)
    low, high = 0, keys
    if WINDOW:
        low = tl.maximum(first - window, 0) // N * N
        high = tl.minimum(first + M + window, keys)
    acc = tl.zeros([M, DIM_BLOCK], tl.float32)
    peak = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    for begin in range(low, high, N):
        at = begin + tl.arange(0, N)
        there = (at < keys)[:, None] & inside[None, :]
        k = tl.load(key + (start + at)[:, None] * key_stride + column[None, :], mask=there, other=0.0)
        logit = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        distance = at[None, :] - position[:, None]
        visible = (at < keys)[None, :] & (position < count)[:, None]
        if WINDOW:
            visible &= (distance <= window) & (distance >= -window)
        if BIAS:
            logit += tl.load(bias + head * (2 * reach + 1) + reach + distance, mask=visible, other=0.0)
        logit = tl.where(visible, logit * LOG2_E, float("-inf"))
        higher = tl.maximum(peak, tl.max(logit, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(logit - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weight, 1)
        v = tl.load(value + (start + at)[:, None] * value_stride + column[None, :], mask=there, other=0.0)
        acc = tl.dot(weight.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        peak = higher
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + (start + position)[:, None] * out_stride + column[None, :], result.to(out.dtype.element_ty), mask=asking)


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Sequence[tuple[int, int, int]],
    starts: Tensor,
    plans: dict[Any, Any],
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """See `ops/packed_attention.py`. Heads of a token lie next to each other in query, key and value."""
    _, heads, head_dim = query.shape
    out, number = torch.empty(query.shape, dtype=query.dtype, device=query.device), len(starts) - 1
    if ("packed tiles",) not in plans:
        plans["packed tiles",] = ((starts.diff() + (QUERIES - 1)) // QUERIES).cumsum(0, dtype=torch.int32)
        plans["packed keys",] = _count_keys(rows, starts)
    if not len(query) or not number:
        return out
    block = max(16, power_of_two(head_dim))
    _attend_packed[(len(query) // QUERIES + number, heads)](
        query, key, value, out, query if bias is None else bias, plans["packed tiles",],
        plans["packed keys",], starts, number,
        query.stride(0), key.stride(0), value.stride(0), out.stride(0), 0 if bias is None else bias.shape[1] // 2,
        window or 0, scale,
        HEAD_DIM=head_dim, DIM_BLOCK=block, M=QUERIES, N=KEYS if block <= 128 else KEYS // 2, WINDOW=window is not None,
        BIAS=bias is not None, ROWS=next((size for size in ROW_BLOCKS if size >= number), power_of_two(number)),
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return out


def _count_keys(rows: Sequence[tuple[int, int, int]], starts: Tensor) -> Tensor:
    """Return how many tokens of each sequence are keys, [R] int32. rows: empty in a CUDA graph, where all tokens are."""
    if all(count == keys for _, count, keys in rows):
        return starts.diff()
    return torch.tensor([keys for _, _, keys in rows], dtype=torch.int32).to(starts.device, non_blocking=True)
