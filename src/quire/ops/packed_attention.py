"""Bidirectional attention over packed sequences, without a KV cache: encoder-only models.

    tokens   [ a0 a1 a2 | b0 b1 | c0 c1 c2 c3 ]     every token sees all tokens of its own sequence, or those in its window
    starts   [ 0          3       5             9 ]

A bias is added to the scaled logits. It depends on the head and on the key's position relative to the query's:
`bias[head, reach + key - query]`, where `reach` is the longest supported distance. ALiBi and learned relative positions are
such tables.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

QUERIES_PER_PIECE = 512  # with a window: more would mostly read keys that are masked
# of each sequence: index of its first token, token count, and how many of its tokens, from the first one, are keys
Sequences = Sequence[tuple[int, int, int]]


def attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Sequences,
    starts: Tensor,
    plans: dict[Any, Any],
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """query, key and value [T, heads, head_dim] -> [T, heads, head_dim].

    starts: [R + 1] int32, on the device.
    plans: keeps what the layers of a step share.
    window: largest distance between a query and a key that it sees; None: no limit.
    bias: [heads, 2 * reach + 1] float32.
    """
    if query.is_cuda:
        from quire.ops.kernels import packed_attention

        return packed_attention.attend_packed(query, key, value, rows, starts, plans, scale=scale, window=window, bias=bias)
    return reference_attend_packed(query, key, value, rows, plans, scale=scale, window=window, bias=bias)


def reference_attend_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Sequences,
    plans: dict[Any, Any],
    *,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """As `attend_packed`, in torch. Neighbouring sequences of one length are one call."""
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for (count, keys), same in groupby((row for row in rows if row[1]), lambda row: row[1:]):
        alike = list(same)
        first, number = alike[0][0], len(alike)
        part = slice(first, first + number * count)
        # each [number, heads, count, head_dim]
        shape = number, count, *query.shape[1:]
        q, k, v = (x[part].view(shape).transpose(1, 2) for x in (query, key, value))
        target = out[part].view(shape).transpose(1, 2)
        windowed = window is not None and window < count - 1
        keyless = windowed and keys < count  # queries may see no key
        step = QUERIES_PER_PIECE if windowed else count
        for begin in range(0, count, step):
            end = min(begin + step, count)
            low, high = 0, keys
            if windowed and window is not None:
                low, high = min(max(0, begin - window), keys - 1), min(keys, end + window)
            mask = None
            if windowed or bias is not None:
                piece = ("packed", count, keys, begin, window, None if bias is None else bias.data_ptr(), query.dtype)
                if piece not in plans:
                    plans[piece] = _mask(begin, end, low, high, window, bias, query)
                mask = plans[piece]
            target[:, :, begin:end] = F.scaled_dot_product_attention(
                q[:, :, begin:end], k[:, :, low:high], v[:, :, low:high], attn_mask=mask, scale=scale
            )
            if keyless:
                target[:, :, begin:end].nan_to_num_(0.0)
    return out


def _mask(begin: int, end: int, low: int, high: int, window: int | None, bias: Tensor | None, like: Tensor) -> Tensor:
    """Return what is added to the logits [heads or 1, end - begin, high - low] of queries begin ... end, keys low ... high."""
    distance = torch.arange(low, high, device=like.device) - torch.arange(begin, end, device=like.device)[:, None]
    if bias is None:
        mask = torch.zeros(1, *distance.shape, dtype=torch.float32, device=like.device)
    else:
        mask = bias[:, distance + bias.shape[1] // 2]
    if window is not None:
        mask = mask.masked_fill(distance.abs() > window, float("-inf"))
    return mask.to(like.dtype)
