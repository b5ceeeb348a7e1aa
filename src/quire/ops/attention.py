"""Attention over keys and values that lie in one piece: the torch reference."""

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    *,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    back: Tensor | None = None,
) -> Tensor:
    """query [B, N, heads, head_dim], key and value [B, kv_heads, S, head_dim], visible [B, N, S] bool -> like query.

    The query heads that share a KV head are folded into the rows of one matrix, so keys are never repeated.
    `sinks` [heads]: a logit per head that takes part in the softmax and brings no value. `slopes` [heads]: what is taken from a
    key's logit, times `back` [B, N, S], how many positions it lies behind the query.
    """
    batch, count, heads, head_dim = query.shape
    kv_heads = key.shape[1]
    share = heads // kv_heads
    folded = query.view(batch, count, kv_heads, share, head_dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(batch, kv_heads, share * count, head_dim)
    mask = None if visible is None else visible[:, None].repeat(1, 1, share, 1)  # [B, 1, share * N, S]
    if soft_cap is None and sinks is None and slopes is None:
        out = F.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    else:
        logits = (folded.float() @ key.float().transpose(-1, -2)) * scale
        if soft_cap is not None:
            logits = torch.tanh(logits / soft_cap) * soft_cap
        if slopes is not None:
            assert back is not None
            lost = slopes.float().view(1, kv_heads, share, 1, 1) * back[:, None, None].float()  # [B, kv_heads, share, N, S]
            logits = logits - lost.flatten(2, 3)
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            extra = sinks.float().view(kv_heads, share, 1).expand(-1, -1, count).reshape(1, kv_heads, share * count, 1)
            logits = torch.cat((logits, extra.expand(batch, -1, -1, -1)), dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., : key.shape[2]]
        out = (weights @ value.float()).to(query.dtype)
    out = out.view(batch, kv_heads, share, count, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, count, heads, head_dim)
