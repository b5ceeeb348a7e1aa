"""KV cache pages: write and read them; reference attention over contiguous keys and values."""

import torch
import torch.nn.functional as F
from torch import Tensor

SCALE = torch.float32
MIN_SCALE = 1e-30
MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}


def kv_scales(kv: Tensor) -> Tensor | None:
    """Return the scales [pages, 2, kv_heads, page_size] float32 of an 8-bit cache, which is contiguous by page; None: more
    bits."""
    if kv.element_size() > 1:
        return None
    pages, _, heads, page_size, head_dim = kv.shape
    raw, size = kv.view(torch.uint8), SCALE.itemsize
    strides = kv.stride(0), heads * page_size * size, page_size * size, size, 1
    scales = raw.as_strided(
        (pages, 2, heads, page_size, size), strides, raw.storage_offset() + 2 * heads * page_size * head_dim
    )
    return scales.view(SCALE).squeeze(-1)


def round_kv(values: Tensor, dtype: torch.dtype, given: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantize values [..., head_dim] to 8 bits; return them and scales [...] float32, or the given ones."""
    most, wide = torch.finfo(dtype).max, values.float()
    if given is not None:
        return (wide / given.unsqueeze(-1)).clamp(-most, most).to(dtype), given.expand(values.shape[:-1])
    scale = (wide.abs().amax(-1) / most).clamp(min=MIN_SCALE)
    return (wide / scale.unsqueeze(-1)).to(dtype), scale


def kv_lines(kv: Tensor) -> Tensor | None:
    """Return the cache as [2, kv_heads, pages * page_size, head_dim] if it is contiguous in that order."""
    pages, _, heads, page_size, head_dim = kv.shape
    lines = kv.permute(1, 2, 0, 3, 4)
    return lines.view(2, heads, pages * page_size, head_dim) if lines.is_contiguous() else None


def is_contiguous_by_page(kv: Tensor) -> bool:
    """Return whether each page is contiguous memory."""
    _, _, heads, page_size, head_dim = kv.shape
    return kv.stride()[1:] == (heads * page_size * head_dim, page_size * head_dim, head_dim, 1)


def kv_write(kv: Tensor, key: Tensor, value: Tensor, write: Tensor) -> None:
    """Write key and value [T, kv_heads, head_dim]; write [T]: page * page_size + offset of each token."""
    KVTarget(kv, torch.stack((key, value), dim=1)).put(write)


class KVTarget:
    """Views for writing pairs [T, 2, kv_heads, head_dim], key and value of each token, to the cache."""

    def __init__(self, kv: Tensor, pairs: Tensor) -> None:
        self._scales = kv_scales(kv) if kv.element_size() == 1 else None
        self._lines = kv_lines(kv) if self._scales is None else None
        self._page_size = kv.shape[3]
        self._by_token = kv.transpose(2, 3)  # [pages, 2, page_size, kv_heads, head_dim]
        self._pairs = pairs if self._lines is None else pairs.permute(1, 2, 0, 3)

    def put(self, write: Tensor, given: Tensor | None = None) -> None:
        """Write to the cache. write [T]: page * page_size + offset of each token; given [2, kv_heads]: a checkpoint's."""
        if self._scales is not None:
            self._put_quantized(self._scales, write, given)
            return
        pairs = self._pairs if self._pairs.dtype == self._by_token.dtype else self._pairs.to(self._by_token.dtype)
        if self._lines is not None:
            self._lines.index_copy_(2, write, pairs)
        else:
            self._by_token[write // self._page_size, :, write % self._page_size] = pairs

    def _put_quantized(self, cache_scales: Tensor, write: Tensor, given: Tensor | None) -> None:
        numbers, scales = round_kv(self._pairs, self._by_token.dtype, given)
        page, offset = write // self._page_size, write % self._page_size
        self._by_token.view(torch.uint8)[page, :, offset] = numbers.view(torch.uint8)
        cache_scales.transpose(2, 3)[page, :, offset] = scales


def kv_gather(kv: Tensor, pages: Tensor) -> Tensor:
    """Return a copy [2, B, kv_heads, P * page_size, head_dim] of pages [B, P] in token order; float32 for an 8-bit cache."""
    count, _, heads, page_size, head_dim = kv.shape
    sequences, length = pages.shape
    if (scales := kv_scales(kv)) is not None:
        at = pages.flatten()
        numbers = kv.view(torch.uint8).index_select(0, at).view(kv.dtype).float()
        taken = numbers.mul_(scales.index_select(0, at).unsqueeze(-1))
        gathered = taken.view(sequences, length, 2, heads, page_size, head_dim).permute(2, 0, 3, 1, 4, 5)
    elif kv.is_contiguous():
        # one head's part of one page is one row, so a single copy puts everything in its final place
        rows = kv.view(count * 2 * heads, page_size * head_dim)
        lane = torch.arange(2 * heads, device=kv.device).view(2, 1, heads, 1)
        index = pages.long()[None, :, None, :] * (2 * heads) + lane  # [2, B, kv_heads, P]
        gathered = rows.index_select(0, index.flatten())
    elif kv.transpose(0, 1).is_contiguous():  # keys and values in separate memory
        rows = kv.transpose(0, 1).view(2, count, heads * page_size * head_dim)
        by_page = rows.index_select(1, pages.flatten()).view(2, sequences, length, heads, -1)
        gathered = by_page.transpose(2, 3)
    elif (lines := kv_lines(kv)) is not None:
        by_page = lines.view(2, heads, count, page_size * head_dim).index_select(2, pages.flatten())
        gathered = by_page.view(2, heads, sequences, -1).transpose(1, 2)
    else:
        taken = kv.index_select(0, pages.flatten()).view(sequences, length, 2, heads, page_size, head_dim)
        gathered = taken.permute(2, 0, 3, 1, 4, 5)
    return gathered.reshape(2, sequences, heads, length * page_size, head_dim)


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
    """Return attention's output, shaped like query [B, N, heads, head_dim].

    The query heads that share a KV head are folded into the rows of one matrix, so keys are never repeated.

    key, value: [B, kv_heads, S, head_dim]
    visible: [B, N, S] bool
    sinks: [heads] a logit per head that takes part in the softmax and has no value
    slopes: [heads] ALiBi slopes, subtracted from logits times `back` [B, N, S], the positions from key to query
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
            penalty = slopes.float().view(1, kv_heads, share, 1, 1) * back[:, None, None].float()  # [B, kv_heads, share, N, S]
            logits = logits - penalty.flatten(2, 3)
        if mask is not None:
            logits = logits.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            extra = sinks.float().view(kv_heads, share, 1).expand(-1, -1, count).reshape(1, kv_heads, share * count, 1)
            logits = torch.cat((logits, extra.expand(batch, -1, -1, -1)), dim=-1)
        weights = torch.softmax(logits, dim=-1)[..., : key.shape[2]]
        out = (weights @ value.float()).to(query.dtype)
    out = out.view(batch, kv_heads, share, count, head_dim).permute(0, 3, 1, 2, 4)
    return out.reshape(batch, count, heads, head_dim)
